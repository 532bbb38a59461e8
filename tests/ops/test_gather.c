/* Gathers: whole parameters, uses, releases, updates. */
#include "world.h"

#include <unistd.h>

static void on_all_worlds(const model *model, rank_body body) {
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++)
        run_ranks(worlds[i], model, body, NULL);
}

static void use_everything(rank_state *state) {
    DO(build_engine(state));
    for (int pass = 0; pass < 3; pass++) {
        DO(forward(state, 0));
        DO(update(state));
    }
}

static void gathers_whole_parameters_of_odd_sizes(void **unused) {
    (void)unused;
    for (int stage = 1; stage <= 3; stage++) {
        model model = odd_model(stage);
        on_all_worlds(&model, use_everything);
    }
}

static void casts_on_gather(void **unused) {
    (void)unused;
    for (int stage = 2; stage <= 3; stage++) {
        model model = odd_model(stage);
        model.gather_dtype = PST_BFLOAT16;
        on_all_worlds(&model, use_everything);
    }
}

static void gathers_over_one_communicator(void **unused) {
    (void)unused;
    model model = odd_model(3);
    model.one_comm = 1;
    on_all_worlds(&model, use_everything);
}

static void gathers_when_pumped(void **unused) {
    (void)unused;
    model model = odd_model(3);
    model.pumped = 1;
    on_all_worlds(&model, use_everything);
}

static void nest_uses(rank_state *state) {
    DO(build_engine(state));
    CHECK_OK(pst_zero_begin_forward(state->engine, 0));
    DO(begin_use(state, 0));
    DO(use(state, 0));
    CHECK(pst_zero_uses(state->engine, state->groups[0]) == 1); /* of two, one has ended */
    void *memory;
    CHECK_OK(pst_zero_wait(state->engine, state->groups[0], &memory)); /* the outer use is open */
    CHECK(stats_of(state).gathers == 1);
    DO(end_use(state, 0));
    CHECK(pst_zero_uses(state->engine, state->groups[0]) == 0);
    CHECK(pst_zero_wait(state->engine, state->groups[0], &memory) == PST_ESTATE);
    CHECK(pst_zero_release(state->engine, state->groups[0]) == PST_ESTATE);
    DO(use(state, 0));
    CHECK(stats_of(state).gathers == 2);
    CHECK_OK(pst_zero_end_forward(state->engine));
}

static void counts_uses_and_gathers_again_after_the_last(void **unused) {
    (void)unused;
    model model = odd_model(3);
    on_all_worlds(&model, nest_uses);
}

static void stay_and_refresh(rank_state *state) {
    size_t groups = state->model->group_count;
    DO(build_engine(state));
    DO(forward(state, 0));
    CHECK_OK(pst_zero_gather(state->engine, state->groups[1]));
    void *before, *after;
    CHECK_OK(pst_zero_wait(state->engine, state->groups[1], &before));
    CHECK_OK(pst_zero_release(state->engine, state->groups[1]));
    CHECK(stats_of(state).gathers == groups);
    forward(state, 0); /* nothing changed: nothing is gathered */
    CHECK_FINE();
    CHECK(stats_of(state).gathers == groups);
    DO(update(state));
    DO(forward(state, 0));
    CHECK(stats_of(state).gathers == 2 * groups);
    CHECK_OK(pst_zero_gather(state->engine, state->groups[1]));
    CHECK_OK(pst_zero_wait(state->engine, state->groups[1], &after));
    CHECK(before == after);
    CHECK_OK(pst_zero_release(state->engine, state->groups[1]));
}

static void stages_1_and_2_keep_memory_and_gather_what_changed(void **unused) {
    (void)unused;
    for (int stage = 1; stage <= 2; stage++) {
        model model = odd_model(stage);
        on_all_worlds(&model, stay_and_refresh);
    }
}

static void refuse_before_bind(rank_state *state) {
    CHECK_OK(create_engine(state));
    CHECK_OK(add_parameter(state, 0, &state->model->shapes[1]));
    pst_group_options options = {.size = sizeof options,
                                 .name = "lonely",
                                 .parameters = state->parameters,
                                 .parameter_count = 1};
    CHECK_OK(pst_zero_add_group(state->engine, &options, &state->groups[0]));
    CHECK(pst_zero_begin_forward(state->engine, 0) == PST_ESTATE);
    CHECK_OK(pst_zero_seal(state->engine));
    CHECK(pst_zero_seal(state->engine) == PST_ESTATE);
    CHECK_OK(pst_zero_begin_forward(state->engine, 0));
    CHECK(pst_zero_gather(state->engine, state->groups[0]) == PST_ESTATE);
    char text[256];
    (void)pst_runtime_error(state->runtime, text, sizeof text);
    CHECK(strstr(text, "'lonely'") != NULL);
    CHECK(pst_zero_gather(state->engine, 7) == PST_EINVAL);
}

static void names_the_group_without_a_shard(void **unused) {
    (void)unused;
    model model = odd_model(3);
    run_ranks(1, &model, refuse_before_bind, NULL);
}

static int file_has(const char *path, const char *part) {
    enum { MOST = 1 << 20 };
    char *text = calloc(1, MOST);
    FILE *file = fopen(path, "r");
    if (file != NULL) {
        (void)fread(text, 1, MOST - 1, file);
        (void)fclose(file);
    }
    const int found = strstr(text, part) != NULL;
    free(text);
    return found;
}

/* Where the device tells times, waits are traced when it has passed them. */
static void pass_waits(rank_state *state) {
    if (is_on_host(state) || !(device_of(state)->ops->caps & PST_DEVICE_TIMED_EVENTS)) return;
    while (stats_of(state).timed_waits < stats_of(state).gathers)
        (void)pst_run_once(state->runtime, NULL);
    CHECK(stats_of(state).untimed_waits == 0);
    CHECK(stats_of(state).device_gather_ns > 0);
}

/* Pumped: nothing runs before the wait, so every wait is a real one. */
static void trace_waits(rank_state *state) {
    char path[] = "/tmp/penstock-trace-XXXXXX";
    int descriptor = mkstemp(path);
    CHECK(descriptor >= 0);
    (void)close(descriptor);
    DO(build_engine(state));
    CHECK_OK(pst_trace_start(state->runtime));
    DO(forward(state, 0));
    pass_waits(state);
    for (int idle = 0; !idle;) /* a collective is recorded when it has ended */
        (void)pst_run_once(state->runtime, &idle);
    CHECK_OK(pst_trace_stop(state->runtime));
    CHECK_OK(pst_trace_write(state->runtime, path));
    char way[64]; /* which every collective says that it took */
    (void)snprintf(way, sizeof way, "\"path\":\"%s\"", state->gather->ops->name);
    int found =
        file_has(path, "\"wait g0\"") && file_has(path, "\"wait g2\"") && file_has(path, way);
    (void)unlink(path);
    CHECK(found);
    CHECK(stats_of(state).exposed_gather_ns > 0);
    CHECK(stats_of(state).exposed_ns == stats_of(state).exposed_gather_ns);
}

static void waits_show_in_trace_and_stats(void **unused) {
    (void)unused;
    model model = odd_model(3);
    model.pumped = 1;
    run_ranks(2, &model, trace_waits, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gathers_whole_parameters_of_odd_sizes),
        cmocka_unit_test(casts_on_gather),
        cmocka_unit_test(gathers_over_one_communicator),
        cmocka_unit_test(gathers_when_pumped),
        cmocka_unit_test(counts_uses_and_gathers_again_after_the_last),
        cmocka_unit_test(stages_1_and_2_keep_memory_and_gather_what_changed),
        cmocka_unit_test(names_the_group_without_a_shard),
        cmocka_unit_test(waits_show_in_trace_and_stats),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
