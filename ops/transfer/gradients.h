/* Both ends of a gradient's way: its source, which is held until it has been copied into a bucket,
 * and its target, which the sum goes to. */
#ifndef PST_OPS_TRANSFER_GRADIENTS_H
#define PST_OPS_TRANSFER_GRADIENTS_H

#include "ops/transfer/carrier.h"

/* ---- sources --------------------------------------------------------------------------------- */

/* Sources that are copied beside compute, with one event behind them. */
typedef struct pst__source_batch {
    pst_event *copied;
    size_t tokens, bytes;
} pst__source_batch;

#define PST__SOURCE_BATCHES 8

/* A ring of batches. Compute does not wait for one as long as little is held behind it. */
typedef struct pst__sources_held {
    pst__carrier *carrier;
    void (*consumed)(void *context, void *token); /* (optional) a source is not read any more */
    void *context;
    pst__source_batch batches[PST__SOURCE_BATCHES];
    size_t first, count, bytes;
    void **tokens; /* the batches', oldest first, and behind them those of no batch yet */
    size_t token_count, token_capacity;
} pst__sources_held;

/* Before copies begin: room for a batch of so many tokens. Releases what has been copied; where too
 * much is held, compute waits for the oldest batches. */
pst_status pst__sources_reserve(pst__sources_held *held, size_t tokens, size_t bytes);
/* Behind the copies: the next token of the batch, for which there is room. */
void pst__sources_add(pst__sources_held *held, void *token);
/* A token whose source nobody copies. */
static inline void pst__sources_drop(const pst__sources_held *held, void *token) {
    if (held->consumed != NULL) held->consumed(held->context, token);
}
/* What was added becomes a batch; where compute's own stream has copied, it is released at once. */
pst_status pst__sources_submit(pst__sources_held *held, size_t bytes);
/* Compute waits for all batches, which are released. */
pst_status pst__sources_join(pst__sources_held *held);
/* A backward is given up: compute waits for all copies that were begun, those of `more` sources too
 * that are in no batch, and all batches are released, even where compute cannot wait any more. */
void pst__sources_abandon(pst__sources_held *held, size_t more);
/* Releases all, where they have been copied or nobody will read them. */
void pst__sources_release_all(pst__sources_held *held);
void pst__sources_free(pst__sources_held *held);

/* ---- targets --------------------------------------------------------------------------------- */

/* This rank's memory for a parameter's reduced gradient. */
typedef struct pst__target {
    void *memory; /* NULL: none */
    size_t count;
    pst_dtype dtype;
    int has_sum;     /* it holds gradients since the last update */
    int is_old;      /* it holds those of an earlier update */
    int adds;        /* the latest gradient is added to what it holds */
    uint64_t bucket; /* number of the bucket that has the latest gradient, or the end of it */
} pst__target;

static inline void *pst__target_at(const pst__target *target, size_t element) {
    return (char *)target->memory + element * pst_dtype_size(target->dtype);
}

/* A gradient goes into buckets. */
static inline void pst__target_add(pst__target *target) {
    target->adds = target->has_sum;
    target->has_sum = 1;
}

/* The latest gradient does not go out. */
static inline void pst__target_forget(pst__target *target) {
    if (!target->adds) target->has_sum = 0;
}

/* The first backward behind an update begins. */
static inline void pst__target_begin(pst__target *target) {
    target->is_old |= target->has_sum;
    target->has_sum = 0;
}

/* Before an update: zeros, where there was no gradient since the last one. On compute's stream. */
pst_status pst__target_zero_old(const pst__carrier *carrier, pst__target *target);

#endif
