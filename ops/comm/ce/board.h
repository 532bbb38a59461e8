/* What ranks publish past the devices: a page of each rank's that all can read. Which
 * collectives it has started, so that a difference is an error and not a wrong sum, and why it has
 * failed. One rank writes a board, all read it; nothing blocks. */
#ifndef PST_OPS_COMM_CE_BOARD_H
#define PST_OPS_COMM_CE_BOARD_H

#include "ops/comm/ce/link.h"
#include "ops/comm/fingerprint.h"

#define PST__BOARD_TEXT    256
#define PST__BOARD_ENTRIES 256

typedef struct pst__board_entry {
    uint64_t word; /* sequence number, hash */
    pst__fingerprint fingerprint;
} pst__board_entry;

typedef struct pst__board {
    int failure; /* pst_status: why this rank has failed */
    int left;    /* this rank has destroyed its communicator */
    char text[PST__BOARD_TEXT];
    pst__board_entry entries[PST__BOARD_ENTRIES];
} pst__board;

typedef struct pst__boards {
    int rank, size;
    pst__board *boards[PST_CE_MAX_RANKS]; /* by rank */
} pst__boards;

/* Collective over `link`; it succeeds on all ranks or fails on all. PST_ESYSTEM, PST_EPEER. */
pst_status pst__boards_open(const pst__link *link, pst__boards *boards);
void pst__boards_close(pst__boards *boards);

/* Publishes what this rank starts under `sequence` and compares it with what the others have so
 * far: of two ranks that differ, one at least finds out. PST_EMISMATCH: with *peer, and into `text`
 * what both have started. */
pst_status pst__boards_compare(pst__boards *boards, uint32_t sequence, uint64_t ticket,
                               const pst__fingerprint *mine, int *peer, char *text, size_t size);

/* Publishes that this rank has failed. Once. */
void pst__boards_fail(pst__boards *boards, pst_status status, const char *text);
/* The first peer that has failed, and its status; -1: none. */
int pst__boards_find_failed(const pst__boards *boards, pst_status *status);
const char *pst__boards_text(const pst__boards *boards, int rank);
void pst__boards_leave(pst__boards *boards);
int pst__boards_has_left(const pst__boards *boards, int rank);

#endif
