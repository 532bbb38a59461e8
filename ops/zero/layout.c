#include "ops/zero/layout.h"

#include <string.h>

static size_t chunk_rows(size_t rows, size_t world) {
    return rows / world + (rows % world != 0);
}

pst__rows pst__rows_of(size_t rows, size_t world, size_t rank) {
    size_t chunk = chunk_rows(rows, world);
    size_t first = chunk == 0 || rank > rows / chunk ? rows : rank * chunk;
    if (first > rows) first = rows;
    size_t left = rows - first;
    return (pst__rows){first, left < chunk ? left : chunk};
}

/* ---- arithmetic that remembers an overflow --------------------------------------------------- */

static size_t multiply(size_t a, size_t b, int *overflow) {
    size_t product;
    if (__builtin_mul_overflow(a, b, &product)) *overflow = 1;
    return product;
}

static size_t add(size_t a, size_t b, int *overflow) {
    size_t sum;
    if (__builtin_add_overflow(a, b, &sum)) *overflow = 1;
    return sum;
}

static size_t align(size_t value, size_t alignment, int *overflow) {
    return add(value, alignment - 1, overflow) / alignment * alignment;
}

/* ---- offsets --------------------------------------------------------------------------------- */

static size_t smallest(size_t a, size_t b) {
    return a < b ? a : b;
}

/* Elements to which members are aligned: PST_ZERO_ALIGNMENT bytes in the narrowest dtype. */
static size_t element_alignment(const pst__layout *layout) {
    size_t narrowest = smallest(layout->element_bytes, smallest(layout->gather_element_bytes,
                                                                layout->reduce_element_bytes));
    return PST_ZERO_ALIGNMENT / narrowest;
}

static void place_member(pst__layout *layout, pst__member *member, size_t world, int *overflow) {
    size_t alignment = element_alignment(layout);
    size_t chunk = multiply(chunk_rows(member->rows, world), member->row_elements, overflow);
    size_t whole = multiply(member->rows, member->row_elements, overflow);
    member->shard_element = layout->shard_elements;
    layout->shard_elements =
        align(add(layout->shard_elements, chunk, overflow), alignment, overflow);
    member->gathered_offset = layout->gathered_bytes;
    size_t bytes = multiply(whole, layout->gather_element_bytes, overflow);
    layout->gathered_bytes =
        align(add(layout->gathered_bytes, bytes, overflow), PST_ZERO_ALIGNMENT, overflow);
    member->gradient_element = SIZE_MAX;
    if (!member->trainable) return;
    member->gradient_element = layout->gradient_elements;
    layout->gradient_elements =
        align(add(layout->gradient_elements, chunk, overflow), alignment, overflow);
    layout->gradient_bytes_whole =
        add(layout->gradient_bytes_whole, multiply(whole, layout->reduce_element_bytes, overflow),
            overflow);
}

static void place_within(pst__layout *layout, size_t world, size_t rank) {
    const size_t element = layout->gather_element_bytes;
    for (size_t i = 0; i < layout->member_count; i++) {
        pst__member *member = &layout->members[i];
        const size_t first = pst__rows_of(member->rows, world, rank).first;
        member->shard_element = member->gathered_offset / element + first * member->row_elements;
    }
    layout->shard_elements = layout->gathered_bytes / element;
}

static size_t source_of(const pst__layout *layout, const pst__member *member, size_t destination) {
    return layout->is_within ? destination : member->shard_element * layout->gather_element_bytes;
}

static void add_segments(pst__layout *layout, const pst__member *member, size_t world) {
    size_t row_bytes = member->row_elements * layout->gather_element_bytes;
    for (size_t rank = 0; rank < world; rank++) {
        pst__rows rows = pst__rows_of(member->rows, world, rank);
        if (rows.count * row_bytes == 0) continue;
        const size_t to = member->gathered_offset + rows.first * row_bytes;
        const pst_segment segment = {(uint32_t)rank, source_of(layout, member, to), to,
                                     rows.count * row_bytes};
        layout->moves |= segment.source != segment.destination;
        layout->segments[layout->segment_count++] = segment;
    }
}

/* The widest thing that will be allocated for the layout must be countable too. */
static void check_totals(const pst__layout *layout, size_t world, int *overflow) {
    size_t widest = multiply(layout->shard_elements, sizeof(double), overflow);
    (void)multiply(widest, world, overflow);
    (void)multiply(multiply(layout->member_count, world, overflow), sizeof(pst_cast) * 4, overflow);
}

pst_status pst__layout_build(const pst__heap *heap, pst__layout *layout, size_t world,
                             size_t rank) {
    int overflow = 0;
    for (size_t i = 0; i < layout->member_count; i++)
        place_member(layout, &layout->members[i], world, &overflow);
    check_totals(layout, world, &overflow);
    if (overflow) return PST_EINVAL;
    if (layout->is_within) place_within(layout, world, rank);
    layout->segment_capacity = layout->member_count * world;
    layout->segments = pst__heap_alloc(heap, layout->segment_capacity * sizeof *layout->segments);
    if (layout->segments == NULL) return PST_ENOMEM;
    layout->moves = world > 1;
    for (size_t i = 0; i < layout->member_count; i++)
        add_segments(layout, &layout->members[i], world);
    return PST_OK;
}

void pst__layout_free(const pst__heap *heap, pst__layout *layout) {
    pst__heap_free(heap, layout->members, layout->member_count * sizeof *layout->members);
    pst__heap_free(heap, layout->segments, layout->segment_capacity * sizeof *layout->segments);
    layout->members = NULL;
    layout->segments = NULL;
}

/* ---- gradients into a slot ------------------------------------------------------------------- */

size_t pst__layout_cast_limit(const pst__layout *layout, size_t world) {
    return 2 * layout->member_count * world;
}

size_t pst__layout_end(const pst__layout *layout, size_t index) {
    for (size_t next = index + 1; next < layout->member_count; next++)
        if (layout->members[next].trainable) return layout->members[next].gradient_element;
    return layout->gradient_elements;
}

/* The part of one member's place that lies in the slot of one rank: its rows, then zeros. `from`
 * and `to` count from the begin of its place. */
static size_t member_casts(const pst__member *member, pst__rows rows, char *place, size_t from,
                           size_t to, const void *source, pst_dtype source_dtype,
                           pst_dtype reduce_dtype, pst_cast *pieces) {
    size_t count = 0, valid = source == NULL ? 0 : rows.count * member->row_elements;
    size_t skipped = rows.first * member->row_elements + from;
    size_t end = smallest(to, valid), zeros = from > valid ? from : valid;
    if (end > from)
        pieces[count++] =
            (pst_cast){place, (const char *)source + skipped * pst_dtype_size(source_dtype),
                       end - from, reduce_dtype, source_dtype};
    if (to > zeros)
        pieces[count++] = (pst_cast){place + (zeros - from) * pst_dtype_size(reduce_dtype), NULL,
                                     to - zeros, reduce_dtype, reduce_dtype};
    return count;
}

size_t pst__layout_casts(const pst__layout *layout, size_t world, pst__part part, char *slot,
                         size_t stride, const void *const *sources, pst_dtype source_dtype,
                         pst_dtype reduce_dtype, pst_cast *pieces) {
    size_t count = 0, element = pst_dtype_size(reduce_dtype), part_end = part.first + part.count;
    for (size_t i = 0; i < layout->member_count; i++) {
        const pst__member *member = &layout->members[i];
        size_t begin = member->gradient_element;
        if (!member->trainable || begin >= part_end || pst__layout_end(layout, i) <= part.first)
            continue;
        size_t first = begin > part.first ? begin : part.first;
        size_t end = smallest(pst__layout_end(layout, i), part_end);
        for (size_t rank = 0; rank < world; rank++) {
            char *place = slot + rank * stride + (first - part.first) * element;
            count += member_casts(member, pst__rows_of(member->rows, world, rank), place,
                                  first - begin, end - begin, sources == NULL ? NULL : sources[i],
                                  source_dtype, reduce_dtype, &pieces[count]);
        }
    }
    return count;
}
