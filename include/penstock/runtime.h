/* penstock/runtime.h - the runtime: heap, log, error text, workers' settings. No global state:
 * several runtimes live side by side in one process. */
#ifndef PENSTOCK_RUNTIME_H
#define PENSTOCK_RUNTIME_H

#include <penstock/device.h>
#include <penstock/status.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pst_runtime pst_runtime;

typedef enum pst_log_level { PST_LOG_ERROR = 0, PST_LOG_WARNING, PST_LOG_INFO } pst_log_level;

/* Metadata memory. `alloc` returns memory aligned to `alignment` (a power of two) or NULL. */
typedef struct pst_allocator {
    void *(*alloc)(void *context, size_t bytes, size_t alignment);
    void (*free)(void *context, void *memory, size_t bytes, size_t alignment);
    void *context;
} pst_allocator;

typedef struct pst_runtime_options {
    size_t size;             /* sizeof(pst_runtime_options) */
    pst_allocator allocator; /* all NULL: the built-in metadata heap */
    void (*log)(void *context, pst_log_level level, const char *text); /* NULL: silent */
    void *log_context;
    int rank;             /* shown in error texts and traces; 0 if there are no ranks */
    int world_size;       /* 0 counts as 1 */
    uint32_t spin;        /* a worker's turns before it parks; 0: 2000 */
    uint64_t deadline_ns; /* how long a wait may take before PST_ETIMEDOUT; 0: no limit */
    size_t trace_records; /* ring size a thread while tracing; 0: 65536 */
    size_t task_capacity; /* tasks a growing graph makes room for at a time; 0: 1024 */
} pst_runtime_options;

/* Creates a runtime with its host device; options may be NULL. On error nothing is left to destroy
 * and *runtime is NULL. PST_EINVAL, PST_ENOMEM, PST_ESYSTEM. */
PST_API pst_status pst_runtime_create(const pst_runtime_options *options, pst_runtime **runtime);

/* Cancels what is not launched, waits for what is (at most the deadline), ends the workers and
 * frees everything that was created on this runtime and not destroyed yet. Blocks. NULL is fine. No
 * other thread may use the runtime any more. */
PST_API void pst_runtime_destroy(pst_runtime *runtime);

/* The built-in host device of this runtime; owned by it. */
PST_API pst_device *pst_runtime_host(pst_runtime *runtime);

/* Copies the text of the most recent error (NUL-terminated, cut at `size`) and returns its full
 * length; "" if there was none. Any thread. */
PST_API size_t pst_runtime_error(const pst_runtime *runtime, char *buffer, size_t size);

/* PST_OK, or the first error that happened after a launch and so made all further results invalid
 * (a poisoned runtime): every later wait and launch returns it. Any thread. */
PST_API pst_status pst_runtime_status(const pst_runtime *runtime);

/* Poisons the runtime: pending tasks end as canceled, waits return `status`. `text` goes into the
 * error text. The first call counts. Any thread. */
PST_API void pst_runtime_poison(pst_runtime *runtime, pst_status status, const char *text);

/* One turn for all lanes that nobody owns at this moment: completions, then launches. Never
 * blocks. Returns PST_OK when something was done, PST_PENDING when nothing could be done but work
 * is unfinished. *idle (may be NULL) becomes 1 when no task is unfinished, else 0. Any thread; a
 * runtime whose lanes are all PST_LANE_PUMPED owns no thread and lives by this call.
 */
PST_API pst_status pst_run_once(pst_runtime *runtime, int *idle);

#ifdef __cplusplus
}
#endif
#endif
