#define _GNU_SOURCE
#include "threads.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { MAX_THREADS = 256 };

typedef struct {
    void (*work)(const void *, int64_t, char *);
    const void *context;
    int64_t items, bytes;
    atomic_llong next;
} Shared;

static int run(Shared *shared) {
    char *memory = malloc(shared->bytes);
    if (!memory) return 1;
    for (;;) {
        int64_t item = atomic_fetch_add(&shared->next, 1);
        if (item >= shared->items) break;
        shared->work(shared->context, item, memory);
    }
    free(memory);
    return 0;
}

/* A thread without memory leaves its items to the others. */
static void *start(void *shared) {
    run(shared);
    return 0;
}

int64_t kvpack_start_threads(pthread_t *threads, int64_t most, void *(*start)(void *), void *context) {
    sigset_t all, before;
    int64_t count = 0;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (count < most && !pthread_create(&threads[count], 0, start, context)) count++;
    pthread_sigmask(SIG_SETMASK, &before, 0);
    return count;
}

int kvpack_for_each(void (*work)(const void *, int64_t, char *), const void *context, int64_t items, int64_t threads, int64_t bytes) {
    Shared shared = {work, context, items, bytes, 0};
    pthread_t started[MAX_THREADS];
    if (threads > items) threads = items;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    int64_t count = threads > 1 ? kvpack_start_threads(started, threads - 1, start, &shared) : 0;
    int failed = run(&shared);
    for (int64_t i = 0; i < count; i++) pthread_join(started[i], 0);
    /* The other threads may still complete all items. */
    return failed && atomic_load(&shared.next) < items;
}
