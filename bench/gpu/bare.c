#include "driver.h"
#include "tasks.h"

static CUevent events[PATTERN_MOST_TASKS]; /* NULL: nobody on another stream waits for it */
static CUstream streams[TASKS_MOST_LANES];

static size_t stream_of(const tasks_setting *setting, size_t index) {
    return setting->pattern->tasks[index].column % setting->lane_count;
}

void bare_prepare(const tasks_setting *setting) {
    for (size_t i = 0; i < setting->lane_count; i++)
        driver_check(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    for (size_t i = 0; i < setting->pattern->count; i++)
        events[i] = NULL;
    for (size_t i = 0; i < setting->pattern->count; i++) {
        const pattern_task *task = &setting->pattern->tasks[i];
        for (size_t k = 0; k < task->after_count; k++) {
            CUevent *event = &events[task->after[k]];
            if (stream_of(setting, task->after[k]) != stream_of(setting, i) && *event == NULL)
                driver_check(cuEventCreate(event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
        }
    }
}

void bare_release(const tasks_setting *setting) {
    for (size_t i = 0; i < setting->pattern->count; i++)
        if (events[i] != NULL) driver_check(cuEventDestroy(events[i]), "cuEventDestroy");
    for (size_t i = 0; i < setting->lane_count; i++)
        driver_check(cuStreamDestroy(streams[i]), "cuStreamDestroy");
}

static CUresult launch(void *kernel, CUstream stream) {
    return kernel == NULL ? CUDA_SUCCESS
                          : cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
}

pst_status bare_launch(void *kernel, pst_stream *stream) {
    return launch(kernel, pst_cuda_stream(stream)) == CUDA_SUCCESS ? PST_OK : PST_EDEVICE;
}

static void run_task(const tasks_setting *setting, size_t index) {
    const pattern_task *task = &setting->pattern->tasks[index];
    const size_t stream = stream_of(setting, index);
    for (size_t k = 0; k < task->after_count; k++)
        if (stream_of(setting, task->after[k]) != stream)
            driver_check(cuStreamWaitEvent(streams[stream], events[task->after[k]], 0),
                         "cuStreamWaitEvent");
    driver_check(launch(setting->kernel, streams[stream]), "cuLaunchKernel");
    if (events[index] != NULL)
        driver_check(cuEventRecord(events[index], streams[stream]), "cuEventRecord");
}

void bare_run(const tasks_setting *setting) {
    for (size_t i = 0; i < setting->pattern->count; i++)
        run_task(setting, i);
    for (size_t i = 0; i < setting->lane_count; i++)
        driver_check(cuStreamSynchronize(streams[i]), "cuStreamSynchronize");
}
