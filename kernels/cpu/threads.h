/* Threads of one call. None outlives it, so a fork is safe, and the host's own threads and settings are not changed. */
#ifndef KVPACK_THREADS_H
#define KVPACK_THREADS_H

#include <pthread.h>
#include <stdint.h>

/* Starts up to `most` threads that run start(context), with signals blocked, which the host's threads handle; returns how many started. */
int64_t kvpack_start_threads(pthread_t *threads, int64_t most, void *(*start)(void *context), void *context);

/* Calls work(context, item, memory) for every item below `items` in at most `threads` threads, the caller's among them, each with
   memory of `bytes` bytes. Returns 0, or 1 if the caller's own thread gets no memory. */
int kvpack_for_each(void (*work)(const void *context, int64_t item, char *memory), const void *context, int64_t items, int64_t threads,
                    int64_t bytes);

#endif
