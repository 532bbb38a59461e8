/* own_threads.c - the caller's threads drive the lanes, each on the CPU that it was given.
 *
 * A program that has placed its threads with care wants no others. All lanes are pumped here, and
 * each thread of the program binds itself to a CPU, sleeps on the runtime's descriptor and turns.
 * The graph is a stencil: cell i of a step starts after cells i - 1, i and i + 1 of the step
 * before.
 */
#include <inttypes.h>
#include <penstock/penstock.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdio.h>
#include <unistd.h>

#define THREADS  2
#define WIDTH    6
#define STEPS    50
#define LAUNCHES 4

typedef struct cell {
    uint64_t *values; /* of the step before */
    uint64_t *result;
    int at;
    int cpu; /* where it ran last */
} cell;

typedef struct program {
    pst_runtime *runtime;
    pst_graph *graph;
    pst_lane *lanes[THREADS];
    int descriptor, stop[2]; /* pst_fd, and a pipe that is closed at the end */
    sem_t over;
    pst_status status; /* of the latest launch */
    uint64_t values[STEPS + 1][WIDTH];
    cell cells[STEPS][WIDTH];
} program;

typedef struct thread {
    program *owner;
    int cpu;
    pthread_t id;
} thread;

/* ---- the threads ------------------------------------------------------------------------ */

static int bind_to(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    return pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

static void *drive(void *argument) {
    const thread *self = argument;
    program *p = self->owner;
    struct pollfd asked[] = {{.fd = p->descriptor, .events = POLLIN}, {.fd = p->stop[0]}};
    if (bind_to(self->cpu) != 0) fprintf(stderr, "own_threads: CPU %d refused\n", self->cpu);
    while (!(asked[1].revents & POLLHUP)) {
        const int64_t bound = pst_timeout(p->runtime);
        (void)poll(asked, 2, bound < 0 ? -1 : (int)((bound + 999999) / 1000000));
        (void)pst_run_once(p->runtime, NULL);
    }
    return NULL;
}

/* The n-th CPU that this process may use, from the start again when there are fewer. */
static int nth_cpu(int n) {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 0;
    n %= CPU_COUNT(&allowed);
    for (int cpu = 0;; cpu++)
        if (CPU_ISSET(cpu, &allowed) && n-- == 0) return cpu;
}

static int begin_threads(program *p, thread *threads) {
    for (int i = 0; i < THREADS; i++) {
        threads[i] = (thread){.owner = p, .cpu = nth_cpu(i)};
        if (pthread_create(&threads[i].id, NULL, drive, &threads[i]) != 0) return i;
    }
    return THREADS;
}

static void end_threads(const program *p, const thread *threads, int count) {
    (void)close(p->stop[1]);
    for (int i = 0; i < count; i++)
        (void)pthread_join(threads[i].id, NULL);
    (void)close(p->stop[0]);
}

/* ---- the graph -------------------------------------------------------------------------- */

static pst_status compute(void *argument, pst_stream *stream) {
    cell *c = argument;
    (void)stream;
    *c->result = c->values[c->at];
    if (c->at > 0) *c->result += c->values[c->at - 1];
    if (c->at < WIDTH - 1) *c->result += c->values[c->at + 1];
    c->cpu = sched_getcpu();
    return PST_OK;
}

static void all_is_done(void *argument, pst_status status) {
    program *p = argument;
    p->status = status;
    (void)sem_post(&p->over);
}

static pst_status add_steps(program *p, pst_task *last) {
    pst_task before[WIDTH], now[WIDTH];
    pst_status status = PST_OK;
    for (int s = 0; s < STEPS && !status; s++) {
        for (int i = 0; i < WIDTH && !status; i++) {
            const int first = i > 0 ? i - 1 : 0, end = i < WIDTH - 1 ? i + 2 : WIDTH;
            cell *c = &p->cells[s][i];
            *c = (cell){p->values[s], &p->values[s + 1][i], i, -1};
            const pst_task_options options = {.size = sizeof options,
                                              .name = "cell",
                                              .lane = p->lanes[i % THREADS],
                                              .work = {compute, NULL, c},
                                              .after = &before[first],
                                              .after_count = s > 0 ? (size_t)(end - first) : 0};
            status = pst_graph_add(p->graph, &options, &now[i]);
        }
        for (int i = 0; i < WIDTH; i++)
            last[i] = before[i] = now[i];
    }
    return status;
}

static pst_status build(program *p) {
    pst_task last[WIDTH];
    pst_status status = pst_graph_create(p->runtime, PST_GRAPH_SEALED, "stencil", &p->graph);
    for (int i = 0; i < THREADS && !status; i++) {
        const pst_lane_options options = {
            .size = sizeof options, .name = i ? "odd" : "even", .mode = PST_LANE_PUMPED};
        status = pst_lane_create(p->runtime, &options, &p->lanes[i]);
    }
    if (!status) status = add_steps(p, last);
    const pst_task_options end = {.size = sizeof end,
                                  .name = "end",
                                  .lane = p->lanes[0],
                                  .after = last,
                                  .after_count = WIDTH,
                                  .done = all_is_done,
                                  .done_argument = p};
    pst_task task;
    if (!status) status = pst_graph_add(p->graph, &end, &task);
    if (!status) status = pst_graph_seal(p->graph);
    return status ? status : pst_fd(p->runtime, &p->descriptor);
}

/* ---- the program ------------------------------------------------------------------------ */

/* The calling thread only sleeps: pst_launch_wait would help the others, on a CPU of its own. */
static pst_status launch(program *p, uint64_t first) {
    for (int i = 0; i < WIDTH; i++)
        p->values[0][i] = first;
    pst_status status;
    while ((status = pst_graph_launch(p->graph, NULL)) == PST_EBUSY)
        (void)sched_yield(); /* the last run's last turn is about to end */
    if (status) return status;
    while (sem_wait(&p->over) != 0) {
    }
    return p->status;
}

static int ran_where_they_should(const program *p, const thread *threads) {
    int strays = 0;
    for (int s = 0; s < STEPS; s++)
        for (int i = 0; i < WIDTH; i++) {
            const int cpu = p->cells[s][i].cpu;
            strays += cpu != threads[0].cpu && cpu != threads[1].cpu;
        }
    return strays == 0;
}

static pst_status run(program *p, const thread *threads) {
    for (uint64_t first = 1; first <= LAUNCHES; first++) {
        const pst_status status = launch(p, first);
        if (status) return status;
        printf("from %" PRIu64 ": %016" PRIx64 "\n", first, p->values[STEPS][WIDTH / 2]);
    }
    printf("tasks kept to the threads' CPUs: %s\n",
           ran_where_they_should(p, threads) ? "yes" : "no");
    return PST_OK;
}

int main(void) {
    static program p;
    thread threads[THREADS];
    char error[256] = "";
    if (pipe(p.stop) != 0 || sem_init(&p.over, 0, 0) != 0) return 1;
    if (pst_runtime_create(NULL, &p.runtime) != PST_OK) return 1;
    pst_status status = build(&p);
    const int begun = status ? 0 : begin_threads(&p, threads);
    if (!status) status = begun == THREADS ? run(&p, threads) : PST_ESYSTEM;
    end_threads(&p, threads, begun);
    pst_runtime_error(p.runtime, error, sizeof error);
    if (status) fprintf(stderr, "own_threads: %s: %s\n", pst_status_text(status), error);
    pst_runtime_destroy(p.runtime);
    return status ? 1 : 0;
}
