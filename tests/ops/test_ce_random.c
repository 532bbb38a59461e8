/* Random collectives of random sizes on random clocks, each compared with what it has to give,
 * while sources, destinations and staging are used again as early as the streams allow. */
#include "ce_world.h"

#include "sched/device/half.h"

#define JOBS          40
#define SLOTS         6 /* the last two are not registered */
#define SLOT_BYTES    ((size_t)1 << 16)
#define SOURCE_BYTES  ((size_t)40 << 10) /* at most */
#define STAGING_BYTES ((size_t)56 << 10)
#define PIECES        4
#define MOST_ROWS     64
#define PROGRAMS      (UNDER_SANITIZER ? 12 : 40) /* one thread drives all ranks */

static const size_t unregistered_at = CE_HOME / 2;
static const size_t destination_at = CE_HOME / 2 + ((size_t)128 << 10); /* two of 40 KiB */
static const size_t staging_at = CE_HOME / 2 + ((size_t)256 << 10);     /* two of 56 KiB */
static const size_t pushed_at = CE_HOME / 2 + ((size_t)384 << 10);      /* two slots */

/* The same on all ranks. */
typedef struct job {
    uint64_t seed;
    pst_collective_kind kind;
    pst_dtype dtype;
    uint32_t slot;
    size_t offset; /* of the source in its slot */
    size_t count, stride;
    double scale;
    int root, in_place, apart, is_pushed;
    size_t row_bytes; /* of a table of which each rank names rows; 0: they name none */
    pst_segment segments[3 * PST_CE_MAX_RANKS];
    size_t segment_count;
} job;

/* A rank's side of a job; lives until the world is closed. */
typedef struct part {
    ce_rank *rank;
    const job *job;
    pst_collective collective;
    pst_reduce_piece pieces[PIECES];
    pst_table_rows rows;
    int64_t named[MOST_ROWS];
    pst_event *filled, *pulled, *checked;
    int *failures;
} part;

/* ---- values ---------------------------------------------------------------------------------- */

static void put(pst_dtype dtype, void *memory, size_t i, double value) {
    if (dtype == PST_FLOAT32) ((float *)memory)[i] = (float)value;
    if (dtype == PST_FLOAT64) ((double *)memory)[i] = value;
    if (dtype == PST_FLOAT16) ((uint16_t *)memory)[i] = pst__to_float16((float)value);
    if (dtype == PST_BFLOAT16) ((uint16_t *)memory)[i] = pst__to_bfloat16((float)value);
}

static double get(pst_dtype dtype, const void *memory, size_t i) {
    if (dtype == PST_FLOAT32) return (double)((const float *)memory)[i];
    if (dtype == PST_FLOAT64) return ((const double *)memory)[i];
    if (dtype == PST_FLOAT16) return (double)pst__from_float16(((const uint16_t *)memory)[i]);
    return (double)pst__from_bfloat16(((const uint16_t *)memory)[i]);
}

/* Small whole numbers, so that sums are exact in all dtypes. */
static double value_of(const job *job, int rank, size_t i) {
    return (double)(mix(job->seed ^ (uint64_t)rank << 40 ^ i) % 17) - 8;
}

static unsigned char byte_of(const job *job, int rank, size_t i) {
    return (unsigned char)mix(job->seed ^ (uint64_t)rank << 40 ^ i);
}

/* Some ranks name no rows, and want all. */
static int names_all(const job *job, int rank) {
    return job->row_bytes == 0 || mix(job->seed + (uint64_t)rank) % 4 == 0;
}

/* The row of a table that this byte is of. */
static int is_named(const job *job, int rank, size_t byte) {
    return names_all(job, rank) ||
           mix(job->seed ^ (uint64_t)rank << 48 ^ byte / job->row_bytes) % 2 == 0;
}

static int is_gather(const job *job) {
    return job->kind == PST_ALL_GATHER;
}

static int is_in_place_kind(const job *job) {
    return job->kind == PST_ALL_REDUCE || job->kind == PST_BROADCAST;
}

/* ---- drawing --------------------------------------------------------------------------------- */

static pst_dtype draw_dtype(uint64_t *dice) {
    static const pst_dtype dtypes[] = {PST_FLOAT32, PST_FLOAT64, PST_FLOAT16, PST_BFLOAT16};
    return dtypes[random_below(dice, 4)];
}

/* Sizes from 0 and 1 up, small ones often. */
static size_t draw_size(uint64_t *dice, size_t most) {
    static const size_t bounds[] = {2, 100, SIZE_MAX, SIZE_MAX};
    const size_t bound = bounds[random_below(dice, 4)];
    return random_below(dice, (uint32_t)(most < bound ? most : bound) + 1);
}

static size_t draw_gap(uint64_t *dice) {
    return random_below(dice, 2) == 0 ? 0 : random_below(dice, 30);
}

/* Up to three segments a peer, of which some go on where another ends. */
static void draw_segments(job *job, uint64_t *dice, int size) {
    const size_t most = draw_size(dice, SOURCE_BYTES - 8000) / (3 * (size_t)size);
    size_t at = 0;
    for (int i = 0; i < size; i++) {
        size_t from = job->in_place ? at : draw_size(dice, 64);
        for (uint32_t k = random_below(dice, job->row_bytes == 0 ? 4 : 2); k > 0; k--) {
            const size_t bytes = draw_size(dice, most);
            job->segments[job->segment_count++] = (pst_segment){(uint32_t)i, from, at, bytes};
            const size_t gap = draw_gap(dice);
            at += bytes + gap;
            if (from + bytes > job->count) job->count = from + bytes;
            from += bytes + (job->in_place ? gap : draw_gap(dice));
        }
    }
}

/* Pushes land in the slot, and what is pushed lies behind all slots. */
static void draw_job(job *job, uint64_t *dice, int size, int pushes, int rows) {
    *job = (struct job){.seed = mix(*dice), .kind = random_below(dice, PST_COLLECTIVE_KIND_COUNT)};
    job->dtype = draw_dtype(dice);
    job->slot = random_below(dice, SLOTS);
    job->offset = 8 * (size_t)random_below(dice, 1000);
    const size_t most = SOURCE_BYTES / pst_dtype_size(job->dtype);
    job->scale = random_below(dice, 2) == 0 ? 0 : 0.5;
    job->root = (int)random_below(dice, (uint32_t)size);
    job->apart = (int)random_below(dice, 2);
    if (is_in_place_kind(job)) job->count = draw_size(dice, most);
    if (job->kind == PST_REDUCE_SCATTER) {
        job->count = draw_size(dice, SOURCE_BYTES / sizeof(double) / (size_t)size - 40);
        job->stride = (job->count + random_below(dice, 30)) * pst_dtype_size(job->dtype);
        job->is_pushed = pushes && job->slot < SLOTS - 2 && random_below(dice, 2) == 0;
    }
    job->in_place = is_gather(job) && random_below(dice, 2) == 0;
    if (rows && (is_gather(job) || job->is_pushed) && random_below(dice, 2) == 0)
        job->row_bytes = SOURCE_BYTES / MOST_ROWS * (1 + random_below(dice, 3));
    if (is_gather(job)) draw_segments(job, dice, size);
}

/* What a rank wants of its chunk differs from rank to rank. */
static void draw_pieces(part *part, uint64_t *dice, char *destination) {
    const job *job = part->job;
    const size_t element = pst_dtype_size(job->dtype);
    size_t at = 0;
    part->collective.pieces = part->pieces;
    while (part->collective.piece_count < PIECES && at < job->count) {
        at += random_below(dice, 2) == 0 ? 0 : random_below(dice, 20);
        if (at >= job->count) break;
        const size_t count = 1 + draw_size(dice, job->count - at - 1);
        part->pieces[part->collective.piece_count++] = (pst_reduce_piece){
            .offset = at * element,
            .count = count,
            .destination = destination,
            .destination_dtype = random_below(dice, 2) == 0 ? job->dtype : PST_FLOAT64,
            .accumulate = (int)random_below(dice, 2)};
        destination += count * sizeof(double);
        at += count;
    }
}

/* ---- filling and checking, in the order of the streams --------------------------------------- */

static char *slot_of(const part *part) {
    const job *job = part->job;
    const size_t slot = job->slot < SLOTS - 2
                            ? job->slot * SLOT_BYTES
                            : unregistered_at + (SLOTS - 1 - job->slot) * SLOT_BYTES;
    return part->rank->home + slot;
}

static char *source_of(const part *part) {
    const job *job = part->job;
    if (!job->is_pushed) return slot_of(part) + job->offset;
    return part->rank->home + pushed_at + part->collective.ticket % 2 * SLOT_BYTES + job->offset;
}

/* Zero in rows that the rank has not named. */
static double sent_by(const job *job, int rank, size_t i) {
    const size_t chunk = job->count == 0 ? 0 : i / job->count;
    const size_t byte = chunk * job->stride + (i - chunk * job->count) * pst_dtype_size(job->dtype);
    return is_named(job, rank, byte) ? value_of(job, rank, i) : 0;
}

static void fill_source(const part *part) {
    const job *job = part->job;
    char *source = source_of(part);
    const size_t ranks = (size_t)part->rank->world->size;
    if (is_gather(job)) {
        for (size_t i = 0; i < part->collective.source_bytes; i++)
            source[i] = (char)byte_of(job, part->rank->rank, i);
        return;
    }
    const size_t rows = job->kind == PST_REDUCE_SCATTER ? ranks : 1;
    for (size_t row = 0; row < rows; row++)
        for (size_t i = 0; i < job->count; i++)
            put(job->dtype, source + row * job->stride, i,
                sent_by(job, part->rank->rank, row * job->count + i));
}

static void fill(void *argument) {
    const part *part = argument;
    fill_source(part);
    for (size_t i = 0; i < part->collective.piece_count; i++)
        for (size_t k = 0; k < part->pieces[i].count; k++)
            put(part->pieces[i].destination_dtype, part->pieces[i].destination, k, 3);
}

static double sum_of(const part *part, size_t i) {
    double sum = 0;
    for (int rank = 0; rank < part->rank->world->size; rank++)
        sum += sent_by(part->job, rank, i);
    return sum * (part->job->scale == 0 ? 1 : part->job->scale);
}

static void expect(const part *part, int holds) {
    *part->failures += !holds;
}

static void check_pieces(const part *part) {
    const job *job = part->job;
    const size_t first = (size_t)part->rank->rank * job->count;
    for (size_t i = 0; i < part->collective.piece_count; i++) {
        const pst_reduce_piece *piece = &part->pieces[i];
        const size_t begin = first + piece->offset / pst_dtype_size(job->dtype);
        for (size_t k = 0; k < piece->count; k++)
            expect(part, get(piece->destination_dtype, piece->destination, k) ==
                             sum_of(part, begin + k) + (piece->accumulate ? 3 : 0));
    }
}

static void check_gather(const part *part) {
    const job *job = part->job;
    const char *destination = part->collective.destination;
    for (size_t i = 0; i < job->segment_count; i++) {
        const pst_segment *segment = &job->segments[i];
        for (size_t k = 0; k < segment->bytes; k++)
            if (is_named(job, part->rank->rank, segment->destination + k))
                expect(part, destination[segment->destination + k] ==
                                 (char)byte_of(job, (int)segment->peer, segment->source + k));
    }
}

static void check(void *argument) {
    const part *part = argument;
    const job *job = part->job;
    if (is_gather(job)) check_gather(part);
    if (job->kind == PST_REDUCE_SCATTER) check_pieces(part);
    for (size_t i = 0; is_in_place_kind(job) && i < job->count; i++)
        expect(part,
               get(job->dtype, source_of(part), i) ==
                   (job->kind == PST_BROADCAST ? value_of(job, job->root, i) : sum_of(part, i)));
}

/* ---- issuing --------------------------------------------------------------------------------- */

static void name_rows(part *part) {
    const job *job = part->job;
    const int rank = part->rank->rank;
    part->rows = (pst_table_rows){.rows = MOST_ROWS, .row_bytes = job->row_bytes};
    for (size_t row = 0; row < MOST_ROWS; row++)
        if (is_named(job, rank, row * job->row_bytes))
            part->named[part->rows.count++] = (int64_t)row;
    if (!names_all(job, rank)) part->rows.indices = part->named;
    part->collective.rows = &part->rows;
}

static void make_part(part *part, uint64_t index) {
    ce_rank *rank = part->rank;
    const job *job = part->job;
    uint64_t dice = job->seed + (uint64_t)rank->rank;
    char *destination =
        rank->home + destination_at + index % 2 * SOURCE_BYTES + 8 * (size_t)random_below(&dice, 9);
    part->collective =
        (pst_collective){.kind = job->kind,
                         .name = "job",
                         .ticket = index + 1,
                         .dtype = job->dtype,
                         .source_bytes = job->count,
                         .is_pushed = job->is_pushed,
                         .stride = job->stride,
                         .scale = job->scale,
                         .root = job->root,
                         .segments = job->segments,
                         .segment_count = job->segment_count,
                         .staging = rank->home + staging_at + index % 2 * STAGING_BYTES};
    pst_collective *collective = &part->collective;
    collective->source = source_of(part);
    if (job->is_pushed) collective->staging = slot_of(part);
    if (is_gather(job)) collective->destination = job->in_place ? source_of(part) : destination;
    if (job->kind == PST_REDUCE_SCATTER) {
        collective->source_bytes = job->count * pst_dtype_size(job->dtype);
        draw_pieces(part, &dice, destination);
    }
    if (is_in_place_kind(job)) {
        collective->destination = source_of(part);
        collective->count = job->count;
    }
    if (job->row_bytes > 0) name_rows(part);
}

static void wait_for(const ce_rank *rank, pst_stream *stream, pst_event *event) {
    pst_device *device = rank->world->device;
    assert_int_equal(device->ops->stream_wait(device, stream, event), PST_OK);
}

static void record(const ce_rank *rank, pst_event *event, pst_stream *stream) {
    pst_device *device = rank->world->device;
    assert_int_equal(device->ops->event_record(device, event, stream), PST_OK);
}

static void wait_for_readers(const ce_rank *rank, uint64_t ticket) {
    if (rank->comm->ops->source_wait == NULL) return;
    assert_int_equal(rank->comm->ops->source_wait(rank->comm, rank->compute, ticket), PST_OK);
}

/* The latest job of the rank that had this slot, and the one before the last, whose destination and
 * staging are used again. */
static void enqueue_fill(part *parts, uint64_t index) {
    part *part = &parts[index];
    ce_rank *rank = part->rank;
    uint64_t i = index;
    while (i > 0 && parts[i - 1].job->slot != part->job->slot)
        i--;
    if (i > 0) {
        wait_for(rank, rank->compute, parts[i - 1].checked);
        wait_for_readers(rank, i);
    }
    if (index >= 2) wait_for(rank, rank->compute, parts[index - 2].checked);
    assert_int_equal(pst__sim_call(rank->world->device, rank->compute, 0, fill, part), PST_OK);
    record(rank, part->filled, rank->compute);
}

static void issue(part *parts, uint64_t index) {
    part *part = &parts[index];
    ce_rank *rank = part->rank;
    pst_comm *comm = rank->comm;
    void *request;
    make_part(part, index);
    assert_true(comm->ops->staging_bytes(comm, &part->collective) <= STAGING_BYTES);
    enqueue_fill(parts, index);
    wait_for(rank, rank->pulls, part->filled);
    pst_status status = comm->ops->start(comm, &part->collective, rank->pulls, &request);
    if (status != PST_OK) fail_msg("start: %s", comm->ops->error_text(comm));
    pst_stream *stream = part->job->apart ? rank->sums : rank->pulls;
    record(rank, part->pulled, rank->pulls);
    wait_for(rank, stream, part->pulled);
    if (comm->ops->combine != NULL)
        assert_int_equal(comm->ops->combine(comm, &part->collective, stream), PST_OK);
    record(rank, part->pulled, stream);
    wait_for(rank, rank->sums, part->pulled);
    assert_int_equal(pst__sim_call(rank->world->device, rank->sums, 0, check, part), PST_OK);
    record(rank, part->checked, rank->sums);
}

static part *make_parts(ce_world *world, int rank, const job *jobs, int *failures) {
    pst_device *device = world->device;
    part *parts = calloc(JOBS, sizeof *parts);
    for (int i = 0; i < JOBS; i++) {
        parts[i].rank = &world->ranks[rank];
        parts[i].job = &jobs[i];
        parts[i].failures = failures;
        assert_int_equal(device->ops->event_create(device, 0, &parts[i].filled), PST_OK);
        assert_int_equal(device->ops->event_create(device, 0, &parts[i].pulled), PST_OK);
        assert_int_equal(device->ops->event_create(device, 0, &parts[i].checked), PST_OK);
    }
    return parts;
}

static void free_parts(pst_device *device, part *parts) {
    for (int i = 0; i < JOBS; i++) {
        device->ops->event_destroy(device, parts[i].filled);
        device->ops->event_destroy(device, parts[i].pulled);
        device->ops->event_destroy(device, parts[i].checked);
    }
    free(parts);
}

/* ---- a program ------------------------------------------------------------------------------- */

static ce_world draw_world(uint64_t seed) {
    static const uint32_t firsts[] = {0, 0u - 20, 0x3ffffff0u, 0x7ffffff0u, 0xbffffff0u};
    ce_world world = {.dice = seed};
    world.size = 1 + (int)random_below(&world.dice, 12);
    world.sim.latency_ns = random_below(&world.dice, 300);
    world.sim.bytes_each_us = 100 + random_below(&world.dice, 100000);
    world.most_jitter = random_below(&world.dice, 3) == 0 ? 0 : random_below(&world.dice, 50000);
    world.options.first_sequence = firsts[random_below(&world.dice, 5)];
    world.options.no_verify = random_below(&world.dice, 4) == 0;
    world.options.turn_bytes = (size_t)1 << random_below(&world.dice, 18);
    return world;
}

/* Nodes of such ranks, with a relay buffer that most collectives go through in several rounds. */
static ce_world draw_nodes(uint64_t seed) {
    ce_world world = draw_world(seed);
    world.nodes = 1 + (int)random_below(&world.dice, 4);
    world.size = world.nodes * (1 + (int)random_below(&world.dice, 4));
    world.relay_bytes = (size_t)2048 * (size_t)world.size << random_below(&world.dice, 6);
    return world;
}

/* Two communicators of all ranks, each for what is on its side of a size. */
static ce_world draw_crossover(uint64_t seed) {
    ce_world world = draw_nodes(seed);
    world.small_below = (size_t)2 << random_below(&world.dice, 16);
    return world;
}

static void issue_all(ce_world *world, part *const *parts) {
    uint64_t issued[PST_CE_MAX_RANKS] = {0};
    for (uint64_t left = JOBS * (uint64_t)world->size; left > 0;) {
        const uint32_t rank = random_below(&world->dice, (uint32_t)world->size);
        world->clock += random_below(&world->dice, 3000);
        if (issued[rank] == JOBS) continue;
        issue(parts[rank], issued[rank]++);
        left--;
    }
}

static void run_program(ce_world world, uint64_t seed) {
    part *parts[PST_CE_MAX_RANKS];
    job *jobs = calloc(JOBS, sizeof *jobs);
    const int rows = world.nodes == 0 && seed % 2 == 0;
    int failures = 0;
    ce_open(&world);
    for (int i = 0; i < JOBS; i++)
        draw_job(&jobs[i], &world.dice, world.size, world.nodes == 0, rows);
    for (int rank = 0; rank < world.size; rank++)
        parts[rank] = make_parts(&world, rank, jobs, &failures);
    issue_all(&world, parts);
    const int ended = ce_run_all(&world, 1000000000);
    for (int rank = 0; rank < world.size; rank++) {
        if (world.ranks[rank].comm->ops->status(world.ranks[rank].comm) != PST_OK) failures++;
        free_parts(world.device, parts[rank]);
    }
    const uint64_t collisions = world.collisions;
    /* The two parts of nodes may read one source at once, and what may be named by rows. */
    const int all_turns = world.options.turn_bytes == 1 && world.nodes == 0 && !rows;
    ce_close(&world);
    free(jobs);
    if (!ended || failures > 0 || (collisions > 0 && all_turns))
        fail_msg("PST_SEED=%llu: %s, %d wrong values, %llu collisions", (unsigned long long)seed,
                 ended ? "ended" : "locked up", failures, (unsigned long long)collisions);
}

static void random_collectives_give_what_they_have_to(void **state) {
    (void)state;
    const uint64_t seed = random_seed("random collectives");
    for (int i = 0; i < random_programs(PROGRAMS + PROGRAMS / 2); i++)
        run_program(draw_world(seed + (uint64_t)i), seed + (uint64_t)i);
}

static void random_collectives_of_nodes_give_what_they_have_to(void **state) {
    (void)state;
    const uint64_t seed = random_seed("random collectives of nodes");
    for (int i = 0; i < random_programs(PROGRAMS); i++)
        run_program(draw_nodes(seed + (uint64_t)i), seed + (uint64_t)i);
}

static void random_collectives_of_two_sizes_give_what_they_have_to(void **state) {
    (void)state;
    const uint64_t seed = random_seed("random collectives of two sizes");
    for (int i = 0; i < random_programs(PROGRAMS); i++)
        run_program(draw_crossover(seed + (uint64_t)i), seed + (uint64_t)i);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_collectives_give_what_they_have_to),
        cmocka_unit_test(random_collectives_of_nodes_give_what_they_have_to),
        cmocka_unit_test(random_collectives_of_two_sizes_give_what_they_have_to),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
