#include "tracing/trace.h"

#include "tests/tracing/traced.h"

#include <pthread.h>
#include <signal.h>

static int open_trace(void **state) {
    static traced traced;
    *state = &traced;
    return traced_open(&traced, 0, 1, 64);
}

static int close_trace(void **state) {
    return traced_close(*state) != 0;
}

static pst__track *new_track(traced *traced, const char *name) {
    pst__track *track = NULL;
    assert_int_equal(pst__track_create(traced->trace, PST__TRACK_LANE, name, &track), PST_OK);
    return track;
}

static void start(traced *traced) {
    assert_int_equal(pst__trace_start(traced->trace), PST_OK);
}

static void stop(traced *traced) {
    assert_int_equal(pst__trace_stop(traced->trace), PST_OK);
}

static uint64_t record_count(traced *traced) {
    uint64_t records, overwritten;
    pst__trace_get_stats(traced->trace, &records, &overwritten);
    return records;
}

static void slice_now(pst__track *track, const char *name) {
    uint64_t now = pst__now();
    pst__trace_slice(track, name, now, now + 10, 0, 0);
}

/* ---- starting and stopping ------------------------------------------------------------------ */

static void a_trace_is_off_until_started_and_after_it_is_stopped(void **state) {
    traced *traced = *state;
    assert_false(pst__trace_on(traced->trace));
    start(traced);
    assert_true(pst__trace_on(traced->trace));
    stop(traced);
    assert_false(pst__trace_on(traced->trace));
}

static void starting_twice_and_stopping_twice_are_errors_that_say_so(void **state) {
    traced *traced = *state;
    start(traced);
    assert_int_equal(pst__trace_start(traced->trace), PST_ESTATE);
    assert_non_null(strstr(traced_error(traced), "recording already"));
    stop(traced);
    assert_int_equal(pst__trace_stop(traced->trace), PST_ESTATE);
    assert_non_null(strstr(traced_error(traced), "not recording"));
}

static void starting_again_clears_what_was_recorded(void **state) {
    traced *traced = *state;
    pst__track *track = new_track(traced, "gather");
    start(traced);
    slice_now(track, "first_recording");
    stop(traced);
    start(traced);
    assert_int_equal(record_count(traced), 0);
    slice_now(track, "second_recording");
    stop(traced);
    char *text = traced_text(traced);
    assert_null(strstr(text, "first_recording"));
    assert_non_null(strstr(text, "second_recording"));
    free(text);
}

static void records_stay_after_the_stop_and_can_be_written_twice(void **state) {
    traced *traced = *state;
    pst__track *track = new_track(traced, "gather");
    start(traced);
    slice_now(track, "kept_record");
    stop(traced);
    for (int turn = 0; turn < 2; ++turn) {
        char *text = traced_text(traced);
        assert_int_equal(occurrences(text, "kept_record"), 1);
        free(text);
    }
}

static void a_track_made_while_recording_records(void **state) {
    traced *traced = *state;
    start(traced);
    slice_now(new_track(traced, "late"), "on_a_late_track");
    assert_int_equal(record_count(traced), 1);
}

static void a_track_made_before_the_first_start_has_no_ring_yet(void **state) {
    traced *traced = *state;
    long bytes = traced->counts.live_bytes;
    (void)new_track(traced, "gather");
    assert_true(traced->counts.live_bytes - bytes < 2048);
    start(traced);
    assert_true(traced->counts.live_bytes - bytes > 2048);
}

static long resident_bytes(void) {
    long pages = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    assert_non_null(file);
    assert_int_equal(fscanf(file, "%ld %ld", &pages, &resident), 2);
    (void)fclose(file);
    return resident * sysconf(_SC_PAGESIZE);
}

static void a_ring_costs_no_memory_until_something_is_recorded(void **state) {
    enum { TRACKS = 32, RECORDS = 65536 };
    (void)state;
    traced traced;
    memset(&traced, 0, sizeof traced);
    assert_int_equal(pst__heap_init(&traced.heap, NULL), PST_OK);
    pst__error_init(&traced.error, NULL, NULL);
    assert_int_equal(
        pst__trace_create(&traced.heap, &traced.error, 0, 1, RECORDS, 0, &traced.trace), PST_OK);
    for (int i = 0; i < TRACKS; ++i)
        (void)new_track(&traced, "lane");
    const long bytes = resident_bytes();
    start(&traced);
    assert_true(resident_bytes() - bytes < TRACKS * RECORDS * 56L / 4);
    pst__trace_destroy(traced.trace);
}

/* ---- recording ------------------------------------------------------------------------------ */

static void recording_allocates_nothing(void **state) {
    traced *traced = *state;
    pst__track *lane = new_track(traced, "gather");
    start(traced);
    pst__track *thread = pst__track_of_thread(traced->trace);
    long allocs = traced->counts.allocs;
    for (uint64_t i = 0; i < 1000; ++i) {
        slice_now(lane, "task");
        pst__trace_flow(lane, i, pst__now(), 0);
        pst__trace_count(lane, "arena bytes", pst__now(), 4096);
        pst__trace_mark_begin(pst__track_of_thread(traced->trace), "step");
        pst__trace_mark_end(thread);
    }
    assert_int_equal(traced->counts.allocs, allocs);
}

static void overwritten_records_are_counted_over_all_tracks(void **state) {
    traced *traced = *state;
    pst__track *tracks[] = {new_track(traced, "gather"), new_track(traced, "reduce")};
    uint64_t records, overwritten;
    start(traced);
    for (int i = 0; i < 100; ++i)
        slice_now(tracks[0], "task");
    for (int i = 0; i < 10; ++i)
        slice_now(tracks[1], "task");
    pst__trace_get_stats(traced->trace, &records, &overwritten);
    assert_int_equal(records, 110);
    assert_int_equal(overwritten, 100 - 63);
}

static void nothing_is_recorded_on_no_track(void **state) {
    traced *traced = *state;
    start(traced);
    pst__trace_slice(NULL, "task", 1, 2, 0, 0);
    pst__trace_flow(NULL, 1, 1, 0);
    pst__trace_count(NULL, "bytes", 1, 1);
    pst__trace_mark_begin(NULL, "mark");
    pst__trace_mark_end(NULL);
    assert_int_equal(record_count(traced), 0);
}

static void marks_nest_and_record_a_slice_each(void **state) {
    traced *traced = *state;
    pst__track *track = pst__track_of_thread(traced->trace);
    start(traced);
    pst__trace_mark_begin(track, "outer_mark");
    pst__trace_mark_begin(track, "inner_mark");
    pst__trace_mark_end(track);
    assert_int_equal(record_count(traced), 1);
    pst__trace_mark_end(track);
    assert_int_equal(record_count(traced), 2);
    char *text = traced_text(traced);
    assert_true(strstr(text, "outer_mark") < strstr(text, "inner_mark"));
    free(text);
}

static void marks_too_deep_are_left_out_and_the_others_still_match(void **state) {
    traced *traced = *state;
    pst__track *track = pst__track_of_thread(traced->trace);
    start(traced);
    pst__trace_mark_begin(track, "outermost_mark");
    for (int depth = 1; depth < PST__TRACE_MARKS_MAX + 5; ++depth)
        pst__trace_mark_begin(track, "deeper");
    for (int depth = 1; depth < PST__TRACE_MARKS_MAX + 5; ++depth)
        pst__trace_mark_end(track);
    assert_int_equal(record_count(traced), PST__TRACE_MARKS_MAX - 1);
    pst__trace_mark_end(track);
    char *text = traced_text(traced);
    assert_non_null(strstr(text, "outermost_mark"));
    free(text);
}

static void an_end_without_its_begin_records_nothing(void **state) {
    traced *traced = *state;
    pst__track *track = pst__track_of_thread(traced->trace);
    start(traced);
    pst__trace_mark_end(track);
    pst__trace_mark_begin(track, "left_open");
    stop(traced);
    start(traced);
    pst__trace_mark_end(track);
    assert_int_equal(record_count(traced), 0);
}

static void interned_names_outlive_their_owner_and_are_shared(void **state) {
    traced *traced = *state;
    char name[] = "weights bytes";
    const char *copy = pst__trace_intern(traced->trace, name);
    name[0] = 'x';
    assert_string_equal(copy, "weights bytes");
    assert_ptr_equal(pst__trace_intern(traced->trace, "weights bytes"), copy);
    assert_ptr_not_equal(pst__trace_intern(traced->trace, name), copy);
}

static void each_of_many_names_is_kept_once(void **state) {
    enum { NAMES = 5000 };
    traced *traced = *state;
    const char *copies[NAMES];
    for (int again = 0; again < 2; again++)
        for (int i = 0; i < NAMES; i++) {
            char name[32];
            (void)snprintf(name, sizeof name, "gather %d", i);
            const char *copy = pst__trace_intern(traced->trace, name);
            assert_string_equal(copy, name);
            if (again) assert_ptr_equal(copy, copies[i]);
            copies[i] = copy;
        }
}

/* ---- tracks of threads ----------------------------------------------------------------------- */

static void a_thread_has_one_track_in_each_trace(void **state) {
    traced *one = *state, other;
    assert_int_equal(traced_open(&other, 1, 2, 64), PST_OK);
    pst__track *in_one = pst__track_of_thread(one->trace);
    pst__track *in_other = pst__track_of_thread(other.trace);
    assert_non_null(in_one);
    assert_non_null(in_other);
    assert_ptr_not_equal(in_one, in_other);
    for (int turn = 0; turn < 3; ++turn) {
        assert_ptr_equal(pst__track_of_thread(one->trace), in_one);
        assert_ptr_equal(pst__track_of_thread(other.trace), in_other);
    }
    assert_int_equal(traced_close(&other), 0);
}

static void a_trace_made_again_knows_no_thread(void **state) {
    (void)state;
    for (int turn = 0; turn < 2000; ++turn) {
        traced traced;
        assert_int_equal(traced_open(&traced, 0, 1, 2), PST_OK);
        long allocs = traced.counts.allocs;
        assert_non_null(pst__track_of_thread(traced.trace));
        assert_true(traced.counts.allocs > allocs); /* not that of the trace before */
        assert_int_equal(traced_close(&traced), 0);
    }
}

typedef struct visitor {
    pthread_t thread;
    pst__trace *trace;
    pst__track *own; /* (optional) bound before the visit */
    pst__track *found;
} visitor;

static void *visit(void *argument) {
    visitor *visitor = argument;
    if (visitor->own != NULL) (void)pst__track_bind(visitor->own);
    visitor->found = pst__track_of_thread(visitor->trace);
    return NULL;
}

static pst__track *track_seen_by_a_thread(pst__trace *trace, pst__track *own) {
    visitor visitor = {.trace = trace, .own = own};
    assert_int_equal(pthread_create(&visitor.thread, NULL, visit, &visitor), 0);
    (void)pthread_join(visitor.thread, NULL);
    return visitor.found;
}

static void each_thread_has_a_track_of_its_own(void **state) {
    traced *traced = *state;
    pst__track *mine = pst__track_of_thread(traced->trace);
    pst__track *theirs = track_seen_by_a_thread(traced->trace, NULL);
    assert_non_null(theirs);
    assert_ptr_not_equal(mine, theirs);
}

static void a_bound_track_is_the_threads_own(void **state) {
    traced *traced = *state;
    pst__track *worker = new_track(traced, "worker gather");
    assert_ptr_equal(track_seen_by_a_thread(traced->trace, worker), worker);
    assert_ptr_not_equal(pst__track_of_thread(traced->trace), worker);
}

/* ---- tracks that end ------------------------------------------------------------------------- */

static uint64_t overwritten_count(traced *traced) {
    uint64_t records, overwritten;
    pst__trace_get_stats(traced->trace, &records, &overwritten);
    return overwritten;
}

typedef struct marker {
    pthread_t thread;
    pst__trace *trace;
    const char *name;
    int *may_end; /* (optional) relaxed: the thread's own end orders what it did */
    pid_t id;
} marker;

static void *mark_once(void *argument) {
    marker *marker = argument;
    marker->id = gettid();
    pst__track *track = pst__track_of_thread(marker->trace);
    pst__trace_mark_begin(track, marker->name);
    pst__trace_mark_end(track);
    while (marker->may_end != NULL && !pst__load_relaxed(marker->may_end))
        (void)sched_yield();
    return NULL;
}

static void begin_marker(marker *marker) {
    assert_int_equal(pthread_create(&marker->thread, NULL, mark_once, marker), 0);
}

static void mark_on_a_thread(traced *traced, const char *name) {
    marker marker = {.trace = traced->trace, .name = name};
    begin_marker(&marker);
    (void)pthread_join(marker.thread, NULL);
    while (tgkill(getpid(), marker.id, 0) == 0) /* the kernel may know it for a moment yet */
        (void)sched_yield();
}

static void threads_that_end_give_their_rings_back_and_leave_their_marks(void **state) {
    enum { THREADS = 100, RECORDS = 4096, RING = RECORDS * 56 };
    (void)state;
    traced traced;
    char names[THREADS][16];
    assert_int_equal(traced_open(&traced, 0, 1, RECORDS), PST_OK);
    start(&traced);
    const long bytes = traced.counts.live_bytes;
    for (int i = 0; i < THREADS; i++) {
        (void)snprintf(names[i], sizeof names[i], "mark %03d", i);
        mark_on_a_thread(&traced, names[i]);
    }
    assert_true(traced.counts.live_bytes - bytes < 2 * RING);
    assert_int_equal(record_count(&traced), THREADS);
    assert_int_equal(overwritten_count(&traced), 0);
    char *text = traced_text(&traced);
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(occurrences(text, names[i]), 1);
    free(text);
    assert_int_equal(traced_close(&traced), 0);
}

static void only_threads_that_run_count_against_the_limit(void **state) {
    traced *traced = *state;
    marker markers[PST__TRACE_THREADS_MAX];
    int may_end = 0;
    start(traced);
    for (int i = 0; i < PST__TRACE_THREADS_MAX; ++i)
        mark_on_a_thread(traced, "ended");
    for (int i = 0; i < PST__TRACE_THREADS_MAX; ++i) {
        markers[i] = (marker){.trace = traced->trace, .name = "runs", .may_end = &may_end};
        begin_marker(&markers[i]);
    }
    while (record_count(traced) < 2 * PST__TRACE_THREADS_MAX)
        (void)sched_yield();
    assert_int_equal(overwritten_count(traced), 0);
    mark_on_a_thread(traced, "one too many");
    assert_int_equal(record_count(traced), 2 * PST__TRACE_THREADS_MAX + 1);
    assert_int_equal(overwritten_count(traced), 1);
    pst__store_relaxed(&may_end, 1);
    for (int i = 0; i < PST__TRACE_THREADS_MAX; ++i)
        (void)pthread_join(markers[i].thread, NULL);
    while (track_seen_by_a_thread(traced->trace, NULL) == NULL) /* looks only now and then */
        (void)sched_yield();
}

static void end_a_track(traced *traced, const char *name, int records) {
    pst__track *track = new_track(traced, name);
    for (int i = 0; i < records; ++i)
        slice_now(track, "task");
    pst__track_end(track);
}

static void tracks_that_end_keep_a_bounded_number_of_records(void **state) {
    traced *traced = *state;
    char name[] = "lane 0";
    start(traced);
    for (; name[5] <= '9'; ++name[5])
        end_a_track(traced, name, 100);
    assert_int_equal(record_count(traced), 1000);
    assert_int_equal(overwritten_count(traced), 1000 - 4 * 63);
    char *text = traced_text(traced);
    assert_null(strstr(text, "lane 5"));
    assert_non_null(strstr(text, "lane 6"));
    free(text);
}

static void tracks_that_end_are_kept_in_a_bounded_number_and_only_with_records(void **state) {
    (void)state;
    traced traced;
    assert_int_equal(traced_open(&traced, 0, 1, 4096), PST_OK);
    const long idle = traced.counts.live_bytes;
    start(&traced);
    for (int i = 0; i < 1024; ++i)
        end_a_track(&traced, "lane", 1);
    const long full = traced.counts.live_bytes;
    for (int i = 0; i < 1024; ++i) {
        end_a_track(&traced, "lane", 1);
        end_a_track(&traced, "lane", 0);
    }
    assert_int_equal(traced.counts.live_bytes, full);
    assert_int_equal(record_count(&traced), 2048);
    assert_int_equal(overwritten_count(&traced), 1024);
    stop(&traced);
    start(&traced);
    assert_int_equal(traced.counts.live_bytes, idle);
    assert_int_equal(record_count(&traced), 0);
    assert_int_equal(traced_close(&traced), 0);
}

/* ---- several threads ------------------------------------------------------------------------- */

enum { RECORDERS = 4, ROUNDS = 20 };

typedef struct recorder {
    pthread_t thread;
    pst__trace *trace;
    int *quit; /* relaxed: only ends the loop */
} recorder;

static void *record_on(void *argument) {
    recorder *recorder = argument;
    while (!pst__load_relaxed(recorder->quit)) {
        if (!pst__trace_on(recorder->trace)) continue;
        pst__track *track = pst__track_of_thread(recorder->trace);
        pst__trace_mark_begin(track, "concurrent");
        pst__trace_flow(track, 1, pst__now(), 0);
        pst__trace_mark_end(track);
    }
    return NULL;
}

static void threads_may_record_while_another_starts_stops_and_writes(void **state) {
    traced *traced = *state;
    recorder recorders[RECORDERS];
    int quit = 0;
    for (int i = 0; i < RECORDERS; ++i) {
        recorders[i] = (recorder){.trace = traced->trace, .quit = &quit};
        assert_int_equal(pthread_create(&recorders[i].thread, NULL, record_on, &recorders[i]), 0);
    }
    for (int round = 0; round < ROUNDS; ++round) {
        start(traced);
        while (record_count(traced) < 10)
            (void)sched_yield();
        char *text = traced_text(traced);
        assert_non_null(text);
        assert_int_equal(occurrences(text, "\"ph\":\"f\""), 0);
        free(text);
        stop(traced);
    }
    pst__store_relaxed(&quit, 1);
    for (int i = 0; i < RECORDERS; ++i)
        (void)pthread_join(recorders[i].thread, NULL);
}

static void *send_threads_and_lanes(void *argument) {
    const recorder *recorder = argument;
    for (pst__track *lane; !pst__load_relaxed(recorder->quit); pst__track_end(lane)) {
        marker marker = {.trace = recorder->trace, .name = "passing"};
        if (pthread_create(&marker.thread, NULL, mark_once, &marker) == 0)
            (void)pthread_join(marker.thread, NULL);
        if (pst__track_create(recorder->trace, PST__TRACK_LANE, "lane", &lane) != PST_OK) break;
        slice_now(lane, "passing");
    }
    return NULL;
}

static void tracks_may_end_while_others_record_and_one_writes(void **state) {
    traced *traced = *state;
    int quit = 0;
    recorder stays = {.trace = traced->trace, .quit = &quit}, sender = stays;
    assert_int_equal(pthread_create(&stays.thread, NULL, record_on, &stays), 0);
    assert_int_equal(pthread_create(&sender.thread, NULL, send_threads_and_lanes, &sender), 0);
    for (int round = 0; round < ROUNDS; ++round) {
        start(traced);
        for (size_t seen = 0; seen < 10;) {
            char *text = traced_text(traced);
            assert_non_null(text);
            seen = occurrences(text, "\"passing\"");
            free(text);
        }
        stop(traced);
    }
    pst__store_relaxed(&quit, 1);
    (void)pthread_join(stays.thread, NULL);
    (void)pthread_join(sender.thread, NULL);
}

/* ---- no memory ------------------------------------------------------------------------------- */

static pst_status whole_life(traced *traced, long fail_at) {
    memset(traced, 0, sizeof *traced);
    traced->counts.fail_at = fail_at;
    traced->heap = counting_heap_open(&traced->counts);
    pst__error_init(&traced->error, NULL, NULL);
    pst__track *track;
    pst_status status =
        pst__trace_create(&traced->heap, &traced->error, 0, 1, 64, 0, &traced->trace);
    if (status != PST_OK) return status;
    status = pst__track_create(traced->trace, PST__TRACK_LANE, "gather", &track);
    if (status == PST_OK) status = pst__trace_start(traced->trace);
    if (status == PST_OK && pst__track_of_thread(traced->trace) == NULL) status = PST_ENOMEM;
    if (status != PST_OK) return status;
    slice_now(track, "task");
    pst__trace_flow(track, 1, pst__now() + 5, 0);
    pst__trace_flow(track, 1, pst__now() + 6, 1);
    slice_now(track, "task");
    return pst__trace_write(traced->trace, "/dev/null", 0);
}

static void each_failed_allocation_is_reported_and_loses_nothing(void **state) {
    (void)state;
    pst_status status = PST_ENOMEM;
    for (long fail_at = 1; status != PST_OK; ++fail_at) {
        traced traced;
        status = whole_life(&traced, fail_at);
        assert_true(status == PST_OK || status == PST_ENOMEM);
        if (status == PST_ENOMEM)
            assert_non_null(strstr(traced_error(&traced), "memory"));
        else
            assert_true(fail_at > 8);
        assert_int_equal(traced_close(&traced), 0);
        assert_true(fail_at < 100);
    }
}

static void a_start_that_found_no_memory_works_later(void **state) {
    traced *traced = *state;
    pst__track *track = new_track(traced, "gather");
    traced->counts.fail_at = traced->counts.allocs + 1;
    assert_int_equal(pst__trace_start(traced->trace), PST_ENOMEM);
    assert_non_null(strstr(traced_error(traced), "gather"));
    assert_false(pst__trace_on(traced->trace));
    start(traced);
    slice_now(track, "task");
    assert_int_equal(record_count(traced), 1);
}

#define WITH_TRACE(test) cmocka_unit_test_setup_teardown(test, open_trace, close_trace)

int main(void) {
    const struct CMUnitTest tests[] = {
        WITH_TRACE(a_trace_is_off_until_started_and_after_it_is_stopped),
        WITH_TRACE(starting_twice_and_stopping_twice_are_errors_that_say_so),
        WITH_TRACE(starting_again_clears_what_was_recorded),
        WITH_TRACE(records_stay_after_the_stop_and_can_be_written_twice),
        WITH_TRACE(a_track_made_while_recording_records),
        WITH_TRACE(a_track_made_before_the_first_start_has_no_ring_yet),
        cmocka_unit_test(a_ring_costs_no_memory_until_something_is_recorded),
        WITH_TRACE(recording_allocates_nothing),
        WITH_TRACE(overwritten_records_are_counted_over_all_tracks),
        WITH_TRACE(nothing_is_recorded_on_no_track),
        WITH_TRACE(marks_nest_and_record_a_slice_each),
        WITH_TRACE(marks_too_deep_are_left_out_and_the_others_still_match),
        WITH_TRACE(an_end_without_its_begin_records_nothing),
        WITH_TRACE(interned_names_outlive_their_owner_and_are_shared),
        WITH_TRACE(each_of_many_names_is_kept_once),
        WITH_TRACE(a_thread_has_one_track_in_each_trace),
        cmocka_unit_test(a_trace_made_again_knows_no_thread),
        WITH_TRACE(each_thread_has_a_track_of_its_own),
        WITH_TRACE(a_bound_track_is_the_threads_own),
        cmocka_unit_test(threads_that_end_give_their_rings_back_and_leave_their_marks),
        WITH_TRACE(only_threads_that_run_count_against_the_limit),
        WITH_TRACE(tracks_that_end_keep_a_bounded_number_of_records),
        cmocka_unit_test(tracks_that_end_are_kept_in_a_bounded_number_and_only_with_records),
        WITH_TRACE(threads_may_record_while_another_starts_stops_and_writes),
        WITH_TRACE(tracks_may_end_while_others_record_and_one_writes),
        cmocka_unit_test(each_failed_allocation_is_reported_and_loses_nothing),
        WITH_TRACE(a_start_that_found_no_memory_works_later),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
