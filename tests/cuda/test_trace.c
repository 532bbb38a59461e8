/* In the trace a lane of the device shows when its stream did the work, not when it was launched or
 * seen to be done. */
#include "tests/cuda/fixture.h"

#include <penstock/trace.h>
#include <unistd.h>

#define HELD_US 50000.0

typedef struct scene {
    fixture *f;
    pst_lane *gather, *reduce;
} scene;

static pst_lane *open_device_lane(fixture *f, const char *name) {
    const pst_lane_options options = {
        .size = sizeof options, .name = name, .device = f->device, .mode = PST_LANE_PUMPED};
    pst_lane *lane = NULL;
    assert_ok(pst_lane_create(f->runtime, &options, &lane));
    return lane;
}

static int setup_scene(void **state) {
    scene *s = calloc(1, sizeof *s);
    assert_int_equal(setup((void **)&s->f), 0);
    s->gather = open_device_lane(s->f, "gather");
    s->reduce = open_device_lane(s->f, "reduce");
    *state = s;
    return 0;
}

static int teardown_scene(void **state) {
    scene *s = *state;
    const int result = teardown((void **)&s->f);
    free(s);
    return result;
}

static pst_status enqueue(void *argument, pst_stream *stream) {
    static char bytes[2];
    fixture *f = argument;
    const pst_copy copy = {&bytes[1], &bytes[0], 1};
    return f->ops->copy(f->device, stream, &copy, 1);
}

static pst_task add(scene *s, pst_graph *graph, pst_lane *lane, const char *name,
                    const pst_task *after) {
    pst_task task;
    const pst_task_options options = {.size = sizeof options,
                                      .name = name,
                                      .lane = lane,
                                      .work = {enqueue, NULL, s->f},
                                      .after = after,
                                      .after_count = after != NULL};
    assert_ok(pst_graph_add(graph, &options, &task));
    return task;
}

static void turns(const scene *s, int count) {
    for (int i = 0; i < count; i++)
        (void)pst_run_once(s->f->runtime, NULL);
}

static char *write_trace(pst_runtime *runtime) {
    char path[] = "/tmp/penstock_cuda_trace_XXXXXX";
    char *text = calloc(1, 1 << 20);
    const int descriptor = mkstemp(path);
    assert_ok(pst_trace_stop(runtime));
    assert_ok(pst_trace_write(runtime, path));
    assert_true(read(descriptor, text, (1 << 20) - 1) > 0);
    (void)close(descriptor);
    (void)unlink(path);
    return text;
}

/* The beginnings, in microseconds, of all slices with this name. */
static size_t begins_of(const char *text, const char *name, double *begins) {
    char wanted[64];
    size_t count = 0;
    (void)snprintf(wanted, sizeof wanted, "\"name\":\"%s\"", name);
    for (const char *at = text; (at = strstr(at, wanted)) != NULL; at++) {
        const char *line = at;
        while (line > text && *line != '\n')
            line--;
        const char *time = strstr(line, "\"ts\":"), *end = strchr(at, '\n');
        if (time == NULL || (end != NULL && time > end)) continue;
        begins[count++] = strtod(time + strlen("\"ts\":"), NULL);
    }
    return count;
}

static size_t count_of(const char *text, const char *word) {
    size_t count = 0;
    for (const char *at = text; (at = strstr(at, word)) != NULL; at += strlen(word))
        count++;
    return count;
}

static void a_lanes_slice_begins_when_the_stream_gets_there(void **state) {
    scene *s = *state;
    double begins[8];
    pst_graph *graph = open_graph(s->f->runtime, PST_GRAPH_SEALED, "step");
    pst_task gathered = add(s, graph, s->gather, "held gather", NULL);
    (void)add(s, graph, s->reduce, "held reduce", &gathered);
    assert_ok(pst_graph_seal(graph));
    /* Not held: the first timed event asks the device for its clock. */
    pst_event *timed = NULL;
    assert_ok(s->f->ops->event_create(s->f->device, 1, &timed));
    s->f->ops->event_destroy(s->f->device, timed);
    assert_ok(pst_trace_start(s->f->runtime));
    assert_ok(pst_graph_launch(graph, NULL));
    fake_cuda_hold(1);
    turns(s, 5);
    (void)usleep((useconds_t)HELD_US);
    fake_cuda_hold(0);
    pump(s->f->runtime);
    char *text = write_trace(s->f->runtime);
    assert_int_equal(begins_of(text, "held gather", begins), 2);
    assert_true(begins[0] - begins[1] > HELD_US / 2 || begins[1] - begins[0] > HELD_US / 2);
    assert_int_equal(begins_of(text, "held reduce", begins), 2);
    assert_true(begins[0] - begins[1] > HELD_US / 2 || begins[1] - begins[0] > HELD_US / 2);
    assert_int_equal(count_of(text, "\"ph\":\"s\""), 1);
    assert_int_equal(count_of(text, "\"ph\":\"f\""), 1);
    free(text);
}

static void timed_events_are_used_again_and_only_while_tracing(void **state) {
    scene *s = *state;
    pst_graph *graph = open_graph(s->f->runtime, PST_GRAPH_SEALED, "step");
    pst_task gathered = add(s, graph, s->gather, "gather", NULL);
    (void)add(s, graph, s->reduce, "reduce", &gathered);
    assert_ok(pst_graph_seal(graph));
    for (int k = 0; k < 30; k++) {
        const size_t live = fake_cuda_live();
        if (k == 10) assert_ok(pst_trace_start(s->f->runtime));
        if (k == 20) assert_ok(pst_trace_stop(s->f->runtime));
        fake_cuda_reset();
        assert_ok(pst_graph_launch(graph, NULL));
        pump(s->f->runtime);
        if (k != 10) assert_int_equal(fake_cuda_live(), live);
        assert_int_equal(fake_cuda_calls("cuEventElapsedTime") > 0, k >= 10 && k < 20);
    }
}

static void what_fails_while_it_is_traced_leaves_nothing(void **state) {
    scene *s = *state;
    pst_graph *graph = open_graph(s->f->runtime, PST_GRAPH_SEALED, "step");
    static const char *const calls[] = {"cuMemcpyAsync", "cuEventCreate", "cuEventElapsedTime"};
    pst_task gathered = add(s, graph, s->gather, "gather", NULL);
    (void)add(s, graph, s->reduce, "reduce", &gathered);
    assert_ok(pst_graph_seal(graph));
    assert_ok(pst_trace_start(s->f->runtime));
    for (size_t i = 0; i < 3; i++) {
        pst_launch launch;
        fake_cuda_fail(calls[i], 1, CUDA_ERROR_INVALID_VALUE);
        assert_ok(pst_graph_launch(graph, &launch));
        pump(s->f->runtime);
        assert_status(pst_launch_wait(launch), i == 0 ? PST_EINVAL : PST_OK);
    }
    assert_ok(pst_runtime_status(s->f->runtime));
}

static void growing_graphs_are_traced_without_arrows(void **state) {
    scene *s = *state;
    pst_graph *graph = open_graph(s->f->runtime, PST_GRAPH_GROWING, "eager");
    assert_ok(pst_trace_start(s->f->runtime));
    pst_task gathered = add(s, graph, s->gather, "gather", NULL);
    pst_task reduced = add(s, graph, s->reduce, "reduce", &gathered);
    pump(s->f->runtime);
    pst_task_release(gathered);
    pst_task_release(reduced);
    char *text = write_trace(s->f->runtime);
    assert_int_equal(count_of(text, "\"ph\":\"s\""), 0);
    assert_int_equal(count_of(text, "\"ph\":\"f\""), 0);
    free(text);
    assert_ok(pst_graph_destroy(graph));
}

int main(void) {
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup_scene, teardown_scene)
        TEST(a_lanes_slice_begins_when_the_stream_gets_there),
        TEST(timed_events_are_used_again_and_only_while_tracing),
        TEST(what_fails_while_it_is_traced_leaves_nothing),
        TEST(growing_graphs_are_traced_without_arrows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
