/* Parameter structs that begin with their size: fields that the caller's header did not know yet
 * read as zero, and those that this library does not know yet are not read. */
#ifndef PST_BASE_OPTIONS_H
#define PST_BASE_OPTIONS_H

#include <string.h>

/* 0 when there are no options or their size is not set. */
static inline int pst__read_options(void *options, size_t size, const void *given) {
    size_t given_size = 0;
    if (given != NULL) memcpy(&given_size, given, sizeof given_size);
    if (given_size < sizeof given_size) return 0;
    memset(options, 0, size);
    memcpy(options, given, given_size < size ? given_size : size);
    return 1;
}

#endif
