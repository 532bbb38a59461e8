#include "mem/pool.h"

#include <string.h>

/* ---- sorted sets of pieces ---------------------------------------------------------------- */

static int before_by_offset(const pst__piece *a, const pst__piece *b) {
    return a->offset < b->offset;
}

/* By bytes, then the longest released, then by offset. */
static int before_by_size(const pst__piece *a, const pst__piece *b) {
    if (a->bytes != b->bytes) return a->bytes < b->bytes;
    if (a->released != b->released) return a->released < b->released;
    return a->offset < b->offset;
}

/* Makes room for `count` pieces in all. PST_ENOMEM. */
static pst_status reserve_pieces(const pst__heap *heap, pst__pieces *pieces, size_t count) {
    return pst__heap_grow(heap, (void **)&pieces->items, &pieces->capacity, count,
                          sizeof *pieces->items);
}

static void free_pieces(const pst__heap *heap, pst__pieces *pieces) {
    pst__heap_free(heap, pieces->items, pieces->capacity * sizeof *pieces->items);
    pieces->items = NULL;
    pieces->count = pieces->capacity = 0;
}

/* Index of the first piece that is not before `key`; `count` if there is none. */
static size_t find_piece(const pst__pieces *pieces, const pst__piece *key) {
    size_t low = 0, high = pieces->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (pieces->before(pieces->items[middle], key))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* There must be room. */
static void insert_piece(pst__pieces *pieces, pst__piece *piece) {
    size_t at = find_piece(pieces, piece);
    memmove(pieces->items + at + 1, pieces->items + at,
            (pieces->count - at) * sizeof *pieces->items);
    pieces->items[at] = piece;
    pieces->count++;
}

/* The piece must be in the set, its sort key unchanged since it was inserted. */
static void remove_piece(pst__pieces *pieces, const pst__piece *piece) {
    size_t at = find_piece(pieces, piece);
    pieces->count--;
    memmove(pieces->items + at, pieces->items + at + 1,
            (pieces->count - at) * sizeof *pieces->items);
}

/* ---- the pool ----------------------------------------------------------------------------- */

void pst__pool_init(pst__pool *pool, const pst__heap *heap, pst_device *device) {
    *pool = (pst__pool){.heap = heap, .device = device};
    pool->by_offset.before = before_by_offset;
    pool->free.before = before_by_size;
    pool->pending.before = before_by_size;
}

void pst__pool_free(pst__pool *pool) {
    for (size_t i = 0; i < pool->by_offset.count; i++)
        pst__heap_free(pool->heap, pool->by_offset.items[i], sizeof(pst__piece));
    while (pool->spare != NULL) {
        pst__piece *next = pool->spare->next_spare;
        pst__heap_free(pool->heap, pool->spare, sizeof(pst__piece));
        pool->spare = next;
    }
    free_pieces(pool->heap, &pool->by_offset);
    free_pieces(pool->heap, &pool->free);
    free_pieces(pool->heap, &pool->pending);
}

/* ---- nodes ---------------------------------------------------------------------------------- */

static void put_spare(pst__pool *pool, pst__piece *piece) {
    piece->next_spare = pool->spare;
    pool->spare = piece;
    pool->spare_count++;
}

static pst__piece *take_spare(pst__pool *pool) {
    pst__piece *piece = pool->spare;
    pool->spare = piece->next_spare;
    pool->spare_count--;
    *piece = (pst__piece){0};
    return piece;
}

/* Gets all memory that adding `more` pieces can need, so that nothing fails half-way. Each size set
 * has room for all pieces: giving one back must not fail. */
static pst_status reserve(pst__pool *pool, size_t more) {
    size_t total = pool->by_offset.count + more;
    pst_status status = reserve_pieces(pool->heap, &pool->by_offset, total);
    if (status == PST_OK) status = reserve_pieces(pool->heap, &pool->free, total);
    if (status == PST_OK) status = reserve_pieces(pool->heap, &pool->pending, total);
    if (status != PST_OK) return status;
    while (pool->spare_count < more) {
        pst__piece *piece = pst__heap_alloc(pool->heap, sizeof *piece);
        if (piece == NULL) return PST_ENOMEM;
        put_spare(pool, piece);
    }
    return PST_OK;
}

/* ---- states --------------------------------------------------------------------------------- */

/* The set by size that holds pieces of this state, or NULL. */
static pst__pieces *set_of(pst__pool *pool, pst__piece_state state) {
    switch (state) {
    case PST__PIECE_FREE:
        return &pool->free;
    case PST__PIECE_PENDING:
        return &pool->pending;
    case PST__PIECE_LEASED:
    case PST__PIECE_QUARANTINED:
        break;
    }
    return NULL;
}

static int is_available(const pst__piece *piece) {
    return piece->state == PST__PIECE_FREE || piece->state == PST__PIECE_PENDING;
}

static void leave_set(pst__pool *pool, const pst__piece *piece) {
    pst__pieces *set = set_of(pool, piece->state);
    if (set != NULL) remove_piece(set, piece);
}

static void enter_set(pst__pool *pool, pst__piece *piece) {
    pst__pieces *set = set_of(pool, piece->state);
    if (set != NULL) insert_piece(set, piece);
}

static void set_state(pst__pool *pool, pst__piece *piece, pst__piece_state state) {
    leave_set(pool, piece);
    piece->state = state;
    piece->released = state == PST__PIECE_PENDING ? ++pool->releases : 0;
    enter_set(pool, piece);
}

void pst__pool_quarantine(pst__pool *pool, pst__piece *piece) {
    set_state(pool, piece, PST__PIECE_QUARANTINED);
    pool->quarantined += piece->bytes;
}

/* ---- splitting and merging ------------------------------------------------------------------ */

static size_t index_of(const pst__pool *pool, const pst__piece *piece) {
    return find_piece(&pool->by_offset, piece);
}

static pst__piece *at_index(const pst__pool *pool, size_t index) {
    return index < pool->by_offset.count ? pool->by_offset.items[index] : NULL;
}

static pst__piece *right_of(const pst__pool *pool, const pst__piece *piece) {
    pst__piece *right = at_index(pool, index_of(pool, piece) + 1);
    return right == NULL || right->starts_segment ? NULL : right;
}

static pst__piece *left_of(const pst__pool *pool, const pst__piece *piece) {
    return piece->starts_segment ? NULL : at_index(pool, index_of(pool, piece) - 1);
}

/* Cuts a piece so that its right part, of the same state, starts at `offset`. A node is spare. */
static void split(pst__pool *pool, pst__piece *piece, size_t offset) {
    pst__piece *right = take_spare(pool);
    *right = *piece;
    right->offset = offset;
    right->bytes = piece->offset + piece->bytes - offset;
    right->starts_segment = 0;
    leave_set(pool, piece);
    piece->bytes = offset - piece->offset;
    enter_set(pool, piece);
    insert_piece(&pool->by_offset, right);
    enter_set(pool, right);
}

/* Adds the right neighbour's bytes to a piece. */
static void absorb(pst__pool *pool, pst__piece *piece, pst__piece *right) {
    leave_set(pool, right);
    remove_piece(&pool->by_offset, right);
    leave_set(pool, piece);
    piece->bytes += right->bytes;
    enter_set(pool, piece);
    put_spare(pool, right);
}

static void make_free(pst__pool *pool, pst__piece *piece) {
    set_state(pool, piece, PST__PIECE_FREE);
    pst__piece *right = right_of(pool, piece);
    if (right != NULL && right->state == PST__PIECE_FREE) absorb(pool, piece, right);
    pst__piece *left = left_of(pool, piece);
    if (left != NULL && left->state == PST__PIECE_FREE) absorb(pool, left, piece);
}

/* ---- events --------------------------------------------------------------------------------- */

/* Adds those of `events` that are not in the list; 0 when they do not fit. */
static int add_events(pst_event **list, size_t *count, pst_event *const *events, size_t more) {
    for (size_t i = 0; i < more; i++) {
        size_t known = 0;
        while (known < *count && list[known] != events[i])
            known++;
        if (known < *count) continue;
        if (*count == PST_LEASE_EVENTS) return 0;
        list[(*count)++] = events[i];
    }
    return 1;
}

/* Drops the events that are done. Returns what the first failed one returned, or PST_OK. */
static pst_status drop_done_events(pst__pool *pool, pst__piece *piece) {
    size_t kept = 0;
    for (size_t i = 0; i < piece->after_count; i++) {
        pst_status status = pool->device->ops->event_query(pool->device, piece->after[i]);
        if (status < 0) return status;
        if (status == PST_PENDING) piece->after[kept++] = piece->after[i];
    }
    piece->after_count = kept;
    return PST_OK;
}

void pst__pool_settle(pst__pool *pool) {
    /* Backwards: what becomes free leaves this set, and merging changes only the other one. */
    for (size_t i = pool->pending.count; i-- > 0;) {
        pst__piece *piece = pool->pending.items[i];
        if (drop_done_events(pool, piece) != PST_OK)
            pst__pool_quarantine(pool, piece);
        else if (piece->after_count == 0)
            make_free(pool, piece);
    }
}

static int names(const pst__piece *piece, const pst_event *event) {
    for (size_t i = 0; i < piece->after_count; i++)
        if (piece->after[i] == event) return 1;
    return 0;
}

pst_status pst__pool_forget(pst__pool *pool, const pst_event *event) {
    pst__pool_settle(pool);
    for (size_t i = 0; i < pool->by_offset.count; i++) {
        pst__piece *piece = pool->by_offset.items[i];
        if (piece->state == PST__PIECE_QUARANTINED) piece->after_count = 0; /* never asked again */
        if (piece->state == PST__PIECE_LEASED) (void)drop_done_events(pool, piece);
        if (names(piece, event)) return PST_PENDING;
    }
    return PST_OK;
}

void pst__pool_forget_events(pst__pool *pool) {
    for (size_t i = 0; i < pool->pending.count; i++)
        pool->pending.items[i]->after_count = 0;
    pst__pool_settle(pool);
}

/* ---- taking --------------------------------------------------------------------------------- */

static pst__piece *best_fit(const pst__pieces *set, size_t bytes) {
    size_t at = find_piece(set, &(pst__piece){.bytes = bytes});
    return at < set->count ? set->items[at] : NULL;
}

/* Bytes of the neighbours from `first` on that reach `bytes` with few enough events; 0 if none. */
static size_t run_length(const pst__pool *pool, size_t first, size_t bytes) {
    pst_event *events[PST_LEASE_EVENTS];
    size_t count = 0, length = 0;
    for (size_t i = first; i < pool->by_offset.count; i++) {
        const pst__piece *piece = pool->by_offset.items[i];
        if (!is_available(piece) || (i > first && piece->starts_segment)) return 0;
        if (!add_events(events, &count, piece->after, piece->after_count)) return 0;
        length += piece->bytes;
        if (length >= bytes) return length;
    }
    return 0;
}

static pst__piece *best_run(const pst__pool *pool, size_t bytes) {
    pst__piece *best = NULL;
    size_t best_length = SIZE_MAX;
    for (size_t i = 0; i < pool->by_offset.count; i++) {
        size_t length = run_length(pool, i, bytes);
        if (length == 0 || length >= best_length) continue;
        best = pool->by_offset.items[i];
        best_length = length;
    }
    return best;
}

/* The piece that holds `offset`, or NULL behind the last one. */
static pst__piece *piece_at(const pst__pool *pool, size_t offset) {
    size_t at = find_piece(&pool->by_offset, &(pst__piece){.offset = offset});
    pst__piece *piece = at_index(pool, at);
    if (piece != NULL && piece->offset == offset) return piece;
    piece = at == 0 ? NULL : at_index(pool, at - 1);
    return piece != NULL && offset - piece->offset < piece->bytes ? piece : NULL;
}

/* Why [offset, end) cannot be leased, or NULL; collects the events that it waits for. */
static const char *obstacle(const pst__pool *pool, const pst__piece *first, size_t end,
                            pst_event **events, size_t *count) {
    const pst__piece *piece = first;
    for (;;) {
        if (piece->state == PST__PIECE_LEASED) return "a lease holds a part of it";
        if (piece->state == PST__PIECE_QUARANTINED) return "a part of it is in quarantine";
        if (!add_events(events, count, piece->after, piece->after_count))
            return "it waits for more events than a lease can name";
        if (piece->offset + piece->bytes >= end) return NULL;
        piece = right_of(pool, piece);
        if (piece == NULL) return "it reaches beyond the end of a segment";
    }
}

/* Leases the range from the pieces that hold it. Two nodes are spare. */
static pst_status claim(pst__pool *pool, size_t offset, size_t bytes, pst__piece **leased,
                        const char **reason) {
    pst_event *events[PST_LEASE_EVENTS];
    size_t count = 0, end = offset + bytes;
    pst__piece *piece = piece_at(pool, offset);
    *reason = piece == NULL ? "no segment holds it" : obstacle(pool, piece, end, events, &count);
    if (*reason != NULL) return PST_EBUSY;
    if (piece->offset < offset) {
        split(pool, piece, offset);
        piece = right_of(pool, piece);
    }
    while (piece->offset + piece->bytes < end) {
        pst__piece *right = right_of(pool, piece);
        if (right->offset + right->bytes > end) split(pool, right, end);
        absorb(pool, piece, right);
    }
    if (piece->offset + piece->bytes > end) split(pool, piece, end);
    set_state(pool, piece, PST__PIECE_LEASED);
    memcpy(piece->after, events, count * sizeof *events);
    piece->after_count = count;
    *leased = piece;
    return PST_OK;
}

pst_status pst__pool_take(pst__pool *pool, size_t bytes, pst__piece **leased) {
    pst_status status = reserve(pool, 2);
    if (status != PST_OK) return status;
    pst__pool_settle(pool);
    const pst__piece *best = best_fit(&pool->free, bytes);
    if (best == NULL) best = best_fit(&pool->pending, bytes);
    if (best == NULL) best = best_run(pool, bytes);
    if (best == NULL) return PST_EBUSY;
    const char *reason;
    return claim(pool, best->offset, bytes, leased, &reason);
}

pst_status pst__pool_take_at(pst__pool *pool, size_t offset, size_t bytes, pst__piece **leased,
                             const char **reason) {
    pst_status status = reserve(pool, 2);
    if (status != PST_OK) return status;
    pst__pool_settle(pool);
    return claim(pool, offset, bytes, leased, reason);
}

/* ---- giving --------------------------------------------------------------------------------- */

pst__piece *pst__pool_find_leased(const pst__pool *pool, size_t offset) {
    pst__piece *piece = piece_at(pool, offset);
    if (piece == NULL || piece->offset != offset || piece->state != PST__PIECE_LEASED) return NULL;
    return piece;
}

void pst__pool_give(pst__pool *pool, pst__piece *piece, pst_event *event) {
    if (event != NULL) {
        piece->after[0] = event;
        piece->after_count = 1;
    }
    if (drop_done_events(pool, piece) != PST_OK)
        pst__pool_quarantine(pool, piece);
    else if (piece->after_count == 0)
        make_free(pool, piece);
    else
        set_state(pool, piece, PST__PIECE_PENDING);
}

/* ---- segments ------------------------------------------------------------------------------- */

pst_status pst__pool_add(pst__pool *pool, size_t offset, size_t bytes) {
    pst_status status = reserve(pool, 1);
    if (status != PST_OK) return status;
    pst__piece *piece = take_spare(pool);
    *piece = (pst__piece){.offset = offset, .bytes = bytes, .starts_segment = 1};
    insert_piece(&pool->by_offset, piece);
    enter_set(pool, piece);
    return PST_OK;
}

int pst__pool_remove(pst__pool *pool, size_t offset) {
    pst__piece *last = at_index(pool, pool->by_offset.count - 1);
    if (last->offset != offset || last->state != PST__PIECE_FREE) return 0;
    leave_set(pool, last);
    remove_piece(&pool->by_offset, last);
    put_spare(pool, last);
    return 1;
}

size_t pst__pool_largest(const pst__pool *pool) {
    size_t largest = 0;
    if (pool->free.count > 0) largest = pool->free.items[pool->free.count - 1]->bytes;
    if (pool->pending.count == 0) return largest;
    size_t pending = pool->pending.items[pool->pending.count - 1]->bytes;
    return pending > largest ? pending : largest;
}
