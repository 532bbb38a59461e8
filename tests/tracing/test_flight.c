/* The flight record: what is kept always, beside what a program records. */
#include "tests/tracing/traced.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>

enum { RECORDS = 64, KEPT = 16 };

static int open_trace(void **state) {
    static traced traced;
    memset(&traced, 0, sizeof traced);
    traced.heap = counting_heap_open(&traced.counts);
    pst__error_init(&traced.error, NULL, NULL);
    *state = &traced;
    return pst__trace_create(&traced.heap, &traced.error, 0, 1, RECORDS, KEPT, &traced.trace);
}

static int close_trace(void **state) {
    return traced_close(*state) != 0;
}

static pst__track *new_track(traced *traced, const char *name) {
    pst__track *track = NULL;
    assert_int_equal(pst__track_create(traced->trace, PST__TRACK_LANE, name, &track), PST_OK);
    return track;
}

static void slice(traced *traced, pst__track *track, const char *name) {
    const uint64_t now = pst__now();
    assert_true(pst__trace_keeps(traced->trace));
    pst__trace_slice(track, name, now, now + 10, 0, 0);
}

/* The text of a dump, to be freed. */
static char *dumped(traced *traced, const pst__trace_head *head) {
    char path[] = "/tmp/penstock-dump-XXXXXX";
    int error, descriptor = mkstemp(path);
    assert_true(descriptor >= 0);
    assert_int_equal(pst__trace_dump(traced->trace, path, 0, head, &error), PST_OK);
    const off_t bytes = lseek(descriptor, 0, SEEK_END);
    char *text = calloc((size_t)bytes + 1, 1);
    assert_int_equal(pread(descriptor, text, (size_t)bytes, 0), bytes);
    (void)close(descriptor);
    (void)unlink(path);
    return text;
}

static void assert_dumped(traced *traced, const char *name, size_t times) {
    char *text = dumped(traced, NULL);
    assert_int_equal(occurrences(text, name), times);
    free(text);
}

static void it_runs_before_between_and_after_recordings(void **state) {
    traced *traced = *state;
    pst__track *track = new_track(traced, "gather");
    slice(traced, track, "before_it");
    assert_int_equal(pst__trace_start(traced->trace), PST_OK);
    slice(traced, track, "within_it");
    assert_int_equal(pst__trace_stop(traced->trace), PST_OK);
    slice(traced, track, "behind_it");
    char *text = dumped(traced, NULL);
    for (int i = 0; i < 3; i++)
        assert_int_equal(
            occurrences(text, (const char *[]){"before_it", "within_it", "behind_it"}[i]), 1);
    free(text);
}

static void a_recording_has_nothing_of_it(void **state) {
    traced *traced = *state;
    pst__track *track = new_track(traced, "gather");
    uint64_t records, overwritten;
    slice(traced, track, "before_it");
    assert_int_equal(pst__trace_start(traced->trace), PST_OK);
    slice(traced, track, "within_it");
    assert_int_equal(pst__trace_stop(traced->trace), PST_OK);
    for (int i = 0; i < 2 * KEPT; i++)
        slice(traced, track, "behind_it");
    pst__trace_get_stats(traced->trace, &records, &overwritten);
    assert_int_equal(records, 1);
    assert_int_equal(overwritten, 0);
    char *text = traced_text(traced);
    assert_int_equal(occurrences(text, "before_it") + occurrences(text, "behind_it"), 0);
    assert_int_equal(occurrences(text, "within_it"), 1);
    free(text);
}

static void it_has_the_newest(void **state) {
    traced *traced = *state;
    pst__track *track = new_track(traced, "gather");
    slice(traced, track, "the_oldest");
    for (int i = 0; i < KEPT - 1; i++)
        slice(traced, track, "a_newer_one");
    assert_dumped(traced, "the_oldest", 0);
    assert_dumped(traced, "a_newer_one", KEPT - 1);
}

static void *keep_a_record(void *argument) {
    traced *traced = argument;
    pst__track *track = pst__track_of_thread(traced->trace);
    if (track != NULL) pst__trace_slice(track, "of_a_thread", pst__now(), pst__now(), 0, 0);
    return (void *)(intptr_t)gettid();
}

/* Their number is no bound of the memory, and the last of them are in the dump. */
static void threads_that_end_give_their_rings_back(void **state) {
    enum { THREADS = 400 };
    traced *traced = *state;
    long most = 0;
    for (int i = 0; i < THREADS; i++) {
        pthread_t thread;
        void *id;
        assert_int_equal(pthread_create(&thread, NULL, keep_a_record, traced), 0);
        (void)pthread_join(thread, &id);
        while (tgkill(getpid(), (pid_t)(intptr_t)id, 0) == 0)
            (void)sched_yield();
        if (i == THREADS / 2) most = traced->counts.live_bytes;
    }
    assert_true(traced->counts.live_bytes <= most + KEPT * 56);
    char *text = dumped(traced, NULL);
    assert_true(occurrences(text, "of_a_thread") >= 4 * KEPT - 1);
    free(text);
}

static void names_of_its_own_are_bounded(void **state) {
    enum { NAMES = 20000 };
    traced *traced = *state;
    char name[32];
    int kept = 0;
    for (int i = 0; i < NAMES; i++) {
        (void)snprintf(name, sizeof name, "task %d", i);
        kept += pst__trace_name(traced->trace, name) != NULL;
    }
    assert_int_equal(kept, 8192);
    assert_non_null(pst__trace_name(traced->trace, "task 0"));
    assert_non_null(pst__trace_intern(traced->trace, "what has to be kept"));
    assert_int_equal(pst__trace_start(traced->trace), PST_OK);
    assert_non_null(pst__trace_name(traced->trace, name));
    assert_int_equal(pst__trace_stop(traced->trace), PST_OK);
}

static void a_dump_that_cannot_be_written_leaves_no_text(void **state) {
    traced *traced = *state;
    int error = 0;
    assert_int_equal(pst__trace_dump(traced->trace, "/nowhere/at/all", 0, NULL, &error), PST_EIO);
    assert_int_equal(error, ENOENT);
    assert_string_equal(traced_error(traced), "");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(it_runs_before_between_and_after_recordings, open_trace,
                                        close_trace),
        cmocka_unit_test_setup_teardown(a_recording_has_nothing_of_it, open_trace, close_trace),
        cmocka_unit_test_setup_teardown(it_has_the_newest, open_trace, close_trace),
        cmocka_unit_test_setup_teardown(threads_that_end_give_their_rings_back, open_trace,
                                        close_trace),
        cmocka_unit_test_setup_teardown(names_of_its_own_are_bounded, open_trace, close_trace),
        cmocka_unit_test_setup_teardown(a_dump_that_cannot_be_written_leaves_no_text, open_trace,
                                        close_trace),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
