/* After an executor's destroy nothing of it is called any more, even if its communicator can
 * neither end what is in flight nor be aborted: the caller may free the communicator then. */
#include "../cmocka_all.h"
#include "../threads.h"
#include "async_device.h"

#include <penstock/penstock.h>

#define DEADLINE_NS 100000000u
#define ELEMENTS    64u

/* Of one rank. It answers what is asked until it is stuck. */
typedef struct stuck_comm {
    pst_comm comm;
    pst_comm_ops ops;
    int is_stuck, is_gone, late_calls; /* atomic */
} stuck_comm;

static void note_call(pst_comm *comm) {
    stuck_comm *stuck = comm->context;
    if (__atomic_load_n(&stuck->is_gone, __ATOMIC_ACQUIRE))
        (void)__atomic_fetch_add(&stuck->late_calls, 1, __ATOMIC_RELAXED);
}

static size_t stuck_staging(pst_comm *comm, const pst_collective *collective) {
    (void)collective;
    note_call(comm);
    return 0;
}

static pst_status stuck_start(pst_comm *comm, const pst_collective *collective, pst_stream *stream,
                              void **request) {
    const stuck_comm *stuck = comm->context;
    (void)stream;
    note_call(comm);
    *request = NULL;
    if (__atomic_load_n(&stuck->is_stuck, __ATOMIC_ACQUIRE)) return PST_PENDING;
    if (collective->kind == PST_ALL_GATHER)
        memcpy(collective->destination, collective->source, collective->source_bytes);
    return PST_OK;
}

/* On an asynchronous device, which stands still. */
static pst_status stuck_enqueue(pst_comm *comm, const pst_collective *collective,
                                pst_stream *stream, void **request) {
    (void)stuck_start(comm, collective, stream, request);
    return PST_OK;
}

static pst_status stuck_test(pst_comm *comm, void *request) {
    (void)request;
    note_call(comm);
    return PST_PENDING;
}

static pst_status stuck_abort(pst_comm *comm, pst_status status) {
    (void)status;
    note_call(comm);
    return PST_EBUSY;
}

static pst_status stuck_status(pst_comm *comm) {
    note_call(comm);
    return PST_OK;
}

static const char *stuck_text(pst_comm *comm) {
    note_call(comm);
    return "stuck";
}

static void stuck_open(stuck_comm *stuck, int is_asynchronous) {
    *stuck = (stuck_comm){.ops = {.api_version = PST_COMM_API_VERSION,
                                  .kinds = (1u << PST_COLLECTIVE_KIND_COUNT) - 1u,
                                  .name = "stuck",
                                  .staging_bytes = stuck_staging,
                                  .start = is_asynchronous ? stuck_enqueue : stuck_start,
                                  .test = stuck_test,
                                  .abort = stuck_abort,
                                  .status = stuck_status,
                                  .error_text = stuck_text}};
    stuck->comm = (pst_comm){&stuck->ops, stuck, 0, 1};
}

/* ---- executors with a collective in flight --------------------------------------------------- */

typedef struct executor {
    pthread_t thread;
    async_device *async; /* NULL: the host device */
    pst_runtime *runtime;
    pst_lane *compute;
    stuck_comm comm;
    int stays_well;
    float memory[4 * ELEMENTS];
    pst_status status;      /* of building it */
    const void *left_alive; /* what is not freed, in sight of the leak checker */
    void (*destroy)(struct executor *executor);
} executor;

static pst_device *device_of(const executor *executor) {
    return executor->async == NULL ? NULL : &executor->async->device;
}

/* From here on nothing ends. */
static void get_stuck(executor *executor) {
    if (executor->stays_well) return;
    if (executor->async != NULL) async_pause(executor->async, 1);
    __atomic_store_n(&executor->comm.is_stuck, 1, __ATOMIC_RELEASE);
}

static void destroy_zero(executor *executor) {
    pst_zero_destroy((pst_zero *)(uintptr_t)executor->left_alive);
}

static pst_status build_zero(executor *executor) {
    const pst_zero_options options = {.size = sizeof options,
                                      .stage = 3,
                                      .gather_comm = &executor->comm.comm,
                                      .reduce_comm = &executor->comm.comm,
                                      .device = device_of(executor),
                                      .compute = executor->compute};
    uint32_t index;
    pst_zero *zero;
    pst_status status = pst_zero_create(executor->runtime, &options, &zero);
    if (status != PST_OK) return status;
    executor->left_alive = zero;
    executor->destroy = destroy_zero;
    const pst_parameter_options parameter = {
        .size = sizeof parameter, .name = "p", .rows = ELEMENTS, .row_elements = 1};
    status = pst_zero_add_parameter(zero, &parameter, &index);
    const pst_group_options group = {.size = sizeof group,
                                     .name = "g",
                                     .parameters = &index,
                                     .parameter_count = 1,
                                     .dtype = PST_FLOAT32,
                                     .gather_dtype = PST_FLOAT32,
                                     .reduce_dtype = PST_FLOAT32};
    if (status == PST_OK) status = pst_zero_add_group(zero, &group, &index);
    if (status == PST_OK) status = pst_zero_seal(zero);
    if (status == PST_OK) status = pst_zero_bind_shard(zero, index, executor->memory);
    if (status == PST_OK) status = pst_zero_begin_forward(zero, 0);
    get_stuck(executor);
    return status == PST_OK ? pst_zero_gather(zero, index) : status;
}

static void destroy_flat(executor *executor) {
    pst_flat_destroy((pst_flat *)(uintptr_t)executor->left_alive);
}

static pst_status build_flat(executor *executor) {
    const pst_flat_options options = {.size = sizeof options,
                                      .gather_comm = &executor->comm.comm,
                                      .reduce_comm = &executor->comm.comm,
                                      .device = device_of(executor),
                                      .compute = executor->compute};
    uint32_t index;
    void *gathered;
    pst_flat *flat;
    pst_status status = pst_flat_create(executor->runtime, &options, &flat);
    if (status != PST_OK) return status;
    executor->left_alive = flat;
    executor->destroy = destroy_flat;
    status = pst_flat_add(flat, "p", ELEMENTS, &index);
    if (status == PST_OK)
        status = pst_flat_bind(flat, index, executor->memory, executor->memory, PST_FLOAT32);
    if (status == PST_OK) status = pst_flat_copy(flat, index, PST_FLOAT32, &index);
    get_stuck(executor);
    return status == PST_OK ? pst_flat_gather(flat, index, &gathered) : status;
}

static void destroy_partition(executor *executor) {
    pst_partition_destroy((pst_partition *)(uintptr_t)executor->left_alive);
}

static pst_status build_partition(executor *executor) {
    const pst_partition_options options = {.size = sizeof options,
                                           .comm = &executor->comm.comm,
                                           .device = device_of(executor),
                                           .compute = executor->compute,
                                           .bucket_bytes = ELEMENTS * sizeof(float)};
    uint32_t index;
    pst_partition *partition;
    pst_status status = pst_partition_create(executor->runtime, &options, &partition);
    if (status != PST_OK) return status;
    executor->left_alive = partition;
    executor->destroy = destroy_partition;
    float *gradient = executor->memory + 2 * (size_t)ELEMENTS;
    status = pst_partition_add(partition, "p", 2 * (size_t)ELEMENTS, &index);
    if (status == PST_OK)
        status =
            pst_partition_bind(partition, index, executor->memory, PST_FLOAT32, 0, 2 * ELEMENTS);
    for (int i = 0; i < 2 && status == PST_OK; i++) { /* the ranks compare before the first one */
        if (i == 1) get_stuck(executor);
        status = pst_partition_begin_backward(partition, 1);
        if (status == PST_OK)
            status = pst_partition_reduce(partition, index, gradient, PST_FLOAT32, NULL);
        if (status == PST_OK && i == 0) status = pst_partition_end_backward(partition, 0);
    }
    return status;
}

/* ---- the test -------------------------------------------------------------------------------- */

#define EXECUTORS 6

static pst_status (*const builds[])(executor *executor) = {build_zero, build_flat, build_partition};
static executor executors[EXECUTORS]; /* the leak checker finds what is left alive */

static pst_status open_executor(executor *executor, int is_asynchronous) {
    /* What ends well has the time that it takes on a machine that is busy. */
    const pst_runtime_options options = {.size = sizeof options,
                                         .deadline_ns = executor->stays_well ? 0 : DEADLINE_NS};
    stuck_open(&executor->comm, is_asynchronous);
    pst_status status = pst_runtime_create(&options, &executor->runtime);
    if (status != PST_OK || !is_asynchronous) return status;
    executor->async = async_open(1, 0);
    const pst_lane_options compute = {.size = sizeof compute,
                                      .name = "compute",
                                      .device = &executor->async->device,
                                      .mode = PST_LANE_BORROWED};
    return pst_lane_create(executor->runtime, &compute, &executor->compute);
}

/* A poison and the device's going on are what makes hooks, tasks and health checks call. */
static void *run_executor(void *argument) {
    executor *executor = argument;
    executor->status = builds[(executor - executors) % 3](executor);
    if (executor->destroy != NULL) executor->destroy(executor);
    __atomic_store_n(&executor->comm.is_gone, 1, __ATOMIC_RELEASE);
    async_sleep(60000); /* a look comes every 20 ms */
    pst_runtime_poison(executor->runtime, PST_EPEER, "later");
    if (executor->async != NULL) async_pause(executor->async, 0);
    pst_runtime_destroy(executor->runtime);
    async_close(executor->async);
    return NULL;
}

static void nothing_is_called_after_a_destroy(void **unused) {
    static const char *const names[] = {"zero", "flat", "partition"};
    (void)unused;
    for (int i = 0; i < EXECUTORS; i++)
        assert_int_equal(open_executor(&executors[i], i >= 3), PST_OK);
    for (int i = 0; i < EXECUTORS; i++)
        assert_int_equal(pthread_create(&executors[i].thread, NULL, run_executor, &executors[i]),
                         0);
    for (int i = 0; i < EXECUTORS; i++)
        (void)pthread_join(executors[i].thread, NULL);
    for (int i = 0; i < EXECUTORS; i++) {
        if (executors[i].status != PST_OK || executors[i].comm.late_calls != 0)
            fail_msg("%s, asynchronous %d: %s, then %d calls of a communicator that is gone",
                     names[i % 3], i >= 3, pst_status_text(executors[i].status),
                     executors[i].comm.late_calls);
    }
}

/* ---- threads --------------------------------------------------------------------------------- */

static pst_status build_two_comms(executor *executor) {
    stuck_comm reduce;
    stuck_open(&reduce, executor->async != NULL);
    const pst_zero_options options = {.size = sizeof options,
                                      .stage = 3,
                                      .gather_comm = &executor->comm.comm,
                                      .reduce_comm = &reduce.comm,
                                      .device = device_of(executor),
                                      .compute = executor->compute};
    pst_zero *zero = NULL;
    executor->destroy = NULL;
    const pst_status status = pst_zero_create(executor->runtime, &options, &zero);
    pst_zero_destroy(zero);
    return status;
}

static pst_status build_offload(executor *executor) {
    const pst_offload_options options = {
        .size = sizeof options, .device = device_of(executor), .compute = executor->compute};
    pst_offload *offload = NULL;
    executor->destroy = NULL;
    const pst_status status = pst_offload_create(executor->runtime, &options, &offload);
    pst_offload_destroy(offload);
    return status;
}

static void no_thread_outlives_its_executor(void **unused) {
    static pst_status (*const all[])(struct executor *) = {build_two_comms, build_offload,
                                                           build_zero, build_flat, build_partition};
    (void)unused;
    start_first_thread();
    for (int is_asynchronous = 0; is_asynchronous <= 1; is_asynchronous++) {
        executor executor = {.stays_well = 1};
        assert_int_equal(open_executor(&executor, is_asynchronous), PST_OK);
        const int before = count_threads();
        for (int i = 0; i < 20; i++)
            for (size_t k = 0; k < sizeof all / sizeof *all; k++) {
                assert_int_equal(all[k](&executor), PST_OK);
                if (executor.destroy != NULL) executor.destroy(&executor);
            }
        assert_int_equal(count_threads(), before);
        pst_runtime_destroy(executor.runtime);
        if (is_asynchronous) async_close(executor.async);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_thread_outlives_its_executor),
        cmocka_unit_test(nothing_is_called_after_a_destroy),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
