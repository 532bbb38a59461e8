/* A communicator of ranks in one process on devices of `async_device.h`: `start` enqueues, and what
 * it enqueued meets the other ranks on a board when its stream gets there. A failure is a hang, as
 * on a network of GPUs: only an abort ends it. Two kinds: one that ends when all have read its
 * source; and a one-sided one, which ends when it has read what it needs, sums by `combine`, and
 * tells by `source_wait` when the others have read. */
#ifndef PST_TESTS_OPS_ASYNC_COMM_H
#define PST_TESTS_OPS_ASYNC_COMM_H

#include "async_device.h"

#include <penstock/comm.h>
#include <stdio.h>

#define BOARD_RANKS 4
#define OPENED      4

/* A ticket on the board. */
typedef struct board_ticket {
    pst_collective posted[BOARD_RANKS]; /* copies: only sources and sizes are read by others */
    char names[BOARD_RANKS][32];        /* theirs go with their engines */
    int is_posted[BOARD_RANKS], arrived;
    int reads[BOARD_RANKS];    /* ranks that have read this rank's source */
    void *copies[BOARD_RANKS]; /* of sources that lie in no opened memory */
} board_ticket;

typedef struct board {
    pthread_mutex_t lock;
    int size;
    board_ticket **tickets;
    size_t count;
    pst_status status; /* sticky */
    int is_aborted, readers;
    int aborter; /* 1 + the rank whose abort made it fail, if one did */
    char text[256];
    uint64_t fail_at; /* this ticket fails, on all ranks; 0: none */
} board;

typedef struct async_comm {
    pst_comm comm;
    pst_comm_ops ops;
    board *board;
    async_device *async;
    char text[256];
    char *opened[OPENED]; /* to the peers: what they read where it is */
    size_t opened_bytes[OPENED], opened_count;
    unsigned start_us; /* which `start` takes */
} async_comm;

static inline void board_open(board *board, int size) {
    memset(board, 0, sizeof *board);
    board->size = size;
    (void)pthread_mutex_init(&board->lock, NULL);
}

static inline void board_close(board *board) {
    for (size_t i = 0; i < board->count; i++) {
        for (int rank = 0; rank < BOARD_RANKS; rank++)
            free(board->tickets[i]->copies[rank]);
        free(board->tickets[i]);
    }
    free(board->tickets);
    (void)pthread_mutex_destroy(&board->lock);
}

/* ---- meeting; under the board's lock --------------------------------------------------------- */

static inline board_ticket *board_at(board *board, uint64_t ticket) {
    while (board->count < ticket) {
        board->tickets = realloc(board->tickets, (board->count + 1) * sizeof *board->tickets);
        board->tickets[board->count++] = calloc(1, sizeof(board_ticket));
    }
    return board->tickets[ticket - 1];
}

static inline void board_fail(board *board, pst_status status, const char *text) {
    if (board->status != PST_OK) return;
    board->status = status;
    (void)snprintf(board->text, sizeof board->text, "%s", text);
}

static inline int board_differ(const pst_collective *a, const pst_collective *b) {
    return a->kind != b->kind || strcmp(a->name, b->name) != 0 || a->dtype != b->dtype ||
           a->source_bytes != b->source_bytes || a->count != b->count ||
           a->is_pushed != b->is_pushed || a->segment_count != b->segment_count;
}

static inline int is_opened(const async_comm *comm, const char *source) {
    for (size_t i = 0; i < comm->opened_count; i++)
        if (source >= comm->opened[i] && source < comm->opened[i] + comm->opened_bytes[i]) return 1;
    return 0;
}

/* A small source that is not opened to peers is copied, and free when the collective has ended. */
static inline void board_copy_source(board_ticket *ticket, const async_comm *comm) {
    const int rank = comm->comm.rank;
    pst_collective *posted = &ticket->posted[rank];
    const char *source = posted->source;
    if (comm->ops.source_wait == NULL || posted->kind != PST_ALL_GATHER || source == NULL ||
        is_opened(comm, source))
        return;
    ticket->copies[rank] = malloc(posted->source_bytes + 1);
    memcpy(ticket->copies[rank], source, posted->source_bytes);
    posted->source = ticket->copies[rank];
}

static inline void board_post(const async_comm *comm, const pst_collective *mine) {
    board *board = comm->board;
    const int rank = comm->comm.rank;
    board_ticket *ticket = board_at(board, mine->ticket);
    char text[256];
    for (int peer = 0; peer < board->size; peer++) {
        const pst_collective *theirs = &ticket->posted[peer];
        if (!ticket->is_posted[peer] || !board_differ(mine, theirs)) continue;
        (void)snprintf(text, sizeof text, "ticket %llu: rank %d has %s '%s', rank %d %s '%s'",
                       (unsigned long long)mine->ticket, rank, pst_collective_name(mine->kind),
                       mine->name, peer, pst_collective_name(theirs->kind), theirs->name);
        board_fail(board, PST_EMISMATCH, text);
    }
    if (mine->ticket == board->fail_at) board_fail(board, PST_EPEER, "a peer is gone");
    ticket->posted[rank] = *mine;
    (void)snprintf(ticket->names[rank], sizeof ticket->names[rank], "%s", mine->name);
    ticket->posted[rank].name = ticket->names[rank];
    board_copy_source(ticket, comm);
    ticket->is_posted[rank] = 1;
    ticket->arrived++;
}

/* The streams go on after an abort, and write to what others may have been reading. */
static inline int board_lets_go(const board *board) {
    return board->is_aborted && board->readers == 0;
}

/* ---- data ------------------------------------------------------------------------------------ */

static inline void board_gather(const board_ticket *ticket, const pst_collective *mine) {
    for (size_t i = 0; i < mine->segment_count; i++) {
        const pst_segment *segment = &mine->segments[i];
        const char *source = ticket->posted[segment->peer].source;
        char *destination = (char *)mine->destination + segment->destination;
        if (segment->bytes == 0) continue;                     /* there may be no memory either */
        if (destination == source + segment->source) continue; /* where others read it */
        memmove(destination, source + segment->source, segment->bytes);
    }
}

static inline void board_sources(const board *board, const board_ticket *ticket, int rank,
                                 const pst_reduce_piece *piece, const void **sources) {
    for (int peer = 0; peer < board->size; peer++)
        sources[peer] = (const char *)ticket->posted[peer].source +
                        (size_t)rank * ticket->posted[peer].stride + piece->offset;
}

static inline void board_sum(const board *board, const board_ticket *ticket, int rank,
                             const pst_collective *mine, const pst_reduce_piece *piece,
                             void *destination, int accumulate) {
    const void *sources[BOARD_RANKS];
    board_sources(board, ticket, rank, piece, sources);
    const pst_sum sum = {.destination = destination,
                         .sources = sources,
                         .source_count = (size_t)board->size,
                         .count = piece->count,
                         .scale = mine->scale == 0 ? 1 : mine->scale,
                         .accumulate = accumulate,
                         .destination_dtype = piece->destination_dtype,
                         .source_dtype = mine->dtype};
    (void)pst__host_sum(&sum);
}

static inline void board_update(const board *board, const board_ticket *ticket, int rank,
                                const pst_collective *mine, const pst_reduce_piece *piece,
                                const pst_adamw_piece *update) {
    const void *sources[BOARD_RANKS];
    pst_adamw_piece whole = *update;
    board_sources(board, ticket, rank, piece, sources);
    whole.sources = sources;
    whole.source_count = (size_t)board->size;
    whole.scale = mine->scale == 0 ? 1 : mine->scale;
    whole.source_dtype = mine->dtype;
    (void)pst__host_adamw(&whole);
}

static inline void board_reduce(const board *board, const board_ticket *ticket, int rank,
                                const pst_collective *mine) {
    const pst_adamw_piece *next = mine->updates;
    for (size_t i = 0; i < mine->piece_count; i++) {
        const pst_reduce_piece *piece = &mine->pieces[i];
        if (piece->destination == NULL)
            board_update(board, ticket, rank, mine, piece, next++);
        else
            board_sum(board, ticket, rank, mine, piece, piece->destination, piece->accumulate);
    }
}

static inline void *board_all_reduce(const board *board, const board_ticket *ticket,
                                     const pst_collective *mine) {
    const void *sources[BOARD_RANKS];
    void *result = malloc(mine->count * pst_dtype_size(mine->dtype));
    for (int peer = 0; peer < board->size; peer++)
        sources[peer] = ticket->posted[peer].destination;
    const pst_sum sum = {.destination = result,
                         .sources = sources,
                         .source_count = (size_t)board->size,
                         .count = mine->count,
                         .scale = mine->scale == 0 ? 1 : mine->scale,
                         .destination_dtype = mine->dtype,
                         .source_dtype = mine->dtype};
    (void)(mine->reduce == PST_REDUCE_MAX ? pst__host_maximum(&sum) : pst__host_sum(&sum));
    return result;
}

/* ---- a collective on its stream -------------------------------------------------------------- */

typedef struct async_collective {
    async_comm *comm;
    pst_collective what;
    int phase;    /* 0: to be posted, 1: waits for all, 2: has read and waits for the readers */
    void *result; /* all-reduce: until all have read */
} async_collective;

static inline void async_read(async_collective *self, const board_ticket *ticket) {
    const board *board = self->comm->board;
    const int rank = self->comm->comm.rank;
    const pst_collective *what = &self->what;
    if (what->kind == PST_ALL_GATHER) board_gather(ticket, what);
    if (what->kind == PST_ALL_REDUCE) self->result = board_all_reduce(board, ticket, what);
    if (what->kind != PST_REDUCE_SCATTER) return;
    if (self->comm->ops.combine == NULL) {
        board_reduce(board, ticket, rank, what);
        return;
    }
    for (int peer = 0; peer < board->size; peer++) /* staging: a chunk of each rank */
        memcpy((char *)what->staging + (size_t)peer * what->source_bytes,
               (const char *)ticket->posted[peer].source +
                   (size_t)rank * ticket->posted[peer].stride,
               what->source_bytes);
}

static inline int async_is_over(const async_collective *self, const board_ticket *ticket) {
    const int reads_for_itself = self->comm->ops.source_wait != NULL && !self->what.is_pushed;
    if (reads_for_itself && self->what.kind != PST_ALL_REDUCE) return 1;
    return ticket->reads[self->comm->comm.rank] == self->comm->comm.size;
}

/* Called and left under the lock, which the data moves without. */
static inline void async_read_unlocked(async_collective *self, board_ticket *ticket) {
    board *board = self->comm->board;
    board->readers++;
    (void)pthread_mutex_unlock(&board->lock);
    async_read(self, ticket);
    (void)pthread_mutex_lock(&board->lock);
    board->readers--;
    for (int peer = 0; peer < board->size; peer++)
        ticket->reads[peer]++;
}

static inline pst_status async_advance(async_collective *self) {
    board *board = self->comm->board;
    if (self->phase == 0) board_post(self->comm, &self->what);
    if (self->phase == 0) self->phase = 1;
    if (board->status != PST_OK) return board_lets_go(board) ? PST_OK : PST_PENDING;
    board_ticket *ticket = board_at(board, self->what.ticket);
    if (ticket->arrived < board->size) return PST_PENDING;
    if (self->phase == 1) async_read_unlocked(self, ticket);
    self->phase = 2;
    if (!async_is_over(self, ticket)) return PST_PENDING;
    if (self->result != NULL && board->status == PST_OK)
        memcpy(self->what.destination, self->result,
               self->what.count * pst_dtype_size(self->what.dtype));
    return PST_OK;
}

static inline pst_status async_run_collective(void *argument) {
    async_collective *self = argument;
    board *board = self->comm->board;
    (void)pthread_mutex_lock(&board->lock);
    const pst_status status = async_advance(self);
    (void)pthread_mutex_unlock(&board->lock);
    if (status != PST_PENDING) free(self->result);
    return status;
}

/* Data is to be moved, which an abort waits for. 0: not any more. */
static inline int board_begin(board *board) {
    (void)pthread_mutex_lock(&board->lock);
    const int goes_on = !board->is_aborted;
    board->readers += goes_on;
    (void)pthread_mutex_unlock(&board->lock);
    return goes_on;
}

static inline void board_end(board *board) {
    (void)pthread_mutex_lock(&board->lock);
    board->readers--;
    (void)pthread_mutex_unlock(&board->lock);
}

static inline pst_status async_run_combine(void *argument) {
    const async_collective *self = argument;
    const pst_collective *what = &self->what;
    board_ticket staged = {.arrived = 0};
    if (!board_begin(self->comm->board)) return PST_OK;
    const int rank = self->comm->comm.rank;
    for (int peer = 0; peer < self->comm->board->size; peer++) {
        staged.posted[peer].source =
            (const char *)what->staging + (size_t)peer * what->source_bytes;
        staged.posted[peer].stride = 0;
    }
    if (what->is_pushed) /* the own chunk is read where it lies */
        staged.posted[rank].source = (const char *)what->source + (size_t)rank * what->stride;
    board_reduce(self->comm->board, &staged, rank, what);
    board_end(self->comm->board);
    return PST_OK;
}

typedef struct async_source {
    board *board;
    int rank;
    uint64_t ticket;
} async_source;

static inline pst_status async_run_source_wait(void *argument) {
    const async_source *self = argument;
    (void)pthread_mutex_lock(&self->board->lock);
    const int is_read = board_at(self->board, self->ticket)->reads[self->rank] == self->board->size;
    const int is_over = is_read || board_lets_go(self->board);
    (void)pthread_mutex_unlock(&self->board->lock);
    return is_over ? PST_OK : PST_PENDING;
}

/* ---- the table ------------------------------------------------------------------------------- */

static inline async_comm *async_comm_of(pst_comm *comm) {
    return comm->context;
}

static inline size_t async_staging(pst_comm *comm, const pst_collective *collective) {
    if (async_comm_of(comm)->ops.combine == NULL || collective->kind != PST_REDUCE_SCATTER)
        return 0;
    return (size_t)comm->size * collective->source_bytes;
}

static inline pst_status async_start(pst_comm *comm, const pst_collective *collective,
                                     pst_stream *stream, void **request) {
    const async_collective self = {.comm = async_comm_of(comm), .what = *collective};
    *request = NULL;
    if (self.comm->start_us > 0) async_sleep(self.comm->start_us);
    async_call(self.comm->async, stream, async_run_collective, &self, sizeof self);
    return PST_OK;
}

static inline pst_status async_combine(pst_comm *comm, const pst_collective *collective,
                                       pst_stream *stream) {
    const async_collective self = {.comm = async_comm_of(comm), .what = *collective};
    async_call(self.comm->async, stream, async_run_combine, &self, sizeof self);
    return PST_OK;
}

static inline pst_status async_open_memory(pst_comm *comm, void *memory, size_t bytes) {
    async_comm *self = async_comm_of(comm);
    (void)pthread_mutex_lock(&self->board->lock); /* the device may be looking at a source */
    const int has_room = self->opened_count < OPENED;
    if (has_room) {
        self->opened[self->opened_count] = memory;
        self->opened_bytes[self->opened_count++] = bytes;
    }
    (void)pthread_mutex_unlock(&self->board->lock);
    return has_room ? PST_OK : PST_ENOMEM;
}

static inline pst_status async_source_wait(pst_comm *comm, pst_stream *stream, uint64_t ticket) {
    async_comm *self = async_comm_of(comm);
    const async_source source = {self->board, comm->rank, ticket};
    async_call(self->async, stream, async_run_source_wait, &source, sizeof source);
    return PST_OK;
}

/* No data begins to move after this. */
static inline pst_status async_abort(pst_comm *comm, pst_status status) {
    board *board = async_comm_of(comm)->board;
    (void)pthread_mutex_lock(&board->lock);
    if (board->status == PST_OK) board->aborter = comm->rank + 1;
    board_fail(board, status, "aborted");
    board->is_aborted = 1;
    const pst_status result = board->readers > 0 ? PST_EBUSY : PST_OK;
    (void)pthread_mutex_unlock(&board->lock);
    return result;
}

static inline pst_status async_status(pst_comm *comm) {
    board *board = async_comm_of(comm)->board;
    (void)pthread_mutex_lock(&board->lock);
    const int is_peers = board->aborter != 0 && board->aborter != comm->rank + 1;
    const pst_status status = is_peers ? PST_EPEER : board->status;
    (void)pthread_mutex_unlock(&board->lock);
    return status;
}

static inline const char *async_error_text(pst_comm *comm) {
    async_comm *self = async_comm_of(comm);
    (void)pthread_mutex_lock(&self->board->lock);
    memcpy(self->text, self->board->text, sizeof self->text);
    (void)pthread_mutex_unlock(&self->board->lock);
    return self->text;
}

static inline void async_comm_destroy(pst_comm *comm) {
    free(async_comm_of(comm));
}

static inline pst_comm *async_comm_create(board *board, async_device *async, int rank,
                                          int one_sided, unsigned start_us) {
    async_comm *made = calloc(1, sizeof *made);
    made->ops = (pst_comm_ops){.api_version = PST_COMM_API_VERSION,
                               .kinds = (1u << PST_COLLECTIVE_KIND_COUNT) - 1u,
                               .name = "async",
                               .staging_bytes = async_staging,
                               .start = async_start,
                               .combine = one_sided ? async_combine : NULL,
                               .open_memory = one_sided ? async_open_memory : NULL,
                               .source_wait = one_sided ? async_source_wait : NULL,
                               .abort = async_abort,
                               .status = async_status,
                               .error_text = async_error_text,
                               .destroy = async_comm_destroy,
                               .pushes = one_sided,
                               .gathers_within = one_sided,
                               .updates = one_sided};
    made->comm = (pst_comm){&made->ops, made, rank, board->size};
    made->board = board;
    made->async = async;
    made->start_us = start_us;
    return &made->comm;
}

#endif
