/* What is written for which records. tests/python/test_trace_tool.py reads the sample files with a
 * JSON parser and holds them against the rules of the viewers. */
#include "tests/tracing/traced.h"

#include <errno.h>
#include <fcntl.h>

enum { RANK = 2, RECORDS = 64 };

typedef struct scene {
    traced traced;
    pst__track *lane, *thread;
    uint64_t t; /* the recording's begin, nearly */
} scene;

static pst_status open_scene(scene *scene, int rank, int world_size) {
    pst_status status = traced_open(&scene->traced, rank, world_size, RECORDS);
    pst__trace *trace = scene->traced.trace;
    if (status == PST_OK)
        status = pst__track_create(trace, PST__TRACK_LANE, "gather", &scene->lane);
    if (status == PST_OK)
        status = pst__track_create(trace, PST__TRACK_WORKER, "worker gather", &scene->thread);
    if (status == PST_OK) status = pst__trace_start(trace);
    scene->t = pst__now();
    return status;
}

static int set_up(void **state) {
    static scene scene;
    *state = &scene;
    return open_scene(&scene, RANK, 4);
}

static int tear_down(void **state) {
    scene *scene = *state;
    return traced_close(&scene->traced) != 0;
}

/* The text of the recording, valid until the next call. */
static const char *written(scene *scene) {
    static char *text;
    free(text);
    text = traced_text(&scene->traced);
    assert_non_null(text);
    return text;
}

static void assert_has(const char *text, const char *part, size_t times) {
    if (occurrences(text, part) != times) print_message("%s\n", text);
    assert_int_equal(occurrences(text, part), times);
}

static void slice(pst__track *track, const char *name, uint64_t begin, uint64_t end) {
    pst__trace_slice(track, name, begin, end, 0, 0);
}

/* ---- the file ------------------------------------------------------------------------------- */

static void a_rank_is_a_process_and_tracks_are_named(void **state) {
    const char *text = written(*state);
    assert_has(text, "\"name\":\"process_name\",\"pid\":3,\"tid\":4,\"args\":{\"name\":\"rank 2\"}",
               1);
    assert_has(text, "\"name\":\"thread_name\",\"pid\":3,\"tid\":4,\"args\":{\"name\":\"gather\"}",
               1);
    assert_has(text, "\"tid\":5,\"args\":{\"name\":\"worker gather\"}", 1);
    assert_has(text, "\"name\":\"thread_sort_index\"", 2);
}

static void lanes_come_first_and_no_track_has_the_number_of_its_process(void **state) {
    scene *scene = *state;
    pst__track *lane;
    assert_int_equal(pst__track_create(scene->traced.trace, PST__TRACK_LANE, "reduce", &lane),
                     PST_OK);
    const char *text = written(scene);
    assert_has(text, "\"tid\":4,\"args\":{\"name\":\"gather\"}", 1);
    assert_has(text, "\"tid\":5,\"args\":{\"name\":\"reduce\"}", 1);
    assert_has(text, "\"tid\":6,\"args\":{\"name\":\"worker gather\"}", 1);
    assert_has(text, "\"tid\":3,", 0);
}

static void the_file_says_which_rank_it_is_and_when_it_began(void **state) {
    const char *text = written(*state);
    assert_has(text, "\"distributedInfo\":{\"backend\":\"penstock\",\"rank\": 2,\"world_size\":4}",
               1);
    const char *base = strstr(text, "\"baseTimeNanoseconds\":");
    assert_non_null(base);
    uint64_t begin = strtoull(base + strlen("\"baseTimeNanoseconds\":"), NULL, 10);
    uint64_t now = pst__clock_read(CLOCK_REALTIME);
    assert_true(begin <= now && now - begin < UINT64_C(3600) * 1000000000);
}

static void lost_records_are_told(void **state) {
    scene *scene = *state;
    for (int i = 0; i < 100; ++i)
        slice(scene->lane, "task", scene->t, scene->t + 1);
    const char *text = written(scene);
    assert_has(text, "\"penstock\":{\"records\":100,\"overwritten\":37}", 1);
    assert_has(text, "\"process_labels\"", 1);
    assert_has(text, "\"oldest dropped, 37 records\"", 1);
}

/* Tasks of 10 ns on the lane, and a slice over them on the thread. */
static void record_many(scene *scene) {
    for (uint64_t i = 0; i < 50; ++i)
        slice(scene->lane, i < 25 ? "early" : "later", scene->t + i * 10, scene->t + i * 10 + 10);
    slice(scene->thread, "all", scene->t, scene->t + 500);
}

static void a_file_of_limited_size_holds_what_is_newest_on_all_tracks(void **state) {
    enum { MOST_BYTES = 5000 };
    scene *scene = *state;
    record_many(scene);
    char path[] = "/tmp/penstock-trace-XXXXXX";
    int descriptor = mkstemp(path);
    const pst_status status = pst__trace_write(scene->traced.trace, path, MOST_BYTES);
    char text[2 * MOST_BYTES] = "";
    const ssize_t bytes = pread(descriptor, text, sizeof text - 1, 0);
    (void)close(descriptor);
    (void)unlink(path);
    assert_int_equal(status, PST_OK);
    assert_true(bytes > MOST_BYTES / 4 && bytes <= MOST_BYTES);
    const size_t kept = occurrences(text, "\"later\"");
    assert_has(text, "\"early\"", 0);
    assert_has(text, "\"all\"", 1);
    assert_true(kept > 5 && kept < 25);
    char lost[64];
    (void)snprintf(lost, sizeof lost, "\"overwritten\":%zu}", 50 - kept);
    assert_has(text, lost, 1);
}

static void a_path_that_cannot_be_opened_is_named_with_the_reason(void **state) {
    scene *scene = *state;
    const char *path = "/nonexistent/penstock.json";
    assert_int_equal(pst__trace_write(scene->traced.trace, path, 0), PST_EIO);
    const char *text = traced_error(&scene->traced);
    assert_non_null(strstr(text, path));
    assert_non_null(strstr(text, strerror(ENOENT)));
}

static void a_full_disk_is_an_error_and_not_a_short_file(void **state) {
    scene *scene = *state;
    assert_int_equal(pst__trace_write(scene->traced.trace, "/dev/full", 0), PST_EIO);
    assert_non_null(strstr(traced_error(&scene->traced), strerror(ENOSPC)));
}

static void writing_over_a_longer_file_leaves_nothing_of_it(void **state) {
    scene *scene = *state;
    char path[] = "/tmp/penstock-trace-XXXXXX";
    int descriptor = mkstemp(path);
    assert_int_equal(posix_fallocate(descriptor, 0, 100000), 0);
    pst_status status = pst__trace_write(scene->traced.trace, path, 0);
    off_t bytes = lseek(descriptor, 0, SEEK_END);
    (void)close(descriptor);
    (void)unlink(path);
    assert_int_equal(status, PST_OK);
    assert_true(bytes > 0 && bytes < 100000);
}

/* ---- slices --------------------------------------------------------------------------------- */

static void a_slice_has_its_duration_in_microseconds(void **state) {
    scene *scene = *state;
    slice(scene->lane, "task", scene->t + 1000, scene->t + 1001234567);
    assert_has(written(scene), "\"dur\":1001233.567}", 1);
}

static void ticket_and_bytes_are_arguments_where_there_are_any(void **state) {
    scene *scene = *state;
    pst__trace_slice(scene->lane, "all_gather", scene->t, scene->t + 1, 7, 4096);
    pst__trace_slice(scene->lane, "copy", scene->t + 2, scene->t + 3, 0, 512);
    slice(scene->lane, "bare", scene->t + 4, scene->t + 5);
    const char *text = written(scene);
    assert_has(text,
               "\"args\":{\"Collective name\":\"all_gather\",\"Seq\":7,\"Rank\":2,\"ticket\":7,"
               "\"bytes\":4096}}",
               1);
    assert_has(text, "\"args\":{\"bytes\":512}}", 1);
    assert_has(text, "\"args\":{", 2 + 6); /* and two of the process and of each track */
}

static void a_collective_says_which_way_it_went(void **state) {
    scene *scene = *state;
    pst__trace_collective(scene->lane, "all_gather", "ce", scene->t, scene->t + 1, 7, 4096);
    assert_has(written(scene), "\"Rank\":2,\"path\":\"ce\",\"ticket\":7,\"bytes\":4096}}", 1);
}

static void only_a_lanes_task_is_called_a_collective(void **state) {
    scene *scene = *state;
    pst__trace_slice(scene->thread, "wait all_gather", scene->t, scene->t + 1, 7, 0);
    const char *text = written(scene);
    assert_has(text, "\"args\":{\"ticket\":7}}", 1);
    assert_has(text, "Collective name", 0);
}

static void outer_slices_are_written_before_inner_ones(void **state) {
    scene *scene = *state;
    slice(scene->thread, "inner_slice", scene->t + 10, scene->t + 20);
    slice(scene->thread, "outer_slice", scene->t + 10, scene->t + 30);
    const char *text = written(scene);
    assert_true(strstr(text, "outer_slice") < strstr(text, "inner_slice"));
    assert_has(text, "\"ph\":\"X\"", 2);
}

static void slices_that_touch_do_not_overlap(void **state) {
    scene *scene = *state;
    slice(scene->lane, "first", scene->t + 10, scene->t + 20);
    slice(scene->lane, "second", scene->t + 20, scene->t + 30);
    assert_has(written(scene), "\"ph\":\"X\"", 2);
}

static void slices_that_overlap_become_asynchronous_pairs(void **state) {
    scene *scene = *state;
    slice(scene->lane, "first", scene->t + 10, scene->t + 20);
    slice(scene->lane, "second", scene->t + 15, scene->t + 25);
    slice(scene->lane, "third", scene->t + 18, scene->t + 30);
    slice(scene->lane, "fourth", scene->t + 30, scene->t + 40);
    const char *text = written(scene);
    assert_has(text, "\"ph\":\"X\"", 2);
    assert_has(text, "\"ph\":\"b\"", 2);
    assert_has(text, "\"ph\":\"e\"", 2);
    assert_has(text, "\"cat\":\"task\",\"id\":8589934593", 2); /* one pair of rank 2's range */
    assert_has(text, "\"cat\":\"task\",\"id\":8589934594", 2);
}

static void deep_nests_stay_valid(void **state) {
    scene *scene = *state;
    for (uint64_t depth = 0; depth < 63; ++depth)
        slice(scene->thread, "deep", scene->t + depth, scene->t + 1000 - depth);
    assert_has(written(scene), "\"name\":\"deep\"", 63);
}

static void what_began_before_the_recording_is_cut_and_what_ended_before_is_left_out(void **state) {
    scene *scene = *state;
    slice(scene->lane, "in_flight_at_start", scene->t - 1000000000, scene->t + 10);
    slice(scene->lane, "over_at_start", scene->t - 2000000000, scene->t - 1000000000);
    const char *text = written(scene);
    assert_null(strstr(text, "over_at_start"));
    const char *cut = strstr(text, "in_flight_at_start");
    assert_non_null(cut);
    assert_non_null(strstr(cut, "\"ts\":0.000"));
}

static void a_slice_that_ends_before_it_begins_has_no_duration(void **state) {
    scene *scene = *state;
    slice(scene->lane, "backwards", scene->t + 20, scene->t + 10);
    assert_has(written(scene), "\"dur\":0.000", 1);
}

static void names_are_escaped(void **state) {
    scene *scene = *state;
    slice(scene->lane, "quote\" back\\ line\n", scene->t, scene->t + 1);
    assert_has(written(scene), "\"quote\\\" back\\\\ line\\u000a\"", 1);
}

static void names_that_are_no_utf8_are_mended(void **state) {
    static const char *const names[][2] = {
        {"a\xff z", "\"a\\ufffd z\""},                   /* no first byte */
        {"b\xc3", "\"b\\ufffd\""},                       /* cut */
        {"c\xc0\xaf", "\"c\\ufffd\\ufffd\""},            /* overlong */
        {"d\xed\xa0\x80", "\"d\\ufffd\\ufffd\\ufffd\""}, /* a surrogate */
        {"e\xf4\x90\x80\x80", "\"e\\ufffd\\ufffd\\ufffd\\ufffd\""},
        {"f\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", "\"f\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\""},
    };
    scene *scene = *state;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; ++i)
        slice(scene->lane, names[i][0], scene->t + i, scene->t + i);
    const char *text = written(scene);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; ++i)
        assert_has(text, names[i][1], 1);
}

/* ---- counters ------------------------------------------------------------------------------- */

static void counters_carry_signed_numbers(void **state) {
    scene *scene = *state;
    pst__trace_count(scene->lane, "queue depth", scene->t, INT64_MIN);
    pst__trace_count(scene->lane, "queue depth", scene->t + 1, 12);
    const char *text = written(scene);
    assert_has(text, "\"ph\":\"C\",\"name\":\"queue depth\"", 2);
    assert_has(text, "\"args\":{\"value\":-9223372036854775808}", 1);
    assert_has(text, "\"args\":{\"value\":12}", 1);
}

/* ---- arrows --------------------------------------------------------------------------------- */

static void two_slices(scene *scene) {
    slice(scene->thread, "from", scene->t + 10, scene->t + 20);
    slice(scene->lane, "to", scene->t + 30, scene->t + 40);
}

static void both_ends_of_an_arrow_are_written_with_one_id(void **state) {
    scene *scene = *state;
    two_slices(scene);
    pst__trace_flow(scene->thread, 77, scene->t + 15, 0);
    pst__trace_flow(scene->lane, 77, scene->t + 30, 1);
    const char *text = written(scene);
    assert_has(text, "\"ph\":\"s\",\"name\":\"edge\",\"pid\":3,\"tid\":5,", 1);
    assert_has(text, "\"ph\":\"f\",\"name\":\"edge\",\"pid\":3,\"tid\":4,", 1);
    assert_has(text, "\"bp\":\"e\"", 1);
    assert_has(text, "\"cat\":\"edge\",\"id\":8589934593,", 2);
}

static void an_end_without_a_start_is_left_out(void **state) {
    scene *scene = *state;
    two_slices(scene);
    pst__trace_flow(scene->thread, 1, scene->t + 15, 0);
    pst__trace_flow(scene->lane, 2, scene->t + 30, 1);
    assert_has(written(scene), "\"cat\":\"edge\"", 0);
}

static void an_end_outside_of_any_slice_takes_its_arrow_along(void **state) {
    scene *scene = *state;
    two_slices(scene);
    pst__trace_flow(scene->thread, 1, scene->t + 15, 0);
    pst__trace_flow(scene->lane, 1, scene->t + 50, 1);
    pst__trace_flow(scene->thread, 2, scene->t + 5, 0);
    pst__trace_flow(scene->lane, 2, scene->t + 35, 1);
    assert_has(written(scene), "\"cat\":\"edge\"", 0);
}

static void an_arrow_at_the_end_of_a_slice_stays_inside(void **state) {
    scene *scene = *state;
    slice(scene->thread, "from", scene->t, scene->t + 2000000000);
    slice(scene->lane, "to", scene->t + 2000000000, scene->t + 2000000010);
    pst__trace_flow(scene->thread, 1, scene->t + 2000000000, 0);
    pst__trace_flow(scene->lane, 1, scene->t + 2000000000, 1);
    const char *text = written(scene);
    double start = strtod(strstr(strstr(text, "\"ph\":\"s\""), "\"ts\":") + 5, NULL);
    double end = strtod(strstr(strstr(text, "\"ph\":\"f\""), "\"ts\":") + 5, NULL);
    assert_true(start < end && end - start < 0.0015);
}

static void one_start_serves_several_ends(void **state) {
    scene *scene = *state;
    two_slices(scene);
    pst__trace_flow(scene->thread, 9, scene->t + 15, 0);
    pst__trace_flow(scene->lane, 9, scene->t + 30, 1);
    pst__trace_flow(scene->lane, 9, scene->t + 35, 1);
    const char *text = written(scene);
    assert_has(text, "\"ph\":\"s\"", 2);
    assert_has(text, "\"ph\":\"f\"", 2);
}

static void an_id_used_again_binds_to_the_latest_start(void **state) {
    scene *scene = *state;
    two_slices(scene);
    slice(scene->thread, "again", scene->t + 1000000000, scene->t + 1000000100);
    slice(scene->lane, "to", scene->t + 1000000200, scene->t + 1000000300);
    for (uint64_t launch = 0; launch < 2; ++launch) {
        pst__trace_flow(scene->thread, 5, scene->t + launch * 1000000000 + 15, 0);
        pst__trace_flow(scene->lane, 5, scene->t + launch * 1000000190 + 35, 1);
    }
    const char *text = written(scene);
    assert_has(text, "\"ph\":\"s\"", 2);
    assert_has(text, "\"id\":8589934593,", 2);
    assert_has(text, "\"id\":8589934594,", 2);
}

/* ---- the sample ----------------------------------------------------------------------------- */

/* One step of a rank whose clock is `skew` late: a gather, what needs it, a reduction. */
static void record_step(scene *scene, pst__track *device, uint64_t t) {
    pst__trace_slice(scene->lane, "all_gather blocks.0", t + 1000, t + 51000, 1, 1048576);
    pst__trace_slice(scene->lane, "reduce_scatter blocks.0", t + 60000, t + 90000, 2, 1048576);
    slice(scene->thread, "step", t, t + 100000);
    slice(scene->thread, "wait blocks.0", t + 2000, t + 52000);
    slice(scene->thread, "launch \"quoted\" \xff", t + 500, t + 1500);
    pst__trace_flow(scene->thread, 1, t + 700, 0);
    pst__trace_flow(scene->lane, 1, t + 1000, 1);
    pst__trace_flow(device, 1, t + 60000, 1);
    slice(device, "kernel a", t + 60000, t + 70000);
    slice(device, "kernel b", t + 65000, t + 75000);
    for (uint64_t i = 0; i < 10; ++i)
        pst__trace_count(scene->thread, "arena bytes", t + i * 1000, (int64_t)(i * 4096));
}

static void a_sample_of_all_events_is_written_for_each_rank(void **state) {
    (void)state;
    const char *folder = getenv("PST_TRACE_SAMPLES"); /* kept there for other programs */
    for (int rank = 0; rank < 2; ++rank) {
        scene scene;
        pst__track *device, *full;
        char path[512];
        assert_int_equal(open_scene(&scene, rank, 2), PST_OK);
        pst__trace *trace = scene.traced.trace;
        assert_int_equal(pst__track_create(trace, PST__TRACK_LANE, "device", &device), PST_OK);
        assert_int_equal(pst__track_create(trace, PST__TRACK_LANE, "full", &full), PST_OK);
        record_step(&scene, device, scene.t + (uint64_t)rank * 5000);
        for (uint64_t i = 0; i < 3 * RECORDS; ++i)
            slice(full, "task", scene.t + i * 10, scene.t + i * 10 + 10);
        (void)snprintf(path, sizeof path, "%s/rank%d.json", folder == NULL ? "/tmp" : folder, rank);
        if (folder == NULL) (void)snprintf(path, sizeof path, "/dev/null");
        assert_int_equal(pst__trace_write(trace, path, 0), PST_OK);
        assert_int_equal(traced_close(&scene.traced), 0);
    }
}

#define IN_SCENE(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        IN_SCENE(a_rank_is_a_process_and_tracks_are_named),
        IN_SCENE(lanes_come_first_and_no_track_has_the_number_of_its_process),
        IN_SCENE(the_file_says_which_rank_it_is_and_when_it_began),
        IN_SCENE(lost_records_are_told),
        IN_SCENE(a_file_of_limited_size_holds_what_is_newest_on_all_tracks),
        IN_SCENE(a_path_that_cannot_be_opened_is_named_with_the_reason),
        IN_SCENE(a_full_disk_is_an_error_and_not_a_short_file),
        IN_SCENE(writing_over_a_longer_file_leaves_nothing_of_it),
        IN_SCENE(a_slice_has_its_duration_in_microseconds),
        IN_SCENE(ticket_and_bytes_are_arguments_where_there_are_any),
        IN_SCENE(a_collective_says_which_way_it_went),
        IN_SCENE(only_a_lanes_task_is_called_a_collective),
        IN_SCENE(outer_slices_are_written_before_inner_ones),
        IN_SCENE(slices_that_touch_do_not_overlap),
        IN_SCENE(slices_that_overlap_become_asynchronous_pairs),
        IN_SCENE(deep_nests_stay_valid),
        IN_SCENE(what_began_before_the_recording_is_cut_and_what_ended_before_is_left_out),
        IN_SCENE(a_slice_that_ends_before_it_begins_has_no_duration),
        IN_SCENE(names_are_escaped),
        IN_SCENE(names_that_are_no_utf8_are_mended),
        IN_SCENE(counters_carry_signed_numbers),
        IN_SCENE(both_ends_of_an_arrow_are_written_with_one_id),
        IN_SCENE(an_end_without_a_start_is_left_out),
        IN_SCENE(an_end_outside_of_any_slice_takes_its_arrow_along),
        IN_SCENE(an_arrow_at_the_end_of_a_slice_stays_inside),
        IN_SCENE(one_start_serves_several_ends),
        IN_SCENE(an_id_used_again_binds_to_the_latest_start),
        cmocka_unit_test(a_sample_of_all_events_is_written_for_each_rank),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
