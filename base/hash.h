/* FNV-1a over bytes, 64 bits: to compare what ranks have, never for security. */
#ifndef PST_BASE_HASH_H
#define PST_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

#define PST__HASH_SEED 14695981039346656037u

/* Continues `hash`, or PST__HASH_SEED. */
static inline uint64_t pst__hash(uint64_t hash, const void *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        hash = (hash ^ ((const unsigned char *)bytes)[i]) * 1099511628211u;
    return hash;
}

#endif
