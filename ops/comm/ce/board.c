#include "ops/comm/ce/board.h"

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

/* ---- comparing ------------------------------------------------------------------------------- */

/* Word by word, as another rank may be writing its next entry there: then the text is of no use,
 * but nothing else depends on it. */
static pst__fingerprint read_fingerprint(const pst__fingerprint *from) {
    pst__fingerprint copy = {.hash = pst__load_relaxed(&from->hash),
                             .kind = pst__load_relaxed(&from->kind),
                             .dtype = pst__load_relaxed(&from->dtype),
                             .bytes = pst__load_relaxed(&from->bytes)};
    for (size_t i = 0; i < PST__FINGERPRINT_NAME / sizeof(uint64_t); i++)
        copy.name[i] = pst__load_relaxed(&from->name[i]);
    return copy;
}

static void write_fingerprint(pst__fingerprint *to, const pst__fingerprint *from) {
    pst__store_relaxed(&to->hash, from->hash);
    pst__store_relaxed(&to->kind, from->kind);
    pst__store_relaxed(&to->dtype, from->dtype);
    pst__store_relaxed(&to->bytes, from->bytes);
    for (size_t i = 0; i < PST__FINGERPRINT_NAME / sizeof(uint64_t); i++)
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
        pst__fingerprint_describe(mine, boards->rank, here, sizeof here);
        pst__fingerprint_describe(&copy, *peer, there, sizeof there);
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
