/* The device cuda on a real GPU: what tests/cuda shows on the fake driver, and what only a GPU
 * shows. With several GPUs the other process works on another one. */
#include "base/clock.h"
#include "sched/cuda/cuda.h"
#include "tests/random.h"
#include "tests/sched/harness.h"

#include <dlfcn.h>
#include <math.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct fixture {
    pst_runtime *runtime;
    pst_device *device;
    const pst_device_ops *ops;
    pst_stream *a, *b;
} fixture;

static void open_fixture(fixture *f, int ordinal) {
    const pst_cuda_options options = {.size = sizeof options, .ordinal = ordinal};
    char text[1024];
    f->runtime = open_runtime(60000);
    const pst_status status = pst_cuda_device_create(f->runtime, &options, &f->device);
    (void)pst_runtime_error(f->runtime, text, sizeof text);
    if (status != PST_OK) fail_msg("%s", text);
    f->ops = f->device->ops;
    assert_ok(f->ops->stream_create(f->device, 0, &f->a));
    assert_ok(f->ops->stream_create(f->device, -1, &f->b));
}

static void close_fixture(fixture *f) {
    f->ops->stream_destroy(f->device, f->a);
    f->ops->stream_destroy(f->device, f->b);
    pst_runtime_destroy(f->runtime);
    f->ops->destroy(f->device);
}

static int setup(void **state) {
    fixture *f = calloc(1, sizeof *f);
    open_fixture(f, 0);
    *state = f;
    return 0;
}

static int teardown(void **state) {
    close_fixture(*state);
    free(*state);
    return 0;
}

static pst_event *record(fixture *f, pst_stream *stream) {
    pst_event *event = NULL;
    assert_ok(f->ops->event_create(f->device, 0, &event));
    assert_ok(f->ops->event_record(f->device, event, stream));
    return event;
}

static void finish(fixture *f, pst_stream *stream) {
    pst_event *event = record(f, stream);
    while (f->ops->event_query(f->device, event) == PST_PENDING)
        yield_briefly();
    assert_ok(f->ops->event_query(f->device, event));
    f->ops->event_destroy(f->device, event);
}

static void *alloc(fixture *f, pst_memory_kind kind, size_t bytes) {
    void *memory = NULL;
    const pst_status status = f->ops->alloc(f->device, kind, bytes, &memory);
    if (status != PST_OK) fail_msg("%s", f->ops->error_text(f->device));
    return memory;
}

static void copy(fixture *f, pst_stream *stream, void *to, const void *from, size_t bytes) {
    const pst_copy one = {to, from, bytes};
    assert_ok(f->ops->copy(f->device, stream, &one, 1));
}

/* ---- memory and copies -------------------------------------------------------------- */

#define BYTES ((size_t)40 << 20)

static void bytes_go_round_by_pinned_and_device_memory(void **state) {
    fixture *f = *state;
    unsigned char *from = alloc(f, PST_MEMORY_PINNED, BYTES);
    unsigned char *to = alloc(f, PST_MEMORY_PINNED, BYTES);
    unsigned char *one = alloc(f, PST_MEMORY_DEVICE, BYTES);
    unsigned char *two = alloc(f, PST_MEMORY_DEVICE, BYTES);
    for (size_t i = 0; i < BYTES; i++)
        from[i] = (unsigned char)(i * 2654435761u >> 13);
    copy(f, f->a, one, from, BYTES);
    copy(f, f->a, two, one, BYTES);
    copy(f, f->a, to, two, BYTES);
    finish(f, f->a);
    assert_memory_equal(from, to, BYTES);
    f->ops->free(f->device, PST_MEMORY_DEVICE, one, BYTES);
    f->ops->free(f->device, PST_MEMORY_DEVICE, two, BYTES);
    f->ops->free(f->device, PST_MEMORY_PINNED, from, BYTES);
    f->ops->free(f->device, PST_MEMORY_PINNED, to, BYTES);
}

static void batches_and_rows_land_where_they_belong(void **state) {
    enum { PIECES = 300, PIECE = 1000 };
    fixture *f = *state;
    static pst_copy there[PIECES], back[PIECES];
    unsigned char *host = alloc(f, PST_MEMORY_PINNED, 2 * PIECES * PIECE);
    unsigned char *memory = alloc(f, PST_MEMORY_DEVICE, PIECES * PIECE);
    unsigned char *result = host + PIECES * PIECE;
    for (size_t i = 0; i < PIECES * PIECE; i++)
        host[i] = (unsigned char)(i * 7 + i / PIECE);
    for (size_t i = 0; i < PIECES; i++) {
        const size_t bytes = i % 5 == 0 ? 0 : PIECE - i % 7;
        there[i] = (pst_copy){memory + (PIECES - 1 - i) * PIECE, host + i * PIECE, bytes};
        back[i] = (pst_copy){result + i * PIECE, memory + (PIECES - 1 - i) * PIECE, bytes};
    }
    assert_ok(f->ops->copy(f->device, f->a, there, PIECES));
    assert_ok(f->ops->copy(f->device, f->a, back, PIECES));
    finish(f, f->a);
    for (size_t i = 0; i < PIECES; i++)
        assert_memory_equal(result + i * PIECE, host + i * PIECE, back[i].bytes);
    memset(result, 0, PIECES * PIECE);
    assert_ok(f->ops->copy_2d(f->device, f->a, memory, 512, host, PIECE, 500, PIECES));
    assert_ok(f->ops->copy_2d(f->device, f->a, result, PIECE, memory, 512, 500, PIECES));
    finish(f, f->a);
    for (size_t i = 0; i < PIECES; i++) {
        assert_memory_equal(result + i * PIECE, host + i * PIECE, 500);
        assert_int_equal(result[i * PIECE + 500], 0);
    }
    f->ops->free(f->device, PST_MEMORY_DEVICE, memory, PIECES * PIECE);
    f->ops->free(f->device, PST_MEMORY_PINNED, host, 2 * PIECES * PIECE);
}

static void the_default_stream_takes_everything_too(void **state) {
    fixture *f = *state;
    void *const natives[] = {NULL, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD};
    char *host = alloc(f, PST_MEMORY_PINNED, 8), *memory = alloc(f, PST_MEMORY_DEVICE, 8);
    for (size_t i = 0; i < 3; i++) {
        pst_stream *stream = NULL;
        memcpy(host, "ab......", 8);
        const pst_copy there[] = {{memory, host, 1}, {memory + 1, host + 1, 1}};
        assert_ok(f->ops->stream_wrap(f->device, natives[i], &stream));
        assert_ok(f->ops->copy(f->device, stream, there, 2));
        copy(f, stream, host + 2, memory, 2);
        finish(f, stream);
        assert_memory_equal(host, "abab....", 8);
        f->ops->stream_destroy(f->device, stream);
    }
    f->ops->free(f->device, PST_MEMORY_DEVICE, memory, 8);
    f->ops->free(f->device, PST_MEMORY_PINNED, host, 8);
}

static void what_does_not_fit_is_refused_and_harms_nothing(void **state) {
    fixture *f = *state;
    void *memory = NULL;
    assert_status(f->ops->alloc(f->device, PST_MEMORY_DEVICE, (size_t)1 << 44, &memory),
                  PST_ENOMEM);
    print_message("%s\n", f->ops->error_text(f->device));
    assert_non_null(strstr(f->ops->error_text(f->device), "CUDA_ERROR_OUT_OF_MEMORY"));
    assert_ok(pst_runtime_status(f->runtime));
    finish(f, f->a);
}

/* ---- order -------------------------------------------------------------------------- */

static void a_stream_waits_for_an_event_of_another(void **state) {
    fixture *f = *state;
    uint32_t *flag = alloc(f, PST_MEMORY_SHARED, 4);
    char *host = alloc(f, PST_MEMORY_PINNED, 4), *memory = alloc(f, PST_MEMORY_DEVICE, 4);
    memcpy(host, "xy", 2);
    assert_ok(f->ops->stream_wait32(f->device, f->a, flag, 1));
    copy(f, f->a, memory, host, 2);
    pst_event *event = record(f, f->a);
    assert_ok(f->ops->stream_wait(f->device, f->b, event));
    copy(f, f->b, host + 2, memory, 2);
    pst_event *end = record(f, f->b);
    assert_status(f->ops->event_query(f->device, event), PST_PENDING);
    assert_status(f->ops->event_query(f->device, end), PST_PENDING);
    assert_ok(f->ops->flag_write32(f->device, flag, 1));
    finish(f, f->b);
    assert_ok(f->ops->event_query(f->device, event));
    assert_memory_equal(host, "xyxy", 4);
    f->ops->event_destroy(f->device, event);
    f->ops->event_destroy(f->device, end);
    f->ops->free(f->device, PST_MEMORY_SHARED, flag, 4);
    f->ops->free(f->device, PST_MEMORY_DEVICE, memory, 4);
    f->ops->free(f->device, PST_MEMORY_PINNED, host, 4);
}

static void a_wait_ends_when_the_flag_has_come_so_far_also_past_the_wrap(void **state) {
    static const uint32_t from[] = {0, 0x7ffffffeu, 0xfffffffeu};
    static const pst_memory_kind kinds[] = {PST_MEMORY_DEVICE, PST_MEMORY_PINNED,
                                            PST_MEMORY_SHARED};
    fixture *f = *state;
    for (size_t i = 0; i < 9; i++) {
        uint32_t *flag = alloc(f, kinds[i % 3], 4);
        const uint32_t start = from[i / 3];
        assert_ok(f->ops->stream_write32(f->device, f->b, flag, start));
        finish(f, f->b);
        assert_ok(f->ops->stream_wait32(f->device, f->a, flag, start + 3));
        pst_event *event = record(f, f->a);
        for (uint32_t step = 1; step <= 2; step++) {
            assert_ok(f->ops->stream_write32(f->device, f->b, flag, start + step));
            finish(f, f->b);
            (void)usleep(2000);
            assert_status(f->ops->event_query(f->device, event), PST_PENDING);
        }
        assert_ok(f->ops->stream_write32(f->device, f->b, flag, start + 4));
        finish(f, f->a);
        assert_ok(f->ops->event_query(f->device, event));
        f->ops->event_destroy(f->device, event);
        f->ops->free(f->device, kinds[i % 3], flag, 4);
    }
}

/* More streams than a context has hardware queues, all of them waiting for ever. */
static void flags_are_written_past_streams_that_all_wait_for_ever(void **state) {
    enum { STREAMS = 64 };
    fixture *f = *state;
    pst_stream *streams[STREAMS];
    uint32_t *flags = alloc(f, PST_MEMORY_SHARED, STREAMS * 4);
    for (int i = 0; i < STREAMS; i++)
        assert_ok(f->ops->stream_create(f->device, -(i % 6), &streams[i]));
    for (int i = 0; i < STREAMS; i++)
        assert_ok(f->ops->stream_wait32(f->device, streams[i], &flags[i], 1));
    (void)usleep(20000);
    for (size_t i = 0; i < STREAMS; i++)
        assert_ok(f->ops->flag_write32(f->device, &flags[i], 1));
    for (size_t i = 0; i < STREAMS; i++) {
        finish(f, streams[i]);
        f->ops->stream_destroy(f->device, streams[i]);
    }
    f->ops->free(f->device, PST_MEMORY_SHARED, flags, STREAMS * 4);
}

/* ---- events ------------------------------------------------------------------------- */

static void times_of_events_lie_on_the_hosts_clock(void **state) {
    enum { EVENTS = 5 };
    fixture *f = *state;
    pst_event *events[EVENTS];
    uint64_t at[EVENTS], before[EVENTS], after[EVENTS];
    for (int i = 0; i < EVENTS; i++)
        assert_ok(f->ops->event_create(f->device, 1, &events[i]));
    for (int i = 0; i < EVENTS; i++) {
        before[i] = pst__now();
        assert_ok(f->ops->event_record(f->device, events[i], f->a));
        while (f->ops->event_query(f->device, events[i]) == PST_PENDING)
            continue;
        after[i] = pst__now();
        assert_ok(f->ops->event_time(f->device, events[i], &at[i]));
        (void)usleep(600000); /* two of them: the anchor is taken anew */
    }
    for (int i = 0; i < EVENTS; i++) {
        print_message("recorded after %6.1f us, seen %6.1f us later\n",
                      ((double)at[i] - (double)before[i]) / 1e3,
                      ((double)after[i] - (double)at[i]) / 1e3);
        assert_in_range(at[i], before[i] - 10000000u, after[i] + 10000000u);
        f->ops->event_destroy(f->device, events[i]);
    }
}

/* ---- capture ------------------------------------------------------------------------ */

static void *entry(const char *name) {
    void *found = NULL, *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    PFN_cuGetProcAddress_v11030 get = NULL;
    void *symbol = dlsym(library, "cuGetProcAddress");
    memcpy(&get, &symbol, sizeof get);
    assert_int_equal(get(name, &found, 12000, 0), CUDA_SUCCESS);
    (void)dlclose(library);
    return found;
}

/* A worker asks for events while this thread captures in the mode that forbids other threads most;
 * hooks on the captured stream are refused, and the capture is whole in the end. */
static void a_capture_refuses_hooks_and_is_not_broken_by_workers(void **state) {
    fixture *f = *state;
    PFN_cuStreamBeginCapture_v10010 begin = NULL;
    PFN_cuStreamEndCapture_v10000 end = NULL;
    PFN_cuGraphDestroy_v10000 destroy = NULL;
    void *found[] = {entry("cuStreamBeginCapture"), entry("cuStreamEndCapture"),
                     entry("cuGraphDestroy")};
    memcpy(&begin, &found[0], sizeof begin);
    memcpy(&end, &found[1], sizeof end);
    memcpy(&destroy, &found[2], sizeof destroy);
    uint32_t *flag = alloc(f, PST_MEMORY_SHARED, 4);

    const pst_lane_options options = {
        .size = sizeof options, .name = "copy", .device = f->device, .mode = PST_LANE_WORKER};
    pst_lane *lane = NULL;
    pst_stream *wrapped = NULL;
    assert_ok(pst_lane_create(f->runtime, &options, &lane));
    assert_ok(f->ops->stream_wrap(f->device, pst_cuda_stream(f->b), &wrapped));
    pst_event *event = record(f, f->a);
    assert_int_equal(begin(pst_cuda_stream(f->b), CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
    assert_ok(f->ops->stream_wait32(f->device, pst_lane_stream(lane), flag, 1));
    pst_graph *graph = open_graph(f->runtime, PST_GRAPH_SEALED, "step");
    pst_task task;
    pst_launch launch;
    const pst_task_options in_lane = {.size = sizeof in_lane, .name = "held", .lane = lane};
    assert_ok(pst_graph_add(graph, &in_lane, &task));
    assert_ok(pst_graph_seal(graph));
    assert_ok(pst_graph_launch(graph, &launch));
    (void)usleep(20000); /* the worker polls */
    assert_status(f->ops->event_record(f->device, event, wrapped), PST_ESTATE);
    assert_status(f->ops->stream_wait(f->device, wrapped, event), PST_ESTATE);
    CUgraph captured = NULL;
    assert_int_equal(end(pst_cuda_stream(f->b), &captured), CUDA_SUCCESS);
    assert_int_equal(destroy(captured), CUDA_SUCCESS);
    assert_ok(f->ops->flag_write32(f->device, flag, 1));
    assert_ok(pst_launch_wait(launch));
    assert_ok(f->ops->event_record(f->device, event, wrapped));
    finish(f, f->b);
    f->ops->event_destroy(f->device, event);
    f->ops->stream_destroy(f->device, wrapped);
    f->ops->free(f->device, PST_MEMORY_SHARED, flag, 4);
}

/* ---- a graph ------------------------------------------------------------------------ */

#define LANES 4
#define TASKS 60
#define WIDTH 4096

/* value[i] = 1 + the sum of its predecessors' values, elementwise. */
typedef struct node {
    fixture *f;
    float *value;
    const void *sources[4];
    size_t source_count;
} node;

static pst_status add_up(void *argument, pst_stream *stream) {
    const node *self = argument;
    const pst_sum sum = {self->value, self->sources, self->source_count, WIDTH, 1.0,
                         0,           PST_FLOAT32,   PST_FLOAT32,        0,     0};
    return self->f->ops->sum(self->f->device, stream, &sum);
}

typedef struct network {
    node nodes[TASKS];
    double expected[TASKS];
    float *memory, *host; /* TASKS + 1 rows: the last is all ones */
    pst_graph *graph;
} network;

static void build(network *n, fixture *f, pst_lane *const *lanes, uint64_t *seed) {
    pst_task tasks[TASKS], after[3];
    for (size_t i = 0; i < TASKS; i++) {
        node *self = &n->nodes[i];
        self->f = f;
        self->value = n->memory + i * WIDTH;
        self->sources[self->source_count++] = n->memory + TASKS * WIDTH;
        n->expected[i] = 1;
        size_t count = 0;
        for (; i > 0 && count < 3 && random_below(seed, 3) > 0; count++) {
            const uint32_t from = random_below(seed, (uint32_t)i);
            after[count] = tasks[from];
            self->sources[self->source_count++] = n->nodes[from].value;
            n->expected[i] += n->expected[from];
        }
        const pst_task_options options = {.size = sizeof options,
                                          .name = "sum",
                                          .lane = lanes[random_below(seed, LANES)],
                                          .work = {add_up, NULL, self},
                                          .after = after,
                                          .after_count = count};
        assert_ok(pst_graph_add(n->graph, &options, &tasks[i]));
    }
    assert_ok(pst_graph_seal(n->graph));
}

static void replays_of_a_random_graph_keep_its_order(void **state) {
    static const char *const names[LANES] = {"gather", "reduce", "copy", "offload"};
    fixture *f = *state;
    network *n = calloc(1, sizeof *n);
    pst_lane *lanes[LANES];
    const size_t bytes = (TASKS + 1) * WIDTH * sizeof(float);
    uint64_t seed = random_seed("replays");
    for (size_t i = 0; i < LANES; i++) {
        const pst_lane_options options = {.size = sizeof options,
                                          .name = names[i],
                                          .device = f->device,
                                          .mode = PST_LANE_WORKER,
                                          .priority = -(int)i};
        assert_ok(pst_lane_create(f->runtime, &options, &lanes[i]));
    }
    n->memory = alloc(f, PST_MEMORY_DEVICE, bytes);
    n->host = alloc(f, PST_MEMORY_PINNED, bytes);
    n->graph = open_graph(f->runtime, PST_GRAPH_SEALED, "step");
    build(n, f, lanes, &seed);
    for (int k = 0; k < 200; k++) {
        pst_launch launch;
        memset(n->host, 0, TASKS * WIDTH * sizeof(float));
        for (size_t i = 0; i < WIDTH; i++)
            n->host[TASKS * WIDTH + i] = 1;
        copy(f, f->a, n->memory, n->host, bytes);
        finish(f, f->a);
        assert_ok(pst_graph_launch(n->graph, &launch));
        assert_ok(pst_launch_wait(launch));
        copy(f, f->a, n->host, n->memory, bytes);
        finish(f, f->a);
        for (size_t i = 0; i < TASKS; i++)
            for (size_t at = 0; at < WIDTH; at += WIDTH - 1)
                assert_true(fabs((double)n->host[i * WIDTH + at] - n->expected[i]) <=
                            1e-5 * n->expected[i]);
    }
    assert_ok(pst_graph_destroy(n->graph));
    f->ops->free(f->device, PST_MEMORY_DEVICE, n->memory, bytes);
    f->ops->free(f->device, PST_MEMORY_PINNED, n->host, bytes);
    free(n);
}

/* ---- other processes, made before this one calls the driver ------------------------- */

typedef struct helper {
    pid_t process;
    int socket;
} helper;

static helper reader, breaker;

static helper start_helper(int (*run)(int socket)) {
    helper made;
    int ends[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), 0);
    made.process = fork();
    if (made.process == 0) {
        (void)close(ends[0]);
        _exit(run(ends[1]));
    }
    (void)close(ends[1]);
    made.socket = ends[0];
    return made;
}

static void assert_helper_succeeds(const helper *helper) {
    int status = -1;
    assert_int_equal(waitpid(helper->process, &status, 0), helper->process);
    assert_int_equal(status, 0);
}

typedef union envelope {
    struct cmsghdr header;
    char bytes[CMSG_SPACE(sizeof(int))];
} envelope;

static struct msghdr message_with(envelope *envelope, struct iovec *part) {
    return (struct msghdr){.msg_iov = part,
                           .msg_iovlen = 1,
                           .msg_control = envelope->bytes,
                           .msg_controllen = sizeof envelope->bytes};
}

static int send_descriptor(int socket, int descriptor) {
    char byte = 1;
    struct iovec part = {&byte, 1};
    envelope envelope = {0};
    struct msghdr message = message_with(&envelope, &part);
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof descriptor);
    memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
    return sendmsg(socket, &message, 0) == 1;
}

static int receive_descriptor(int socket) {
    char byte;
    int descriptor = -1;
    struct iovec part = {&byte, 1};
    envelope envelope = {0};
    struct msghdr message = message_with(&envelope, &part);
    if (recvmsg(socket, &message, 0) != 1) return -1;
    memcpy(&descriptor, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof descriptor);
    return descriptor;
}

/* On the second GPU if there is one. */
static int open_other(fixture *f) {
    pst_cuda_options options = {.size = sizeof options, .ordinal = 1};
    f->runtime = open_runtime(60000);
    if (pst_cuda_device_create(f->runtime, &options, &f->device) != PST_OK) {
        options.ordinal = 0;
        if (pst_cuda_device_create(f->runtime, &options, &f->device) != PST_OK) return 0;
    }
    f->ops = f->device->ops;
    return f->ops->stream_create(f->device, 0, &f->a) == PST_OK &&
           f->ops->stream_create(f->device, 0, &f->b) == PST_OK;
}

/* Waits for flag 0, copies words 0 to 255 behind themselves, raises flag 1. */
static int read_and_answer(int socket) {
    fixture f;
    void *memory = NULL, *shared = NULL;
    const int data = receive_descriptor(socket), flags = receive_descriptor(socket);
    if (!open_other(&f)) return 1;
    if (f.ops->memory_import(f.device, data, BYTES, &memory) != PST_OK ||
        f.ops->memory_import(f.device, flags, 8, &shared) != PST_OK) {
        (void)fprintf(stderr, "%s\n", f.ops->error_text(f.device));
        return 2;
    }
    uint32_t *words = memory, *flag = shared;
    const pst_copy answer = {words + 256, words, 1024};
    if (f.ops->stream_wait32(f.device, f.a, &flag[0], 1) != PST_OK ||
        f.ops->copy(f.device, f.a, &answer, 1) != PST_OK ||
        f.ops->stream_write32(f.device, f.a, &flag[1], 1) != PST_OK)
        return 3;
    finish(&f, f.a);
    f.ops->memory_unmap(f.device, shared, 8);
    f.ops->memory_unmap(f.device, memory, BYTES);
    close_fixture(&f);
    return 0;
}

static void export_to_reader(fixture *f, void *memory) {
    int descriptor = -1;
    assert_ok(f->ops->memory_export(f->device, memory, &descriptor));
    assert_true(send_descriptor(reader.socket, descriptor));
    (void)close(descriptor);
}

static void flags_and_data_go_from_process_to_process(void **state) {
    fixture *f = *state;
    uint32_t *words = alloc(f, PST_MEMORY_DEVICE, BYTES), *host = alloc(f, PST_MEMORY_PINNED, 4096);
    uint32_t *flag = alloc(f, PST_MEMORY_SHARED, 8);
    for (uint32_t i = 0; i < 1024; i++)
        host[i] = i * 2654435761u;
    export_to_reader(f, words);
    export_to_reader(f, flag);
    copy(f, f->a, words, host, 1024);
    assert_ok(f->ops->stream_write32(f->device, f->a, &flag[0], 1));
    assert_ok(f->ops->stream_wait32(f->device, f->a, &flag[1], 1));
    copy(f, f->a, host + 256, words + 256, 1024);
    finish(f, f->a);
    assert_memory_equal(host, host + 256, 1024);
    assert_helper_succeeds(&reader);
    f->ops->free(f->device, PST_MEMORY_SHARED, flag, 8);
    f->ops->free(f->device, PST_MEMORY_PINNED, host, 4096);
    f->ops->free(f->device, PST_MEMORY_DEVICE, words, BYTES);
}

/* A kernel writes where nothing is: the context is lost, and the runtime's error says why. */
static int break_context(int socket) {
    fixture f;
    char byte, text[1024];
    if (read(socket, &byte, 1) != 1) return 1;
    open_fixture(&f, 0);
    void *memory = alloc(&f, PST_MEMORY_DEVICE, BYTES);
    f.ops->free(f.device, PST_MEMORY_DEVICE, memory, BYTES);
    if (f.ops->fill(f.device, f.a, memory, 0, BYTES) != PST_OK) return 2;
    pst_event *event = NULL;
    (void)f.ops->event_create(f.device, 0, &event);
    (void)f.ops->event_record(f.device, event, f.a);
    pst_status status;
    while ((status = f.ops->event_query(f.device, event)) == PST_PENDING)
        yield_briefly();
    (void)pst_runtime_error(f.runtime, text, sizeof text);
    (void)fprintf(stderr, "%s\n", text);
    const int named = status == PST_EDEVICE && pst_runtime_status(f.runtime) == PST_EDEVICE &&
                      strstr(text, "CUDA_ERROR_ILLEGAL_ADDRESS") != NULL;
    close_fixture(&f);
    return named ? 0 : 3;
}

static void a_lost_context_poisons_the_runtime_with_its_name(void **state) {
    (void)state;
    assert_int_equal(write(breaker.socket, "x", 1), 1);
    assert_helper_succeeds(&breaker);
}

/* An argument names the tests to run, * and ? standing for anything. */
int main(int count, char **arguments) {
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
        TEST(bytes_go_round_by_pinned_and_device_memory),
        TEST(batches_and_rows_land_where_they_belong),
        TEST(the_default_stream_takes_everything_too),
        TEST(what_does_not_fit_is_refused_and_harms_nothing),
        TEST(a_stream_waits_for_an_event_of_another),
        TEST(a_wait_ends_when_the_flag_has_come_so_far_also_past_the_wrap),
        TEST(flags_are_written_past_streams_that_all_wait_for_ever),
        TEST(times_of_events_lie_on_the_hosts_clock),
        TEST(a_capture_refuses_hooks_and_is_not_broken_by_workers),
        TEST(replays_of_a_random_graph_keep_its_order),
        TEST(flags_and_data_go_from_process_to_process),
        TEST(a_lost_context_poisons_the_runtime_with_its_name),
    };
    if (count > 1) cmocka_set_test_filter(arguments[1]);
    reader = start_helper(read_and_answer);
    breaker = start_helper(break_context);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
