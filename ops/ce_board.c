#include "ops/ce_board.h"

#include "base/atomic.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- opening --------------------------------------------------------------------------------- */

static pst__board *map(int descriptor) {
    void *mapped =
        mmap(NULL, sizeof(pst__board), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    return mapped == MAP_FAILED ? NULL : mapped;
}

static int board_create(pst__board **board) {
    const int made = memfd_create("penstock board", MFD_CLOEXEC);
    *board = NULL;
    if (made >= 0 && ftruncate(made, sizeof **board) == 0) *board = map(made);
    return made;
}

static pst_status map_peers(pst__boards *boards, const int *descriptors) {
    pst_status status = boards->boards[boards->rank] == NULL ? PST_ESYSTEM : PST_OK;
    for (int rank = 0; rank < boards->size; rank++) {
        if (rank == boards->rank) continue;
        if (descriptors[rank] >= 0) boards->boards[rank] = map(descriptors[rank]);
        if (descriptors[rank] >= 0) (void)close(descriptors[rank]);
        if (boards->boards[rank] == NULL) status = PST_ESYSTEM;
    }
    return status;
}

/* Two rounds: the descriptors, and whether all could map them. */
static pst_status share(const pst__link *link, pst__boards *boards, int descriptor) {
    pst__message messages[PST_CE_MAX_RANKS], mine = {.bytes = sizeof(pst__board)};
    int descriptors[PST_CE_MAX_RANKS], culprit;
    mine.status = boards->boards[link->rank] == NULL ? PST_ESYSTEM : PST_OK;
    pst_status status = pst__link_swap(link, &mine, descriptor, messages, descriptors, &culprit);
    if (status != PST_OK) return status;
    mine.status = map_peers(boards, descriptors);
    status = pst__link_swap(link, &mine, -1, messages, descriptors, &culprit);
    for (int rank = 0; status == PST_OK && rank < link->size; rank++)
        status = messages[rank].status;
    return status;
}

pst_status pst__boards_open(const pst__link *link, pst__boards *boards) {
    *boards = (pst__boards){.rank = link->rank, .size = link->size};
    const int descriptor = board_create(&boards->boards[link->rank]);
    const pst_status status = share(link, boards, descriptor);
    if (descriptor >= 0) (void)close(descriptor);
    if (status != PST_OK) pst__boards_close(boards);
    return status;
}

void pst__boards_close(pst__boards *boards) {
    for (int rank = 0; rank < boards->size; rank++) {
        if (boards->boards[rank] != NULL)
            (void)munmap(boards->boards[rank], sizeof *boards->boards[rank]);
        boards->boards[rank] = NULL;
    }
}

/* ---- fingerprints ---------------------------------------------------------------------------- */

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
    for (size_t i = 0; i < PST__BOARD_NAME / sizeof(uint64_t); i++)
        hash = mix(hash, fingerprint->name[i]);
    hash = mix(mix(hash, collective->ticket), (uint64_t)collective->dtype);
    hash = mix(mix(hash, (uint64_t)collective->reduce), (uint64_t)collective->root);
    hash =
        mix_double(mix(hash, collective->stride), collective->scale == 0 ? 1 : collective->scale);
    return collective->kind == PST_ALL_GATHER ? mix_segments(hash, collective) : hash;
}

pst__fingerprint pst__fingerprint_of(const pst_collective *collective, uint32_t region,
                                     size_t offset) {
    pst__fingerprint made = {.kind = (uint32_t)collective->kind, .bytes = bytes_of(collective)};
    if (collective->name != NULL)
        memcpy(made.name, collective->name, strnlen(collective->name, PST__BOARD_NAME - 1));
    const uint64_t hash = mix(mix(hash_of(collective, &made), region), offset);
    made.hash = (uint32_t)(hash ^ hash >> 32);
    return made;
}

/* ---- comparing ------------------------------------------------------------------------------- */

static void describe(char *text, size_t size, int rank, const pst__fingerprint *fingerprint) {
    char name[PST__BOARD_NAME];
    memcpy(name, fingerprint->name, sizeof name);
    name[sizeof name - 1] = '\0';
    (void)snprintf(text, size, "rank %d: %s '%s' of %llu bytes", rank,
                   pst_collective_name((pst_collective_kind)fingerprint->kind), name,
                   (unsigned long long)fingerprint->bytes);
}

/* Word by word, as another rank may be writing its next entry there: then the text is of no use,
 * but nothing else depends on it. */
static pst__fingerprint read_fingerprint(const pst__fingerprint *from) {
    pst__fingerprint copy = {.hash = pst__load_relaxed(&from->hash),
                             .kind = pst__load_relaxed(&from->kind),
                             .bytes = pst__load_relaxed(&from->bytes)};
    for (size_t i = 0; i < PST__BOARD_NAME / sizeof(uint64_t); i++)
        copy.name[i] = pst__load_relaxed(&from->name[i]);
    return copy;
}

static void write_fingerprint(pst__fingerprint *to, const pst__fingerprint *from) {
    pst__store_relaxed(&to->hash, from->hash);
    pst__store_relaxed(&to->kind, from->kind);
    pst__store_relaxed(&to->bytes, from->bytes);
    for (size_t i = 0; i < PST__BOARD_NAME / sizeof(uint64_t); i++)
        pst__store_relaxed(&to->name[i], from->name[i]);
}

pst_status pst__boards_compare(pst__boards *boards, uint32_t sequence, uint64_t ticket,
                               const pst__fingerprint *mine, int *peer, char *text, size_t size) {
    const size_t place = ticket % PST__BOARD_ENTRIES;
    const uint64_t word = (uint64_t)sequence << 32 | mine->hash;
    pst__board_entry *own = &boards->boards[boards->rank]->entries[place];
    write_fingerprint(&own->fingerprint, mine);
    /* Release: pairs with the acquire below, on the peers: who sees the word sees what it is of. */
    pst__store_release(&own->word, word);
    pst__fence_store_load(); /* with the peers' fence: one of the two sees the other's word */
    for (*peer = 0; *peer < boards->size; ++*peer) {
        const pst__board_entry *entry = &boards->boards[*peer]->entries[place];
        const uint64_t theirs = pst__load_acquire(&entry->word);
        if (theirs == 0 || theirs >> 32 != sequence || theirs == word) continue;
        char here[128], there[128];
        const pst__fingerprint copy = read_fingerprint(&entry->fingerprint);
        describe(here, sizeof here, boards->rank, mine);
        describe(there, sizeof there, *peer, &copy);
        (void)snprintf(
            text, size,
            "ticket %llu is not the same collective on all ranks: %s, %s; all must start "
            "equal ones in one order, on the same place of registered memory",
            (unsigned long long)ticket, here, there);
        return PST_EMISMATCH;
    }
    return PST_OK;
}

/* ---- failing --------------------------------------------------------------------------------- */

void pst__boards_fail(pst__boards *boards, pst_status status, const char *text) {
    pst__board *own = boards->boards[boards->rank];
    (void)snprintf(own->text, sizeof own->text, "%s", text);
    /* Release: pairs with the acquire in find_failed, which then reads the text; and all that this
     * rank does to its waits afterwards is seen later than this. */
    pst__store_release(&own->failure, (int)status);
}

int pst__boards_find_failed(const pst__boards *boards, pst_status *status) {
    for (int rank = 0; rank < boards->size; rank++) {
        *status = (pst_status)pst__load_acquire(&boards->boards[rank]->failure); /* see above */
        if (rank != boards->rank && *status != PST_OK) return rank;
    }
    return -1;
}

const char *pst__boards_text(const pst__boards *boards, int rank) {
    return boards->boards[rank]->text;
}

void pst__boards_leave(pst__boards *boards) {
    /* Release: pairs with the acquire in has_left, which follows the sight of the closed socket. */
    pst__store_release(&boards->boards[boards->rank]->left, 1);
}

int pst__boards_has_left(const pst__boards *boards, int rank) {
    return pst__load_acquire(&boards->boards[rank]->left); /* see above */
}
