/* A file of JSON text, written through one buffer. Errors are sticky: write on, ask at the end. */
#ifndef PST_TRACING_JSON_H
#define PST_TRACING_JSON_H

#include "base/heap.h"

typedef struct pst__json {
    const pst__heap *heap;
    char *buffer;
    size_t used;
    int descriptor;
    int error; /* errno of the first failure, 0 */
} pst__json;

/* Creates or truncates the file. PST_EIO: see `error`; PST_ENOMEM. */
pst_status pst__json_open(pst__json *json, const pst__heap *heap, const char *path);
/* Flushes, closes, frees. PST_EIO if anything failed since the opening; `error` says why. */
pst_status pst__json_close(pst__json *json);

void pst__json_raw(pst__json *json, const char *text);
/* In quotes, escaped. Bytes that are not UTF-8 become U+FFFD. NULL counts as "". */
void pst__json_string(pst__json *json, const char *text);
void pst__json_unsigned(pst__json *json, uint64_t value);
void pst__json_signed(pst__json *json, int64_t value);
/* Nanoseconds as microseconds with three decimals. */
void pst__json_microseconds(pst__json *json, uint64_t nanoseconds);

#endif
