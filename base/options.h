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

/* The same where no options mean defaults. The copy's size is 0 when the caller's is not set. */
static inline void pst__read_optional(void *options, size_t size, const void *given) {
    memset(options, 0, size);
    if (given == NULL)
        memcpy(options, &size, sizeof size);
    else
        (void)pst__read_options(options, size, given);
}

/* Fills in a struct that begins with its size, as far as the caller's header and this library both
 * know it. Nothing where the size is not set. A size that is no struct's, as memory may hold it, is
 * never followed further than the struct is long here. */
static inline void pst__write_sized(void *to, const void *from, size_t size) {
    size_t given_size;
    memcpy(&given_size, to, sizeof given_size);
    if (given_size < sizeof given_size) return;
    const size_t known = given_size < size ? given_size : size;
    memcpy((char *)to + sizeof given_size, (const char *)from + sizeof given_size,
           known - sizeof given_size);
}

#endif
