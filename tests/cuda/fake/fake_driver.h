/* A CUDA driver without a GPU: libfakecuda.so answers the calls of cuda_driver.h over the host's
 * memory, so that everything above runs in CI as it runs on a GPU. A stream is a queue of
 * operations; they run in the calls that ask (cuEventQuery, cuStreamQuery, cuStreamSynchronize),
 * not before, stream by stream in a seeded order, so that what nothing orders is seen out of order.
 * Memory can be exported to other processes, flags of one process hold streams of another.
 *
 * These functions are the tests' side. A program links with the library and gives FAKE_CUDA_PATH to
 * the device as its driver: both are the same object. Any thread; the state is the process's. */
#ifndef PST_TESTS_CUDA_FAKE_DRIVER_H
#define PST_TESTS_CUDA_FAKE_DRIVER_H

#include <cuda.h>
#include <stddef.h>
#include <stdint.h>

#define FAKE_API __attribute__((visibility("default")))

/* Forgets counts, faults, holds, paces; keeps what is allocated, created and enqueued. */
FAKE_API void fake_cuda_reset(void);

/* ---- what was called ---------------------------------------------------------------- */

/* Calls of `name` ("cuEventRecord"; NULL: of all) since the reset. */
FAKE_API size_t fake_cuda_calls(const char *name);
/* Of those, the ones that named this stream. */
FAKE_API size_t fake_cuda_calls_on(const char *name, CUstream stream);
/* Things that exist: streams and events, and pieces of memory (mapped, created, registered). */
FAKE_API size_t fake_cuda_live(void);
FAKE_API size_t fake_cuda_live_memory(void);

/* ---- what goes wrong ---------------------------------------------------------------- */

/* The nth call of `name` from now on (1: the next) answers `error` and does nothing. One at a time;
 * name NULL: none. */
FAKE_API void fake_cuda_fail(const char *name, size_t nth, CUresult error);
/* From now on the driver has no entry point of this name; NULL: it has all. */
FAKE_API void fake_cuda_lack(const char *name);
/* The context is lost: from now on all calls that use it answer `error`; CUDA_SUCCESS mends it. */
FAKE_API void fake_cuda_break(CUresult error);

/* ---- when streams run --------------------------------------------------------------- */

/* While held, nothing that is enqueued runs. */
FAKE_API void fake_cuda_hold(int held);
/* At most this many operations run in a call that asks; 0: all that can. */
FAKE_API void fake_cuda_pace(size_t operations);
FAKE_API void fake_cuda_seed(uint64_t seed);
/* Is `stream` under capture, as cuStreamIsCapturing tells it? */
FAKE_API void fake_cuda_capture(CUstream stream, int on);
/* Captures `stream`, and those that wait for its events, as the driver does: the rules of events
 * are its own. A launch runs its nodes in a seeded order that its edges allow. The end
 * answers CUDA_ERROR_STREAM_CAPTURE_UNJOINED where a stream has not joined. */
typedef struct fake_graph fake_graph;
FAKE_API void fake_cuda_begin_capture(CUstream stream);
FAKE_API CUresult fake_cuda_end_capture(CUstream stream, fake_graph **graph);
FAKE_API void fake_cuda_launch(fake_graph *graph, CUstream stream);
/* What is launched runs to its end. */
FAKE_API void fake_cuda_destroy(fake_graph *graph);

/* ---- for stand-ins of other libraries ----------------------------------------------- */

/* A kernel: holds its stream until `is_over` answers 1, which is asked under the driver's lock. In
 * a graph it is asked anew in each launch. */
FAKE_API CUresult fake_cuda_run(CUstream stream, int (*is_over)(void *argument), void *argument);
/* 0: `stream` is not captured. 1: `call` comes, under the driver's lock, once the graph that it is
 * captured into is destroyed and has no launch any more. */
FAKE_API int fake_cuda_at_destroy(CUstream stream, void (*call)(void *argument), void *argument);
/* Runs what can, as a question would. */
FAKE_API void fake_cuda_poll(void);

#endif
