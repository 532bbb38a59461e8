/* embed_libuv.c - Penstock inside libuv's loop, without a thread of Penstock's own.
 *
 *   gate "asked" --> task "square" on lane "pool" --> task "add" on lane "loop"
 *
 * The loop sleeps in its own poll. pst_fd wakes it when there is something to do, and pst_timeout
 * says when to look again at what has been launched and has not ended. "square" lets a thread of
 * libuv's pool work and ends when libuv hands the request back to the loop, which wakes the lane,
 * so that nobody has to poll.
 */
#include <inttypes.h>
#include <penstock/penstock.h>
#include <stdio.h>
#include <uv.h>

#define LAUNCHES 3

typedef struct program {
    uv_loop_t loop;
    uv_poll_t readable;   /* of pst_fd */
    uv_timer_t again;     /* for pst_timeout */
    uv_timer_t questions; /* the program's own business: it asks something now and then */
    pst_runtime *runtime;
    pst_graph *graph;
    pst_launch launch;
    pst_lane *pool, *here;
    pst_task gate;
    pst_status status;
    uv_work_t work;
    int is_squared; /* the request is the program's again; only the loop's thread looks */
    uint64_t asked, square, total;
    int launches;
} program;

/* ---- the embedding: all that Penstock needs of a loop ----------------------------------- */

static void turn(program *p);

static void on_readable(uv_poll_t *handle, int status, int events) {
    (void)status, (void)events;
    turn(handle->data);
}

static void on_again(uv_timer_t *handle) {
    turn(handle->data);
}

static void turn(program *p) {
    (void)pst_run_once(p->runtime, NULL);
    const int64_t bound = pst_timeout(p->runtime);
    if (bound < 0)
        uv_timer_stop(&p->again);
    else
        uv_timer_start(&p->again, on_again, (uint64_t)(bound + 999999) / 1000000, 0);
}

static int embed(program *p) {
    int descriptor;
    if (pst_fd(p->runtime, &descriptor) != PST_OK) return 1;
    p->readable.data = p->again.data = p;
    if (uv_timer_init(&p->loop, &p->again) != 0 ||
        uv_poll_init(&p->loop, &p->readable, descriptor) != 0)
        return 1;
    return uv_poll_start(&p->readable, UV_READABLE, on_readable);
}

/* ---- the work --------------------------------------------------------------------------- */

static void square(uv_work_t *work) {
    program *p = work->data;
    p->square = p->asked * p->asked;
}

static void squared(uv_work_t *work, int status) {
    program *p = work->data;
    (void)status;
    p->is_squared = 1;
    pst_lane_wake(p->pool);
}

static pst_status square_start(void *argument, pst_stream *stream) {
    program *p = argument;
    (void)stream;
    p->is_squared = 0;
    p->work.data = p;
    return uv_queue_work(&p->loop, &p->work, square, squared) == 0 ? PST_PENDING : PST_ESYSTEM;
}

static pst_status square_test(void *argument) {
    const program *p = argument;
    return p->is_squared ? PST_OK : PST_PENDING;
}

static pst_status add(void *argument, pst_stream *stream) {
    program *p = argument;
    (void)stream;
    p->total += p->square;
    printf("%" PRIu64 " squared is %" PRIu64 ", sum so far %" PRIu64 "\n", p->asked, p->square,
           p->total);
    return PST_OK;
}

/* ---- the program ------------------------------------------------------------------------ */

static void stop(program *p, pst_status status) {
    p->status = status;
    uv_close((uv_handle_t *)&p->readable, NULL);
    uv_close((uv_handle_t *)&p->again, NULL);
    uv_close((uv_handle_t *)&p->questions, NULL); /* and the loop has nothing left to do */
}

static void ask(uv_timer_t *handle) {
    program *p = handle->data;
    p->asked = 2 + (uint64_t)p->launches;
    const pst_status status = pst_gate_open(p->launch, p->gate, NULL);
    if (status != PST_OK) stop(p, status);
}

static void begin(program *p) {
    const pst_status status = pst_graph_launch(p->graph, &p->launch);
    if (status == PST_OK)
        uv_timer_start(&p->questions, ask, 2, 0);
    else
        stop(p, status);
}

static void added(void *argument, pst_status status) {
    program *p = argument;
    if (status != PST_OK || ++p->launches == LAUNCHES)
        stop(p, status);
    else
        begin(p); /* a run's last callback may launch the next */
}

static pst_status build(program *p) {
    const pst_lane_options pool = {.size = sizeof pool, .name = "pool", .mode = PST_LANE_PUMPED};
    const pst_lane_options here = {.size = sizeof here, .name = "loop", .mode = PST_LANE_PUMPED};
    pst_task_options squaring = {.size = sizeof squaring,
                                 .name = "square",
                                 .work = {square_start, square_test, p},
                                 .after = &p->gate,
                                 .after_count = 1};
    pst_task_options adding = {.size = sizeof adding,
                               .name = "add",
                               .work = {add, NULL, p},
                               .after_count = 1,
                               .done = added,
                               .done_argument = p};
    pst_task task, last;
    pst_status status = pst_lane_create(p->runtime, &pool, &p->pool);
    if (!status) status = pst_lane_create(p->runtime, &here, &p->here);
    if (!status) status = pst_graph_create(p->runtime, PST_GRAPH_SEALED, "squares", &p->graph);
    if (!status) status = pst_graph_add_gate(p->graph, "asked", &p->gate);
    squaring.lane = p->pool;
    if (!status) status = pst_graph_add(p->graph, &squaring, &task);
    adding.lane = p->here;
    adding.after = &task;
    if (!status) status = pst_graph_add(p->graph, &adding, &last);
    return status ? status : pst_graph_seal(p->graph);
}

int main(void) {
    static program p;
    char error[256] = "";
    if (pst_runtime_create(NULL, &p.runtime) != PST_OK || uv_loop_init(&p.loop) != 0) return 1;
    p.status = build(&p);
    if (p.status == PST_OK && embed(&p) == 0) {
        p.questions.data = &p;
        uv_timer_init(&p.loop, &p.questions);
        begin(&p);
        uv_run(&p.loop, UV_RUN_DEFAULT);
    }
    pst_runtime_error(p.runtime, error, sizeof error);
    if (p.status != PST_OK) fprintf(stderr, "embed_libuv: %s\n", error);
    pst_runtime_destroy(p.runtime);
    return p.launches == LAUNCHES && uv_loop_close(&p.loop) == 0 ? 0 : 1;
}
