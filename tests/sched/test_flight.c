/* What a dump of the flight record says, and when one is written. */
#include "tests/sched/harness.h"

#include <penstock/trace.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#define PATIENCE_NS UINT64_C(60000000000)
#define DEADLINE_NS UINT64_C(200000000) /* of rank 0, which is alone, and waits in vain */

typedef struct flown {
    char folder[96];
    pst_page *page;
    pst_runtime *runtime;
    pst_lane *lane;
} flown;

static void open_flown_as(flown *flown, int rank, const char *folder, size_t records) {
    const pst_runtime_options options = {.size = sizeof options,
                                         .rank = rank,
                                         .world_size = rank + 1,
                                         .spin = 50,
                                         .deadline_ns = rank == 0 ? DEADLINE_NS : PATIENCE_NS,
                                         .flight_records = records,
                                         .dump_folder = folder,
                                         .dump_name = "run",
                                         .page = flown->page};
    assert_ok(pst_runtime_create(&options, &flown->runtime));
    flown->lane = open_lane_in_order(flown->runtime, "gather", PST_LANE_PUMPED);
}

static flown open_flown(void) {
    flown flown = {.folder = "/tmp/penstock-flight-XXXXXX"};
    assert_non_null(mkdtemp(flown.folder));
    open_flown_as(&flown, 3, flown.folder, 0);
    return flown;
}

static void path_of(const flown *flown, int rank, char path[160]) {
    (void)snprintf(path, 160, "%s/run-rank%d.json", flown->folder, rank);
}

/* The file's text, to be freed; NULL: there is none. The file is removed. */
static char *take_file(const flown *flown, int rank) {
    char path[160];
    path_of(flown, rank, path);
    FILE *file = fopen(path, "r");
    if (file == NULL) return NULL;
    struct stat stat;
    assert_int_equal(fstat(fileno(file), &stat), 0);
    char *text = calloc((size_t)stat.st_size + 1, 1);
    assert_int_equal(fread(text, 1, (size_t)stat.st_size, file), (size_t)stat.st_size);
    (void)fclose(file);
    (void)unlink(path);
    return text;
}

static void close_flown(flown *flown) {
    pst_runtime_destroy(flown->runtime);
    assert_int_equal(rmdir(flown->folder), 0); /* nothing else was written */
}

#define assert_has(text, ...)                                                                      \
    assert_texts((text), (const char *const[]){__VA_ARGS__},                                       \
                 sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *))
static void assert_texts(const char *text, const char *const *parts, size_t count) {
    assert_non_null(text);
    for (size_t i = 0; i < count; i++)
        if (strstr(text, parts[i]) == NULL) fail_msg("%s is not in %s", parts[i], text);
}

static void assert_file(const flown *flown, const char *const *parts, size_t count) {
    char *text = take_file(flown, 3);
    assert_texts(text, parts, count);
    free(text);
}
#define assert_dump(flown, ...)                                                                    \
    assert_file((flown), (const char *const[]){__VA_ARGS__},                                       \
                sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *))

/* ---- what is in it ------------------------------------------------------------------------ */

static void it_has_tasks_with_a_name_without_a_trace(void **state) {
    (void)state;
    flown flown = open_flown();
    step named = {.name = "blocks.0"}, plain = {.name = NULL};
    pst_graph *graph = open_graph(flown.runtime, PST_GRAPH_GROWING, "g");
    pst_task_release(add_with_ticket(graph, flown.lane, &named, 54, NO_TASK));
    pst_task_release(add_with_ticket(graph, flown.lane, &plain, 0, NO_TASK));
    pump(flown.runtime);
    char path[160];
    assert_ok(pst_trace_dump(flown.runtime, NULL, PST_DUMP_REQUEST, "why", path, sizeof path));
    assert_non_null(strstr(path, "/run-rank3.json"));
    char *text = take_file(&flown, 3);
    assert_has(text, "\"Collective name\":\"blocks.0\",\"Seq\":54", "\"cause\":\"request\"",
               "\"reason\":\"why\"", "{\"task\":\"blocks.0\",\"lane\":\"gather\",\"ticket\":54}",
               "\"places\":[]", "\"tasks\":[]", "\"records\":1,");
    free(text);
    pst_trace_stats stats = {.size = sizeof stats};
    pst_trace_get_stats(flown.runtime, &stats);
    assert_int_equal(stats.records, 0);
    close_flown(&flown);
}

static void it_says_where_ranks_are_by_their_pages(void **state) {
    (void)state;
    flown flown = open_flown();
    pst_runtime_destroy(flown.runtime);
    pst_page *other;
    assert_ok(pst_page_create(&flown.page));
    assert_ok(pst_page_create(&other));
    open_flown_as(&flown, 3, flown.folder, 0);
    assert_string_equal(flown.page->job, "run");
    assert_ok(pst_runtime_follow(flown.runtime, 1, other));
    assert_status(pst_runtime_follow(flown.runtime, 4, other), PST_EINVAL);
    assert_status(pst_runtime_follow(flown.runtime, 1, NULL), PST_EINVAL);
    pst_page_reach(flown.page, 2, 0, PST_PHASE_FORWARD, 1);
    assert_ok(pst_trace_dump(flown.runtime, NULL, PST_DUMP_REQUEST, NULL, NULL, 0));
    assert_dump(&flown,
                "\"places\":[{\"rank\":3,\"place\":\"behind the forward (step 2)\",\"age_ns\":",
                "{\"rank\":1,\"place\":\"before the first forward\"}]");
    close_flown(&flown);
    pst_page_destroy(flown.page);
    pst_page_destroy(other);
}

static void without_a_record_it_has_what_is_under_way(void **state) {
    (void)state;
    flown flown = open_flown();
    pst_runtime_destroy(flown.runtime);
    open_flown_as(&flown, 3, flown.folder, PST_NO_FLIGHT_RECORD);
    step hangs = {.name = "root", .asks = -1};
    pst_graph *graph = open_graph(flown.runtime, PST_GRAPH_GROWING, "g");
    pst_task_release(add_with_ticket(graph, flown.lane, &hangs, 55, NO_TASK));
    int idle;
    (void)pst_run_once(flown.runtime, &idle);
    assert_ok(pst_trace_dump(flown.runtime, NULL, PST_DUMP_SIGNAL, NULL, NULL, 0));
    assert_dump(&flown, "\"records\":0,", "\"cause\":\"signal\"",
                "{\"task\":\"root\",\"lane\":\"gather\",\"graph\":\"g\",\"ticket\":55,"
                "\"state\":\"launched\"}");
    hangs.asks = 0;
    pump(flown.runtime);
    close_flown(&flown);
}

/* ---- when it is written ------------------------------------------------------------------- */

/* Kept where PST_TRACE_SAMPLES says, for other programs. */
static void keep(const char *text) {
    const char *folder = getenv("PST_TRACE_SAMPLES");
    char path[512];
    if (folder == NULL) return;
    (void)snprintf(path, sizeof path, "%s/run-rank0.json", folder);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, strlen(text), file), strlen(text));
    assert_int_equal(fclose(file), 0);
}

static void a_gate_that_is_never_opened_is_named(void **state) {
    (void)state;
    flown flown = open_flown();
    pst_runtime_destroy(flown.runtime);
    open_flown_as(&flown, 0, flown.folder, 0);
    pst_graph *graph = open_graph(flown.runtime, PST_GRAPH_SEALED, "step");
    step steps[] = {{.name = "layer 0"}, {.name = "layer 1"}};
    pst_task gate;
    assert_ok(pst_graph_add_gate(graph, "input ready", &gate));
    const pst_task first = add_step(graph, flown.lane, &steps[0], gate, NO_TASK, NO_TASK);
    const pst_task second = add_step(graph, flown.lane, &steps[1], first, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(graph));
    pst_launch launch;
    assert_ok(pst_graph_launch(graph, &launch));
    assert_status(pst_task_wait(launch, second, NULL), PST_ETIMEDOUT);
    char *text = take_file(&flown, 0);
    assert_has(text, "\"cause\":\"deadline\",\"status\":\"ETIMEDOUT\"",
               "{\"task\":\"layer 1\",\"lane\":\"gather\",\"graph\":\"step\",\"ticket\":0,"
               "\"for\":\"input ready (lane (gate), ticket 0), a gate that is not open\"",
               "{\"gate\":\"input ready\",\"graph\":\"step\"}",
               "\"task\":\"layer 0\",\"lane\":\"gather\",\"graph\":\"step\",\"ticket\":0,"
               "\"state\":\"queued\"");
    keep(text);
    free(text);
    assert_status(pst_launch_wait(launch), PST_ETIMEDOUT); /* within the second */
    assert_null(take_file(&flown, 0));
    assert_ok(pst_gate_open(launch, gate, NULL));
    assert_ok(pst_launch_wait(launch));
    close_flown(&flown);
}

static void a_poison_writes_it_before_anything_is_canceled(void **state) {
    (void)state;
    flown flown = open_flown();
    step steps[] = {{.name = "blocks.0", .asks = -1}, {.name = "blocks.1"}};
    pst_graph *graph = open_graph(flown.runtime, PST_GRAPH_GROWING, "g");
    pst_task first = add_with_ticket(graph, flown.lane, &steps[0], 7, NO_TASK);
    pst_task_release(add_with_ticket(graph, flown.lane, &steps[1], 8, first));
    pst_task_release(first);
    int idle;
    (void)pst_run_once(flown.runtime, &idle);
    pst_runtime_poison(flown.runtime, PST_EPEER, "rank 2 has gone");
    assert_dump(&flown, "\"cause\":\"failure\",\"status\":\"EPEER\"", "rank 2 has gone",
                "\"ticket\":7,\"state\":\"launched\"", "\"ticket\":8,\"state\":\"queued\"");
    steps[0].asks = 0;
    close_flown(&flown); /* the destroy writes none */
}

static void a_folder_that_cannot_be_written_changes_nothing(void **state) {
    (void)state;
    flown flown = open_flown();
    char file[104];
    (void)snprintf(file, sizeof file, "%s/file", flown.folder);
    FILE *made = fopen(file, "w");
    assert_non_null(made);
    (void)fclose(made);
    pst_runtime_destroy(flown.runtime);
    open_flown_as(&flown, 3, file, 0);
    assert_status(pst_trace_dump(flown.runtime, NULL, PST_DUMP_REQUEST, "", NULL, 0), PST_EIO);
    assert_error(flown.runtime, "rank 3: the flight record cannot be written to ", file,
                 "Not a directory");
    pst_runtime_poison(flown.runtime, PST_EPEER, "rank 2 has gone");
    assert_error(flown.runtime, "rank 2 has gone");
    assert_int_equal(unlink(file), 0);
    close_flown(&flown);
}

static void without_a_folder_nothing_is_written_unless_one_is_given(void **state) {
    (void)state;
    flown flown = open_flown();
    pst_runtime_destroy(flown.runtime);
    open_flown_as(&flown, 3, "", 0);
    assert_status(pst_trace_dump(flown.runtime, NULL, PST_DUMP_REQUEST, "", NULL, 0), PST_EINVAL);
    assert_error(flown.runtime, "set PENSTOCK_DUMP");
    assert_ok(pst_trace_dump(flown.runtime, flown.folder, PST_DUMP_REQUEST, "", NULL, 0));
    assert_dump(&flown, "\"cause\":\"request\"");
    pst_runtime_poison(flown.runtime, PST_EPEER, "rank 2 has gone");
    close_flown(&flown);
}

static void the_environment_says_where(void **state) {
    (void)state;
    flown flown = open_flown();
    char made[104];
    (void)snprintf(made, sizeof made, "%s/made", flown.folder);
    pst_runtime_destroy(flown.runtime);
    assert_int_equal(setenv("PENSTOCK_DUMP", made, 1), 0);
    open_flown_as(&flown, 3, NULL, 0);
    assert_int_equal(unsetenv("PENSTOCK_DUMP"), 0);
    pst_runtime_poison(flown.runtime, PST_EPEER, "rank 2 has gone");
    char outer[96];
    (void)snprintf(outer, sizeof outer, "%s", flown.folder);
    memcpy(flown.folder, made, sizeof flown.folder);
    assert_dump(&flown, "rank 2 has gone");
    close_flown(&flown);
    assert_int_equal(rmdir(outer), 0);
}

static void ranks_have_a_file_each(void **state) {
    (void)state;
    flown flown = open_flown(), other = flown;
    open_flown_as(&other, 1, flown.folder, 0);
    assert_ok(pst_trace_dump(flown.runtime, NULL, PST_DUMP_REQUEST, "of 3", NULL, 0));
    assert_ok(pst_trace_dump(other.runtime, NULL, PST_DUMP_REQUEST, "of 1", NULL, 0));
    char *texts[] = {take_file(&flown, 1), take_file(&flown, 3)};
    assert_has(texts[0], "of 1", "\"rank\": 1");
    assert_has(texts[1], "of 3", "\"rank\": 3");
    free(texts[0]);
    free(texts[1]);
    pst_runtime_destroy(other.runtime);
    close_flown(&flown);
}

/* ---- beside work -------------------------------------------------------------------------- */

static void *dump_often(void *argument) {
    flown *flown = argument;
    for (int i = 0; i < 60; i++)
        assert_ok(pst_trace_dump(flown->runtime, NULL, PST_DUMP_REQUEST, "", NULL, 0));
    return NULL;
}

static void grow_and_end(flown *flown, pst_lane *const lanes[2]) {
    pst_graph *graph = open_graph(flown->runtime, PST_GRAPH_GROWING, "growing");
    step steps[] = {{.name = "first", .asks = 3}, {.name = "second"}};
    pst_task gate;
    assert_ok(pst_graph_add_gate(graph, "gate", &gate));
    const pst_task first = add_step(graph, lanes[0], &steps[0], gate, NO_TASK, NO_TASK);
    const pst_task second = add_step(graph, lanes[1], &steps[1], first, NO_TASK, NO_TASK);
    assert_ok(pst_gate_open((pst_launch){graph, 0}, gate, NULL));
    assert_ok(pst_task_wait((pst_launch){graph, 0}, second, NULL));
    pst_task_release(gate);
    pst_task_release(first);
    pst_task_release(second);
    assert_ok(pst_graph_destroy(graph));
}

static void launch_and_wait(pst_graph *graph, pst_task gate, pst_task last) {
    pst_launch launch;
    assert_ok(pst_graph_launch(graph, &launch));
    assert_ok(pst_gate_open(launch, gate, NULL));
    assert_ok(pst_task_wait(launch, last, NULL));
    assert_ok(pst_launch_wait(launch));
}

typedef struct failing {
    flown *flown;
    pthread_barrier_t *together;
    int has_file; /* when its poison has returned */
} failing;

static void *fail_together(void *argument) {
    failing *failing = argument;
    char path[160];
    path_of(failing->flown, 3, path);
    (void)pthread_barrier_wait(failing->together);
    pst_runtime_poison(failing->flown->runtime, PST_EPEER, "rank 2 has gone");
    failing->has_file = access(path, F_OK) == 0;
    return NULL;
}

/* The process may end as soon as one of them has. */
static void of_threads_that_fail_together_none_goes_on_before_there_is_a_file(void **state) {
    (void)state;
    for (int i = 0; i < 20; i++) {
        flown flown = open_flown();
        pthread_barrier_t together;
        assert_int_equal(pthread_barrier_init(&together, NULL, 2), 0);
        failing failings[] = {{&flown, &together, 0}, {&flown, &together, 0}};
        pthread_t threads[2];
        for (int j = 0; j < 2; j++)
            assert_int_equal(pthread_create(&threads[j], NULL, fail_together, &failings[j]), 0);
        for (int j = 0; j < 2; j++)
            (void)pthread_join(threads[j], NULL);
        assert_true(failings[0].has_file && failings[1].has_file);
        (void)pthread_barrier_destroy(&together);
        free(take_file(&flown, 3));
        close_flown(&flown);
    }
}

/* Graphs, lanes, tasks and waits come and go under the writer's hands. */
static void it_is_written_while_everything_changes(void **state) {
    (void)state;
    flown flown = open_flown();
    pst_lane *lanes[2] = {flown.lane, open_lane(flown.runtime, "reduce", PST_LANE_WORKER)};
    step steps[] = {{.name = "a", .asks = 2}, {.name = "b"}};
    pst_graph *graph = open_graph(flown.runtime, PST_GRAPH_SEALED, "sealed");
    pst_task gate;
    assert_ok(pst_graph_add_gate(graph, "gate", &gate));
    const pst_task first = add_step(graph, lanes[1], &steps[0], gate, NO_TASK, NO_TASK);
    const pst_task last = add_step(graph, lanes[0], &steps[1], first, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(graph));
    pthread_t writer;
    assert_int_equal(pthread_create(&writer, NULL, dump_often, &flown), 0);
    for (int i = 0; i < 300; i++) {
        pst_lane *passing = open_lane(flown.runtime, "passing", PST_LANE_WORKER);
        grow_and_end(&flown, (pst_lane *[]){lanes[1], passing});
        launch_and_wait(graph, gate, last);
        assert_ok(pst_lane_destroy(passing));
    }
    (void)pthread_join(writer, NULL);
    free(take_file(&flown, 3));
    close_flown(&flown);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_has_tasks_with_a_name_without_a_trace),
        cmocka_unit_test(it_says_where_ranks_are_by_their_pages),
        cmocka_unit_test(without_a_record_it_has_what_is_under_way),
        cmocka_unit_test(a_gate_that_is_never_opened_is_named),
        cmocka_unit_test(a_poison_writes_it_before_anything_is_canceled),
        cmocka_unit_test(a_folder_that_cannot_be_written_changes_nothing),
        cmocka_unit_test(without_a_folder_nothing_is_written_unless_one_is_given),
        cmocka_unit_test(the_environment_says_where),
        cmocka_unit_test(ranks_have_a_file_each),
        cmocka_unit_test(of_threads_that_fail_together_none_goes_on_before_there_is_a_file),
        cmocka_unit_test(it_is_written_while_everything_changes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
