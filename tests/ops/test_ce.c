/* The communicator ce: creation, registration, failures and abort. */
#include "ce_world.h"

#include "base/atomic.h"

#include <sched.h>
#include <stddef.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#define MEGABYTE ((size_t)1 << 20)

static pst_collective gather_of(ce_rank *rank, pst_segment *segments, size_t bytes) {
    for (int peer = 0; peer < rank->world->size; peer++)
        segments[peer] = (pst_segment){(uint32_t)peer, 0, (size_t)peer * bytes, bytes};
    return (pst_collective){.kind = PST_ALL_GATHER,
                            .name = "block 3",
                            .dtype = PST_UINT8,
                            .source = rank->home,
                            .source_bytes = bytes,
                            .destination = rank->home + CE_HOME / 2,
                            .segments = segments,
                            .segment_count = (size_t)rank->world->size};
}

static pst_status start(ce_rank *rank, pst_collective *collective) {
    void *request;
    collective->ticket = ++rank->tickets;
    return rank->comm->ops->start(rank->comm, collective, rank->pulls, &request);
}

static pst_status start_gather(ce_rank *rank, size_t bytes) {
    pst_segment segments[PST_CE_MAX_RANKS];
    pst_collective collective = gather_of(rank, segments, bytes);
    return start(rank, &collective);
}

static pst_status status_of(const ce_rank *rank) {
    return rank->comm->ops->status(rank->comm);
}

static void assert_text(const ce_rank *rank, const char *expected) {
    const char *text = rank->comm->ops->error_text(rank->comm);
    if (strstr(text, expected) == NULL) fail_msg("'%s' is not in '%s'", expected, text);
}

static ce_world *new_world(int size) {
    ce_world *world = calloc(1, sizeof *world);
    world->size = size;
    world->sim.latency_ns = 100;
    return world;
}

static ce_world *open_world(int size) {
    ce_world *world = new_world(size);
    ce_open(world);
    return world;
}

static void close_world(ce_world *world) {
    ce_close(world);
    free(world);
}

static pst_status abort_of(const ce_rank *rank) {
    return rank->comm->ops->abort(rank->comm, PST_ETIMEDOUT);
}

/* ---- ranks that do not do the same ----------------------------------------------------------- */

static void another_collective_on_another_rank_is_named(void **state) {
    (void)state;
    ce_world *world = open_world(3);
    pst_collective barrier = {.kind = PST_BARRIER, .name = "end"};
    assert_int_equal(start_gather(&world->ranks[0], 100), PST_OK);
    assert_int_equal(start(&world->ranks[2], &barrier), PST_EMISMATCH);
    assert_text(&world->ranks[2], "rank 2: barrier 'end' of 0 bytes, rank 0: all_gather 'block 3' "
                                  "of 100 bytes");
    assert_int_equal(status_of(&world->ranks[0]), PST_EMISMATCH);
    assert_text(&world->ranks[0], "rank 2 has failed");
    assert_int_equal(start_gather(&world->ranks[1], 100), PST_EMISMATCH);
    assert_int_equal(abort_of(&world->ranks[0]), PST_EBUSY);
    assert_true(ce_run_all(world, 1000000));
    close_world(world);
}

static void another_place_on_another_rank_is_an_error(void **state) {
    (void)state;
    ce_world *world = open_world(2);
    pst_segment segments[PST_CE_MAX_RANKS];
    pst_collective there = gather_of(&world->ranks[1], segments, 100);
    there.source = (const char *)there.source + 8;
    assert_int_equal(start_gather(&world->ranks[0], 100), PST_OK);
    assert_int_equal(start(&world->ranks[1], &there), PST_EMISMATCH);
    (void)abort_of(&world->ranks[0]);
    assert_true(ce_run_all(world, 1000000));
    close_world(world);
}

static void an_unregistered_source_is_named(void **state) {
    (void)state;
    ce_world *world = open_world(2);
    char *elsewhere = malloc(2 * MEGABYTE);
    pst_segment segments[PST_CE_MAX_RANKS];
    pst_collective collective = gather_of(&world->ranks[0], segments, 2 * MEGABYTE);
    collective.source = elsewhere;
    assert_int_equal(start(&world->ranks[0], &collective), PST_EINVAL);
    assert_text(&world->ranks[0], "'block 3': the 2097152 bytes");
    assert_text(&world->ranks[0], "pst_ce_register");
    assert_int_equal(status_of(&world->ranks[1]), PST_EPEER);
    free(elsewhere);
    close_world(world);
}

static void tickets_grow_by_one(void **state) {
    (void)state;
    ce_world *world = open_world(2);
    world->ranks[0].tickets = 1;
    assert_int_equal(start_gather(&world->ranks[0], 1), PST_EINVAL);
    assert_text(&world->ranks[0], "ticket 2, but the next one is 1");
    close_world(world);
}

static void a_segment_beyond_the_source_is_an_error(void **state) {
    (void)state;
    ce_world *world = open_world(2);
    pst_segment segments[PST_CE_MAX_RANKS];
    pst_collective collective = gather_of(&world->ranks[0], segments, 100);
    segments[1].source = 1;
    assert_int_equal(start(&world->ranks[0], &collective), PST_EINVAL);
    assert_text(&world->ranks[0], "segment 1 of 'block 3'");
    close_world(world);
}

/* ---- maximum --------------------------------------------------------------------------------- */

static void an_all_reduce_finds_the_largest(void **state) {
    (void)state;
    ce_world *world = open_world(3);
    for (int rank = 0; rank < 3; rank++) {
        unsigned char *flags = (unsigned char *)world->ranks[rank].home;
        pst_collective collective = {.kind = PST_ALL_REDUCE,
                                     .name = "presence",
                                     .dtype = PST_UINT8,
                                     .destination = flags,
                                     .count = 1000,
                                     .reduce = PST_REDUCE_MAX,
                                     .staging = flags + CE_HOME / 2};
        for (int i = 0; i < 1000; i++)
            flags[i] = i % 5 == rank;
        assert_int_equal(start(&world->ranks[rank], &collective), PST_OK);
    }
    assert_true(ce_run_all(world, 1000000));
    for (int rank = 0; rank < 3; rank++)
        for (int i = 0; i < 1000; i++)
            assert_int_equal(world->ranks[rank].home[i], i % 5 < 3);
    close_world(world);
}

/* ---- abort ----------------------------------------------------------------------------------- */

static void an_abort_releases_what_waits_for_a_rank_that_never_comes(void **state) {
    (void)state;
    ce_world *world = open_world(4);
    for (int i = 0; i < 20; i++)
        for (int rank = 1; rank < 4; rank++)
            assert_int_equal(start_gather(&world->ranks[rank], 1000), PST_OK);
    assert_false(ce_run_all(world, 1000000));
    for (int rank = 1; rank < 4; rank++) {
        assert_int_equal(abort_of(&world->ranks[rank]), PST_EBUSY);
        assert_int_equal(status_of(&world->ranks[rank]), PST_ETIMEDOUT);
        assert_text(&world->ranks[rank], "aborted");
    }
    assert_true(ce_run_all(world, 1000000));
    for (int rank = 1; rank < 4; rank++)
        assert_int_equal(abort_of(&world->ranks[rank]), PST_OK);
    assert_int_equal(start_gather(&world->ranks[1], 1000), PST_ETIMEDOUT);
    assert_int_equal(start_gather(&world->ranks[0], 1000), PST_EPEER);
    close_world(world);
}

static void an_abort_releases_waits_for_readers(void **state) {
    (void)state;
    ce_world *world = open_world(2);
    ce_rank *rank = &world->ranks[0];
    assert_int_equal(rank->comm->ops->source_wait(rank->comm, rank->compute, 1), PST_OK);
    assert_int_equal(start_gather(rank, 1000), PST_OK);
    assert_false(ce_run_all(world, 100000));
    (void)abort_of(rank);
    assert_true(ce_run_all(world, 100000));
    assert_int_equal(rank->comm->ops->source_wait(rank->comm, rank->compute, 2), PST_ETIMEDOUT);
    close_world(world);
}

/* What rank 1 has enqueued before writes flags of rank 0, which are lower than those that the abort
 * has raised, after it and before rank 0's stream has come to them. */
static void abort_behind_a_late_peer(int tickets, size_t bytes, uint64_t nanoseconds) {
    ce_world *world = open_world(2);
    ce_rank *aborted = &world->ranks[0], *late = &world->ranks[1];
    pst_device *device = world->device;
    uint32_t gate = 0;
    assert_int_equal(device->ops->stream_wait32(device, late->pulls, &gate, 1), PST_OK);
    assert_int_equal(device->ops->stream_wait32(device, aborted->pulls, &gate, 2), PST_OK);
    for (int i = 0; i < 3; i++)
        assert_int_equal(start_gather(late, bytes), PST_OK);
    for (int i = 0; i < tickets; i++)
        assert_int_equal(start_gather(aborted, bytes), PST_OK);
    assert_int_equal(abort_of(aborted), PST_EBUSY);
    assert_int_equal(device->ops->flag_write32(device, &gate, 1), PST_OK);
    assert_false(ce_run_all(world, nanoseconds)); /* rank 1 writes, and waits for rank 0 */
    assert_int_equal(device->ops->flag_write32(device, &gate, 2), PST_OK);
    assert_true(ce_run_all(world, nanoseconds));
    assert_int_equal(status_of(late), PST_EPEER);
    close_world(world);
}

static void a_late_peer_takes_no_release_back(void **state) {
    (void)state;
    abort_behind_a_late_peer(100, 1000, 1000000);
    abort_behind_a_late_peer(4000, 8, 100000000); /* some steps of a large model */
}

/* As if so many collectives had been run. */
static void count_on(ce_world *world, uint64_t tickets) {
    for (int rank = 0; rank < world->size; rank++) {
        pst__ce *ce = world->ranks[rank].comm->context;
        ce->tickets += tickets;
        ce->marked += tickets;
        world->ranks[rank].tickets += tickets;
    }
    for (unsigned i = 0; i < PST__FLAG_RING; i++) /* all flags are of these tickets */
        for (int rank = 0; rank < world->size; rank++)
            assert_int_equal(start_gather(&world->ranks[rank], 8), PST_OK);
    assert_true(ce_run_all(world, 1000000000));
}

static void what_was_read_long_ago_is_not_waited_for(void **state) {
    (void)state;
    ce_world *world = open_world(2);
    ce_rank *rank = &world->ranks[0];
    for (int i = 0; i < 2; i++)
        assert_int_equal(start_gather(&world->ranks[i], 8), PST_OK);
    const uint64_t ticket = rank->tickets;
    for (int i = 0; i < 3; i++) { /* across half of the numbers */
        count_on(world, UINT64_C(1) << 29);
        assert_int_equal(rank->comm->ops->source_wait(rank->comm, rank->compute, ticket), PST_OK);
        assert_true(ce_run_all(world, 1000000));
    }
    close_world(world);
}

typedef struct aborter {
    ce_rank *rank;
    int go;
} aborter;

static void *abort_soon(void *argument) {
    aborter *aborter = argument;
    while (!pst__load_acquire(&aborter->go)) /* pairs with the release in the test below */
        (void)sched_yield();
    (void)abort_of(aborter->rank);
    return NULL;
}

static void an_abort_comes_from_any_thread_at_any_time(void **state) {
    (void)state;
    ce_world *world = open_world(3);
    aborter aborter = {.rank = &world->ranks[0]};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, abort_soon, &aborter), 0);
    pst_status status = PST_OK;
    for (int i = 0; status == PST_OK; i++) {
        if (i == 20) pst__store_release(&aborter.go, 1); /* pairs with the acquire in abort_soon */
        status = start_gather(&world->ranks[0], 1000);
    }
    (void)pthread_join(thread, NULL);
    assert_int_equal(status, PST_ETIMEDOUT);
    assert_true(ce_run_all(world, 10000000));
    close_world(world);
}

/* ---- ranks that are gone --------------------------------------------------------------------- */

static void a_rank_that_died_is_noticed_and_one_that_left_is_not(void **state) {
    (void)state;
    ce_world *world = open_world(3);
    world->ranks[1].comm->ops->destroy(world->ranks[1].comm);
    world->ranks[1].comm = NULL;
    assert_int_equal(status_of(&world->ranks[0]), PST_OK);
    pst__link_close(
        &((pst__ce *)world->ranks[2].comm->context)->link); /* as a process's end does */
    assert_int_equal(status_of(&world->ranks[0]), PST_EPEER);
    assert_text(&world->ranks[0], "the process of rank 2 has ended");
    close_world(world);
}

/* ---- devices that fail ----------------------------------------------------------------------- */

typedef struct faults {
    const char *call;
    int after; /* so many of them first */
} faults;

static faults planned;

static pst_status fault(void *context, const char *call) {
    (void)context;
    if (planned.call == NULL || strcmp(planned.call, call) != 0) return PST_OK;
    return __atomic_fetch_sub(&planned.after, 1, __ATOMIC_RELAXED) == 0 ? PST_EDEVICE : PST_OK;
}

static void a_failure_while_creating_fails_on_all_ranks(void **state) {
    const char *const calls[] = {"alloc",         "stream_create", "event_create",
                                 "memory_export", "memory_import", "flag_write32"};
    (void)state;
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++)
        for (int after = 0; after < 3; after++) {
            ce_world *world = new_world(3);
            world->sim.fault = fault;
            planned.call = NULL;
            ce_prepare(world);
            planned = (faults){calls[i], after};
            ce_on_all(world, ce_create_rank);
            for (int rank = 0; rank < 3; rank++) {
                assert_int_not_equal(world->ranks[rank].status, PST_OK);
                assert_null(world->ranks[rank].comm);
            }
            close_world(world);
        }
    planned.call = NULL;
}

static void a_failure_while_starting_is_final_and_seen_by_all(void **state) {
    static const char *const calls[] = {"copy", "stream_write32", "stream_wait32", "event_record"};
    (void)state;
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        ce_world *world = new_world(3);
        world->sim.fault = fault;
        ce_open(world);
        planned = (faults){calls[i], 1};
        assert_int_equal(start_gather(&world->ranks[1], 1000), PST_EDEVICE);
        planned.call = NULL;
        assert_text(&world->ranks[1], "all_gather 'block 3' (ticket 1): device error");
        assert_int_equal(start_gather(&world->ranks[1], 1000), PST_EDEVICE);
        assert_int_equal(status_of(&world->ranks[0]), PST_EPEER);
        (void)abort_of(&world->ranks[1]);
        assert_true(ce_run_all(world, 1000000));
        close_world(world);
    }
}

/* ---- creation and registration --------------------------------------------------------------- */

static void create_on_host(ce_rank *rank) {
    rank->status = pst_ce_create(rank->runtime, pst_runtime_host(rank->runtime), &rank->exchange,
                                 NULL, &rank->comm);
}

static void create_with_own_sequence(ce_rank *rank) {
    const pst_ce_options options = {.size = sizeof options, .first_sequence = (uint32_t)rank->rank};
    rank->status =
        pst_ce_create(rank->runtime, rank->world->device, &rank->exchange, &options, &rank->comm);
}

/* What this library does not know, or the caller's header did not, is not zero. */
static void create_with_size(ce_rank *rank, size_t size) {
    _Alignas(pst_ce_options) unsigned char given[sizeof(pst_ce_options) + 16];
    memset(given, 0x55, sizeof given);
    memset(given, 0, size < sizeof(pst_ce_options) ? size : sizeof(pst_ce_options));
    memcpy(given, &size, sizeof size);
    rank->status = pst_ce_create(rank->runtime, rank->world->device, &rank->exchange,
                                 (const pst_ce_options *)(const void *)given, &rank->comm);
}

static void create_by_newer_header(ce_rank *rank) {
    create_with_size(rank, sizeof(pst_ce_options) + 16);
}

static void create_by_older_header(ce_rank *rank) {
    create_with_size(rank, offsetof(pst_ce_options, turn_bytes));
}

static void create_without_size(ce_rank *rank) {
    create_with_size(rank, 0);
}

static void options_of_any_header_are_read(void **state) {
    (void)state;
    void (*const creates[])(ce_rank *) = {create_by_newer_header, create_by_older_header};
    for (int i = 0; i < 2; i++) {
        ce_world *world = new_world(2);
        ce_prepare(world);
        ce_on_all(world, creates[i]);
        ce_assert_all(world, PST_OK);
        close_world(world);
    }
}

static void options_without_a_size_are_refused(void **state) {
    (void)state;
    ce_world *world = new_world(2);
    ce_prepare(world);
    ce_on_all(world, create_without_size);
    ce_assert_all(world, PST_EINVAL);
    close_world(world);
}

static void it_is_not_for_devices_without_flags(void **state) {
    (void)state;
    ce_world *world = new_world(2);
    ce_prepare(world);
    ce_on_all(world, create_on_host);
    ce_assert_all(world, PST_EUNSUPPORTED);
    close_world(world);
}

/* The second rank's thread has folders of its own where the first one's socket is. */
static int is_out_of_reach;

static int hide_folders(void) {
    return unshare(CLONE_NEWNS) == 0 && mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
           mount("none", "/dev/shm", "tmpfs", 0, NULL) == 0;
}

static void create_out_of_reach(ce_rank *rank) {
    const pst_runtime_options endless = {
        .size = sizeof endless, .rank = rank->rank, .world_size = rank->world->size};
    pst_runtime *runtime;
    if (rank->rank == 1) is_out_of_reach = hide_folders();
    if (pst_runtime_create(&endless, &runtime) != PST_OK) return;
    rank->status = pst_ce_create(runtime, rank->world->device, &rank->exchange, NULL, &rank->comm);
    if (rank->comm != NULL) rank->comm->ops->destroy(rank->comm);
    rank->comm = NULL;
    pst_runtime_destroy(runtime);
}

static void nobody_waits_for_a_rank_that_cannot_connect(void **state) {
    (void)state;
    ce_world *world = calloc(1, sizeof *world);
    world->size = 2;
    ce_prepare(world);
    ce_on_all(world, create_out_of_reach);
    if (is_out_of_reach) ce_assert_all(world, PST_EPEER);
    close_world(world);
    if (is_out_of_reach) return;
    print_message("skipped: folders of its own need CAP_SYS_ADMIN\n");
    skip();
}

static void options_are_the_same_on_all_ranks(void **state) {
    (void)state;
    ce_world *world = new_world(2);
    ce_prepare(world);
    ce_on_all(world, create_with_own_sequence);
    ce_assert_all(world, PST_EMISMATCH);
    close_world(world);
}

static void register_other_size(ce_rank *rank) {
    rank->status =
        pst_ce_register(rank->comm, rank->home, CE_HOME / 2 - 64 * (size_t)(rank->rank == 1));
}

static void registered_sizes_are_the_same_on_all_ranks(void **state) {
    (void)state;
    ce_world *world = open_world(3);
    ce_on_all(world, register_other_size);
    ce_assert_all(world, PST_EMISMATCH);
    assert_text(&world->ranks[0], "rank 1 registers");
    assert_int_equal(status_of(&world->ranks[0]), PST_OK);
    for (int rank = 0; rank < 3; rank++)
        assert_int_equal(start_gather(&world->ranks[rank], 1000), PST_OK);
    assert_true(ce_run_all(world, 1000000));
    close_world(world);
}

static void abort_or_register(ce_rank *rank) {
    if (rank->rank == 1)
        (void)abort_of(rank);
    else
        rank->status = pst_ce_register(rank->comm, rank->home, CE_HOME / 2);
}

static void who_registers_hears_of_an_abort(void **state) {
    (void)state;
    ce_world *world = open_world(3);
    ce_on_all(world, abort_or_register);
    for (int rank = 0; rank < 3; rank += 2) { /* and not of a deadline */
        assert_int_equal(world->ranks[rank].status, PST_EPEER);
        assert_text(&world->ranks[rank], "has gone while memory is registered");
        assert_int_equal(status_of(&world->ranks[rank]), PST_EPEER);
        assert_text(&world->ranks[rank], "rank 1 has failed: ");
    }
    close_world(world);
}

/* The last rank waits for the first one, which finds the one between them gone when it sends. */
static void register_around_an_abort(ce_rank *rank) {
    const struct timespec later = {0, 50000000 * (2 - rank->rank)};
    (void)nanosleep(&later, NULL);
    abort_or_register(rank);
}

static void who_has_registered_before_an_abort_hears_of_it(void **state) {
    (void)state;
    ce_world *world = open_world(3);
    ce_on_all(world, register_around_an_abort);
    for (int rank = 0; rank < 3; rank += 2) { /* and not of a deadline */
        assert_int_equal(world->ranks[rank].status, PST_EPEER);
        assert_text(&world->ranks[rank], "rank 1 has");
    }
    close_world(world);
}

static int has_given_up; /* the first rank, in vain */

static void register_in_vain(ce_rank *rank) {
    const struct timeval limit = {0, 100000};
    const pst__ce *ce = rank->comm->context;
    const int socket = ce->link.sockets[1 - rank->rank];
    (void)setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    while (rank->rank == 1 && !pst__load_acquire(&has_given_up)) /* pairs with the release below */
        (void)usleep(1000);
    rank->status = pst_ce_register(rank->comm, rank->home + CE_HOME / 2, CE_HOME / 4);
    pst__store_release(&has_given_up, 1);
}

/* The late rank's part would be taken for that of its next one. */
static void a_registration_that_takes_too_long_is_the_last(void **state) {
    (void)state;
    ce_world *world = open_world(2);
    has_given_up = 0;
    ce_on_all(world, register_in_vain);
    assert_int_equal(world->ranks[0].status, PST_ETIMEDOUT);
    assert_int_equal(world->ranks[1].status, PST_EPEER);
    for (int rank = 0; rank < 2; rank++)
        assert_int_not_equal(status_of(&world->ranks[rank]), PST_OK);
    ce_on_all(world, ce_register_home);
    for (int rank = 0; rank < 2; rank++)
        assert_int_equal(world->ranks[rank].status, PST_EPEER);
    close_world(world);
}

static void memory_can_be_registered_again_and_only_so_often(void **state) {
    (void)state;
    ce_world *world = open_world(2);
    for (int i = 0; i < 3 * PST_CE_MAX_REGIONS; i++) {
        for (int rank = 0; rank < 2; rank++)
            pst_ce_unregister(world->ranks[rank].comm, world->ranks[rank].home);
        ce_on_all(world, ce_register_home);
        ce_assert_all(world, PST_OK);
    }
    for (int i = 1; i < PST_CE_MAX_REGIONS; i++)
        ce_on_all(world, ce_register_home);
    ce_assert_all(world, PST_OK);
    ce_on_all(world, ce_register_home);
    ce_assert_all(world, PST_ENOMEM);
    close_world(world);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(another_collective_on_another_rank_is_named),
        cmocka_unit_test(another_place_on_another_rank_is_an_error),
        cmocka_unit_test(an_unregistered_source_is_named),
        cmocka_unit_test(tickets_grow_by_one),
        cmocka_unit_test(a_segment_beyond_the_source_is_an_error),
        cmocka_unit_test(an_all_reduce_finds_the_largest),
        cmocka_unit_test(an_abort_releases_what_waits_for_a_rank_that_never_comes),
        cmocka_unit_test(an_abort_releases_waits_for_readers),
        cmocka_unit_test(a_late_peer_takes_no_release_back),
        cmocka_unit_test(what_was_read_long_ago_is_not_waited_for),
        cmocka_unit_test(an_abort_comes_from_any_thread_at_any_time),
        cmocka_unit_test(a_rank_that_died_is_noticed_and_one_that_left_is_not),
        cmocka_unit_test(a_failure_while_creating_fails_on_all_ranks),
        cmocka_unit_test(a_failure_while_starting_is_final_and_seen_by_all),
        cmocka_unit_test(options_of_any_header_are_read),
        cmocka_unit_test(options_without_a_size_are_refused),
        cmocka_unit_test(it_is_not_for_devices_without_flags),
        cmocka_unit_test(nobody_waits_for_a_rank_that_cannot_connect),
        cmocka_unit_test(options_are_the_same_on_all_ranks),
        cmocka_unit_test(registered_sizes_are_the_same_on_all_ranks),
        cmocka_unit_test(who_registers_hears_of_an_abort),
        cmocka_unit_test(who_has_registered_before_an_abort_hears_of_it),
        cmocka_unit_test(a_registration_that_takes_too_long_is_the_last),
        cmocka_unit_test(memory_can_be_registered_again_and_only_so_often),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
