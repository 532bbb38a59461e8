#include "ops/comm/audit.h"

#include "base/clock.h"
#include "ops/comm/fingerprint.h"

#include <ck_spinlock.h>
#include <stdio.h>
#include <string.h>

/* How many collectives can still be named: more than a rank is ahead of another. */
#define NOTES 4096u

/* A round at most so often. */
#define ROUND_NS 10000000u

typedef struct note {
    uint64_t hash; /* of all collectives up to this one; never 0 */
    pst__fingerprint fingerprint;
} note;

/* What a rank says in a round. */
typedef struct answer {
    uint64_t started;
    note asked; /* of the collective that is asked for; hash 0: not known any more */
} answer;

struct pst__audit {
    const pst__heap *heap;
    pst_comm *host;
    size_t ranks;

    ck_spinlock_t writing; /* of `started` and `notes` */
    uint64_t started;
    note notes[NOTES]; /* number n at n % NOTES; number 0 is before the first one */

    ck_spinlock_t looking; /* of all that follows */
    int is_over, is_asking;
    uint64_t next_round;            /* pst__now() */
    uint64_t equal, differs, asked; /* up to `equal` all is; at `differs` it is not (0: nowhere) */
    pst_collective round;
    void *request;
    pst_segment *segments;
    answer mine, *answers, *different; /* by rank: of this round, of the one for `differs` */
    size_t staging_bytes;
};

/* ---- life ------------------------------------------------------------------------------------ */

static size_t answer_bytes(const pst__audit *audit) {
    return audit->ranks * sizeof(answer);
}

static void audit_free(pst__audit *audit) {
    const pst__heap *heap = audit->heap;
    pst__heap_free(heap, audit->round.staging, audit->staging_bytes);
    pst__heap_free(heap, audit->segments, audit->ranks * sizeof *audit->segments);
    pst__heap_free(heap, audit->answers, answer_bytes(audit));
    pst__heap_free(heap, audit->different, answer_bytes(audit));
    pst__heap_free(heap, audit, sizeof *audit);
}

static int audit_alloc(pst__audit *audit) {
    audit->segments = pst__heap_alloc(audit->heap, audit->ranks * sizeof *audit->segments);
    audit->answers = pst__heap_alloc(audit->heap, answer_bytes(audit));
    audit->different = pst__heap_alloc(audit->heap, answer_bytes(audit));
    if (audit->segments == NULL || audit->answers == NULL || audit->different == NULL) return 0;
    for (size_t rank = 0; rank < audit->ranks; rank++)
        audit->segments[rank] =
            (pst_segment){(uint32_t)rank, 0, rank * sizeof(answer), sizeof(answer)};
    audit->round = (pst_collective){.kind = PST_ALL_GATHER,
                                    .name = "audit",
                                    .dtype = PST_UINT8,
                                    .source = &audit->mine,
                                    .source_bytes = sizeof audit->mine,
                                    .destination = audit->answers,
                                    .segments = audit->segments,
                                    .segment_count = audit->ranks};
    audit->staging_bytes = audit->host->ops->staging_bytes(audit->host, &audit->round);
    if (audit->staging_bytes == 0) return 1;
    audit->round.staging = pst__heap_alloc(audit->heap, audit->staging_bytes);
    return audit->round.staging != NULL;
}

pst__audit *pst__audit_open(const pst__heap *heap, pst_comm *host) {
    pst__audit *audit = pst__heap_alloc(heap, sizeof *audit);
    if (audit == NULL) return NULL;
    audit->heap = heap;
    audit->host = host;
    audit->ranks = (size_t)host->size;
    audit->notes[0].hash = 1;
    ck_spinlock_init(&audit->writing);
    ck_spinlock_init(&audit->looking);
    if (audit_alloc(audit)) return audit;
    audit_free(audit);
    return NULL;
}

void pst__audit_close(pst__audit *audit) {
    if (audit == NULL) return;
    if (audit->is_asking) {
        pst_comm *host = audit->host;
        const pst_status aborted = host->ops->abort(host, PST_ECANCELED);
        (void)host->ops->test(host, audit->request); /* it has ended, and gives its request back */
        if (aborted != PST_OK) return;
    }
    audit_free(audit);
}

/* ---- notes ----------------------------------------------------------------------------------- */

static uint64_t chain(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
    return hash == 0 ? 1 : hash;
}

void pst__audit_note(pst__audit *audit, const pst_collective *collective) {
    const pst__fingerprint made = pst__fingerprint_of(collective, 0, 0);
    ck_spinlock_lock(&audit->writing);
    const uint64_t before = audit->notes[audit->started % NOTES].hash;
    audit->notes[++audit->started % NOTES] = (note){chain(before, made.hash), made};
    ck_spinlock_unlock(&audit->writing);
}

static uint64_t started(pst__audit *audit) {
    ck_spinlock_lock(&audit->writing);
    const uint64_t count = audit->started;
    ck_spinlock_unlock(&audit->writing);
    return count;
}

static void write_answer(pst__audit *audit) {
    ck_spinlock_lock(&audit->writing);
    const int is_known = audit->started - audit->asked < NOTES;
    audit->mine.started = audit->started;
    audit->mine.asked = is_known ? audit->notes[audit->asked % NOTES] : (note){0};
    ck_spinlock_unlock(&audit->writing);
}

/* ---- rounds; with `looking` held ------------------------------------------------------------- */

/* The first rank that differs from rank 0; 0: none. */
static size_t find_different(const answer *answers, size_t ranks) {
    for (size_t rank = 1; rank < ranks; rank++)
        if (answers[rank].asked.hash != answers[0].asked.hash) return rank;
    return 0;
}

static int is_known_to_all(const pst__audit *audit) {
    for (size_t rank = 0; rank < audit->ranks; rank++)
        if (audit->answers[rank].asked.hash == 0) return 0;
    return 1;
}

static uint64_t started_by_all(const pst__audit *audit) {
    uint64_t fewest = audit->answers[0].started;
    for (size_t rank = 1; rank < audit->ranks; rank++)
        if (audit->answers[rank].started < fewest) fewest = audit->answers[rank].started;
    return fewest;
}

static pst_status report_difference(pst__audit *audit, char *text, size_t size) {
    const size_t other = find_different(audit->different, audit->ranks);
    char first[128], second[128];
    pst__fingerprint_describe(&audit->different[0].asked.fingerprint, 0, first, sizeof first);
    pst__fingerprint_describe(&audit->different[other].asked.fingerprint, (int)other, second,
                              sizeof second);
    (void)snprintf(text, size,
                   "number %llu is not the same collective on all ranks: %s, %s; all must start "
                   "equal ones in one order",
                   (unsigned long long)audit->differs, first, second);
    audit->is_over = 1;
    return PST_EMISMATCH;
}

/* All ranks have the same answers, and so come to the same. */
static pst_status conclude(pst__audit *audit, char *text, size_t size) {
    audit->next_round = pst__now() + ROUND_NS;
    if (is_known_to_all(audit) && find_different(audit->answers, audit->ranks) != 0) {
        audit->differs = audit->asked;
        memcpy(audit->different, audit->answers, answer_bytes(audit));
    } else {
        audit->equal = audit->asked;
    }
    if (audit->differs != 0 && audit->differs == audit->equal + 1)
        return report_difference(audit, text, size);
    audit->asked = audit->differs != 0 ? audit->equal + (audit->differs - audit->equal) / 2
                                       : started_by_all(audit);
    return PST_OK;
}

static pst_status ask(pst__audit *audit) {
    write_answer(audit);
    audit->round.ticket++;
    return audit->host->ops->start(audit->host, &audit->round, NULL, &audit->request);
}

static int is_due(pst__audit *audit) {
    return pst__now() >= audit->next_round &&
           (audit->differs != 0 || started(audit) > audit->equal);
}

static pst_status go_on(pst__audit *audit, char *text, size_t size) {
    if (audit->is_over || (!audit->is_asking && !is_due(audit))) return PST_OK;
    const pst_status status =
        audit->is_asking ? audit->host->ops->test(audit->host, audit->request) : ask(audit);
    audit->is_asking = status == PST_PENDING;
    if (status == PST_OK) return conclude(audit, text, size);
    if (status == PST_PENDING) return PST_OK;
    (void)snprintf(text, size, "%s", audit->host->ops->error_text(audit->host));
    audit->is_over = 1;
    return PST_ECANCELED;
}

pst_status pst__audit_look(pst__audit *audit, char *text, size_t size) {
    if (!ck_spinlock_trylock(&audit->looking)) return PST_OK;
    const pst_status status = go_on(audit, text, size);
    ck_spinlock_unlock(&audit->looking);
    return status;
}

int pst__audit_is_done(pst__audit *audit) {
    if (!ck_spinlock_trylock(&audit->looking)) return 0;
    const int is_done = audit->is_over || (!audit->is_asking && audit->equal == started(audit));
    ck_spinlock_unlock(&audit->looking);
    return is_done;
}
