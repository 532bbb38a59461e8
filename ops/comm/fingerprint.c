#include "ops/comm/fingerprint.h"

#include "ops/comm/sums.h"

#include <stdio.h>
#include <string.h>

static uint64_t mix(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 29;
}

static uint64_t mix_double(uint64_t hash, double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return mix(hash, bits);
}

static uint64_t mix_segments(uint64_t hash, const pst_collective *collective) {
    for (size_t i = 0; i < collective->segment_count; i++) {
        const pst_segment *segment = &collective->segments[i];
        hash = mix(mix(hash, segment->peer), segment->source);
        hash = mix(hash, segment->bytes);
    }
    return hash;
}

static uint64_t bytes_of(const pst_collective *collective) {
    if (collective->kind == PST_ALL_REDUCE || collective->kind == PST_BROADCAST)
        return collective->count * pst_dtype_size(collective->dtype);
    return collective->source_bytes;
}

static uint64_t hash_of(const pst_collective *collective, const pst__fingerprint *fingerprint) {
    uint64_t hash = mix(fingerprint->kind, fingerprint->bytes);
    for (size_t i = 0; i < PST__FINGERPRINT_NAME / sizeof(uint64_t); i++)
        hash = mix(hash, fingerprint->name[i]);
    hash = mix(mix(hash, collective->ticket), (uint64_t)collective->dtype);
    hash = mix(mix(hash, (uint64_t)collective->reduce), (uint64_t)collective->root);
    hash = mix(hash, collective->is_pushed ? UINT64_MAX : collective->stride);
    hash = mix_double(hash, pst__scale_of(collective));
    return collective->kind == PST_ALL_GATHER ? mix_segments(hash, collective) : hash;
}

pst__fingerprint pst__fingerprint_of(const pst_collective *collective, uint32_t region,
                                     size_t offset) {
    pst__fingerprint made = {.kind = (uint16_t)collective->kind,
                             .dtype = (uint16_t)collective->dtype,
                             .bytes = bytes_of(collective)};
    if (collective->name != NULL)
        memcpy(made.name, collective->name, strnlen(collective->name, PST__FINGERPRINT_NAME - 1));
    const uint64_t hash = mix(mix(hash_of(collective, &made), region), offset);
    made.hash = (uint32_t)(hash ^ hash >> 32);
    return made;
}

void pst__fingerprint_describe(const pst__fingerprint *fingerprint, int rank, char *text,
                               size_t size) {
    char name[PST__FINGERPRINT_NAME];
    const int has_data = fingerprint->kind != PST_BARRIER;
    memcpy(name, fingerprint->name, sizeof name);
    name[sizeof name - 1] = '\0';
    (void)snprintf(text, size, "rank %d: %s '%s' of %llu bytes%s%s", rank,
                   pst_collective_name((pst_collective_kind)fingerprint->kind), name,
                   (unsigned long long)fingerprint->bytes, has_data ? " of " : "",
                   has_data ? pst_dtype_name((pst_dtype)fingerprint->dtype) : "");
}
