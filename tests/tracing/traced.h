/* A trace on counting allocator hooks, for the tests of tracing. */
#ifndef PST_TESTS_TRACING_TRACED_H
#define PST_TESTS_TRACING_TRACED_H

#include "base/clock.h"
#include "tests/base/counting_heap.h"
#include "tests/cmocka_all.h"
#include "tracing/trace.h"

#include <stdio.h>
#include <unistd.h>

typedef struct traced {
    counting_heap counts;
    pst__heap heap;
    pst__error error;
    pst__trace *trace;
} traced;

static inline pst_status traced_open(traced *traced, int rank, int world_size, size_t records) {
    memset(traced, 0, sizeof *traced);
    traced->heap = counting_heap_open(&traced->counts);
    pst__error_init(&traced->error, NULL, NULL);
    return pst__trace_create(&traced->heap, &traced->error, rank, world_size, records, 0,
                             &traced->trace);
}

/* Returns the bytes that were not given back. */
static inline long traced_close(traced *traced) {
    pst__trace_destroy(traced->trace);
    return traced->counts.live_bytes;
}

static inline const char *traced_error(traced *traced) {
    static char text[PST__ERROR_BYTES];
    (void)pst__error_get(&traced->error, text, sizeof text);
    return text;
}

/* Writes the trace and returns the file's text, to be freed; NULL if that did not work. */
static inline char *traced_text(traced *traced) {
    char path[] = "/tmp/penstock-trace-XXXXXX";
    int descriptor = mkstemp(path);
    if (descriptor < 0) return NULL;
    char *text = NULL;
    if (pst__trace_write(traced->trace, path, 0) == PST_OK) {
        off_t bytes = lseek(descriptor, 0, SEEK_END);
        text = calloc((size_t)bytes + 1, 1);
        if (text != NULL && pread(descriptor, text, (size_t)bytes, 0) != bytes) text[0] = '\0';
    }
    (void)close(descriptor);
    (void)unlink(path);
    return text;
}

static inline size_t occurrences(const char *text, const char *part) {
    size_t count = 0;
    for (const char *at = strstr(text, part); at != NULL; at = strstr(at + 1, part))
        ++count;
    return count;
}

#endif
