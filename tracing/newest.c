/* Which records a file of limited size holds: those since a moment, the same for all tracks. */
#include "tracing/state.h"

#include <string.h>

/* What a record takes at most, but for its texts. An event has some 100 bytes, and a collective's
 * arguments as many. */
#define EVENT_BYTES     160u
#define ARGUMENTS_BYTES 160u
#define TRACK_BYTES     512u

static size_t bytes_of(const char *text) {
    return text == NULL ? 0 : strlen(text);
}

static uint64_t record_bytes(const pst__record *record) {
    uint64_t bytes = EVENT_BYTES + bytes_of(record->name);
    if (record->kind == PST__RECORD_SLICE && record->ticket != 0)
        bytes += ARGUMENTS_BYTES + bytes_of(record->name) + bytes_of(record->path);
    return bytes;
}

/* Counts what ends at `moment` or later; `others`: how many records end before. */
static uint64_t bytes_since(const pst__copy *first, uint64_t moment, uint64_t *others) {
    uint64_t bytes = TRACK_BYTES;
    *others = 0;
    for (const pst__copy *copy = first; copy != NULL; copy = copy->next) {
        bytes += TRACK_BYTES;
        for (size_t i = 0; i < copy->count; ++i) {
            if (copy->records[i].end < moment)
                ++*others;
            else
                bytes += record_bytes(&copy->records[i]);
        }
    }
    return bytes;
}

static uint64_t latest_end(const pst__copy *first, uint64_t begin) {
    uint64_t latest = begin;
    for (const pst__copy *copy = first; copy != NULL; copy = copy->next)
        for (size_t i = 0; i < copy->count; ++i)
            if (copy->records[i].end > latest) latest = copy->records[i].end;
    return latest;
}

uint64_t pst__newest(const pst__copy *first, uint64_t most_bytes, uint64_t *begin) {
    uint64_t before, others; /* what is over before the recording is none of it */
    uint64_t low = *begin, high = latest_end(first, low) + 1;
    if (bytes_since(first, low, &before) <= most_bytes) return 0;
    while (low < high) {
        const uint64_t middle = low + (high - low) / 2;
        if (bytes_since(first, middle, &others) > most_bytes)
            low = middle + 1;
        else
            high = middle;
    }
    *begin = low;
    (void)bytes_since(first, low, &others);
    return others - before;
}
