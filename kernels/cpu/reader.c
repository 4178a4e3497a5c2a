/* Threads that read a file before its bytes are needed. They do not use Python, whose threads would wait for each other at every read. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <sys/time.h>
#include <unistd.h>

#include "interface.h"
#include "threads.h"

enum { MAX_READERS = 64 };

typedef struct {
    Read *reads;
    int64_t count, piece, block, next, begun, allowed, done;
    int64_t threads;
    int descriptor, stopped;
    pthread_mutex_t lock;
    pthread_cond_t more_allowed, more_done;
    pthread_t thread[MAX_READERS];
} Reader;

static int read_all(int descriptor, char *data, int64_t bytes, int64_t offset, int64_t block) {
    while (bytes > 0) {
        ssize_t count = pread(descriptor, data, (bytes + block - 1) / block * block, offset);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return 0;
        data += count;
        bytes -= count;
        offset += count;
    }
    return 1;
}

static void *read_pieces(void *given) {
    Reader *reader = given;
    pthread_mutex_lock(&reader->lock);
    for (;;) {
        while (!reader->stopped && reader->next == reader->allowed && reader->next < reader->count)
            pthread_cond_wait(&reader->more_allowed, &reader->lock);
        if (reader->stopped || reader->next == reader->count) break;
        Read *read = &reader->reads[reader->next];
        int64_t begin = reader->begun, bytes = read->bytes - begin < reader->piece ? read->bytes - begin : reader->piece;
        reader->begun += bytes;
        if (reader->begun == read->bytes) {
            reader->next++;
            reader->begun = 0;
        }
        pthread_mutex_unlock(&reader->lock);
        int made = read_all(reader->descriptor, read->data + begin, bytes, read->offset + begin, reader->block);
        pthread_mutex_lock(&reader->lock);
        read->ended += bytes;
        if (!made) read->failed = 1;
        int64_t before = reader->done;
        while (reader->done < reader->next && reader->reads[reader->done].ended == reader->reads[reader->done].bytes) reader->done++;
        if (reader->done > before) pthread_cond_signal(&reader->more_done);
    }
    pthread_mutex_unlock(&reader->lock);
    return 0;
}

/* Starts threads that will make `reads` in order. They share the pieces of a read, which have up to `piece` bytes, and request whole blocks
   of `block` bytes. No read begins before kvpack_reader_allow permits it. Returns NULL if no thread starts. Otherwise, the caller must call
   kvpack_reader_stop before a fork, before `reads` or their memory are freed, and before the descriptor is closed. */
EXPORTED void *kvpack_reader_start(int descriptor, Read *reads, int64_t count, int64_t piece, int64_t threads, int64_t block) {
    Reader *reader = calloc(1, sizeof(Reader));
    if (!reader) return 0;
    reader->reads = reads;
    reader->count = count;
    reader->piece = piece;
    reader->block = block;
    reader->descriptor = descriptor;
    if (pthread_mutex_init(&reader->lock, 0)) goto no_lock;
    if (pthread_cond_init(&reader->more_allowed, 0)) goto no_first;
    if (pthread_cond_init(&reader->more_done, 0)) goto no_second;
    reader->threads = kvpack_start_threads(reader->thread, threads < MAX_READERS ? threads : MAX_READERS, read_pieces, reader);
    if (reader->threads) return reader;
    pthread_cond_destroy(&reader->more_done);
no_second:
    pthread_cond_destroy(&reader->more_allowed);
no_first:
    pthread_mutex_destroy(&reader->lock);
no_lock:
    free(reader);
    return 0;
}

/* Permits writing to the memory of reads below `upto` from now on. */
EXPORTED void kvpack_reader_allow(void *given, int64_t upto) {
    Reader *reader = given;
    pthread_mutex_lock(&reader->lock);
    if (upto > reader->allowed) reader->allowed = upto < reader->count ? upto : reader->count;
    pthread_cond_broadcast(&reader->more_allowed);
    pthread_mutex_unlock(&reader->lock);
}

/* Waits at most a few milliseconds for the reads below `upto`. Returns whether they have finished. */
EXPORTED int64_t kvpack_reader_wait(void *given, int64_t upto, int64_t milliseconds) {
    Reader *reader = given;
    struct timeval now;
    gettimeofday(&now, 0);
    int64_t microseconds = now.tv_usec + 1000 * milliseconds;
    struct timespec end = {now.tv_sec + microseconds / 1000000, microseconds % 1000000 * 1000};
    pthread_mutex_lock(&reader->lock);
    while (reader->done < upto && !pthread_cond_timedwait(&reader->more_done, &reader->lock, &end)) continue;
    int64_t ended = reader->done >= upto;
    pthread_mutex_unlock(&reader->lock);
    return ended;
}

/* Waits for reads in progress, starts no others, and frees the reader. */
EXPORTED void kvpack_reader_stop(void *given) {
    Reader *reader = given;
    pthread_mutex_lock(&reader->lock);
    reader->stopped = 1;
    pthread_cond_broadcast(&reader->more_allowed);
    pthread_mutex_unlock(&reader->lock);
    for (int64_t i = 0; i < reader->threads; i++) pthread_join(reader->thread[i], 0);
    pthread_cond_destroy(&reader->more_done);
    pthread_cond_destroy(&reader->more_allowed);
    pthread_mutex_destroy(&reader->lock);
    free(reader);
}
