/* Threads of one call. No thread outlives its call, so forks are safe, and the host's own threads and settings do not change. */
#ifndef KVPACK_THREADS_H
#define KVPACK_THREADS_H

#include <pthread.h>
#include <stdint.h>

/* Starts up to `most` threads that run start(context), and returns how many started. Signals are blocked in them, so that the host's
   threads handle signals. */
int64_t kvpack_start_threads(pthread_t *threads, int64_t most, void *(*start)(void *context), void *context);

/* Calls work(context, item, memory) for every item below `items`, in at most `threads` threads including the caller's. Each thread has its
   own memory of `bytes` bytes. Returns 0, or 1 if there is no memory for the caller's own thread. */
int kvpack_for_each(void (*work)(const void *context, int64_t item, char *memory), const void *context, int64_t items, int64_t threads,
                    int64_t bytes);

#endif
