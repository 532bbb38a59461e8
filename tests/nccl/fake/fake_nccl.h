/* NCCL without a GPU: libfakenccl.so answers NCCL's calls for ranks that are threads of this
 * process, over the fake driver's streams and memory. A group that all ranks have issued and whose
 * place in their streams has come moves the data; before, the streams wait. An abort lets them go
 * on, with rubbish. A communicator ends when no graph is left that its groups were captured into.
 *
 * These functions are the tests' side. A program links with the library and gives FAKE_NCCL_PATH to
 * pst_nccl_options: both are the same object. Any thread; the state is the process's. */
#ifndef PST_TESTS_NCCL_FAKE_NCCL_H
#define PST_TESTS_NCCL_FAKE_NCCL_H

#include <nccl.h>
#include <stddef.h>

#define FAKE_API __attribute__((visibility("default")))

/* Forgets calls; and faults and delays too. */
FAKE_API void fake_nccl_forget(void);
FAKE_API void fake_nccl_reset(void);

/* ---- what was called ----------------------------------------------------------------------- */

/* Calls of `name` ("ncclAllGather") since the reset, by all ranks. */
FAKE_API size_t fake_nccl_calls(const char *name);
/* The names of the data-moving calls of `rank`, with their counts, "AllGather 64, Send 4>1" (to
 * or from rank 1), groups in brackets. Valid until the next call of it. */
FAKE_API const char *fake_nccl_trail(int rank);
/* Communicators that are neither destroyed nor aborted. */
FAKE_API size_t fake_nccl_live(void);
/* Ends them all, as a process's end would. */
FAKE_API void fake_nccl_end_all(void);
/* Groups that the calling thread has begun and not ended; below 0: the other way round. */
FAKE_API int fake_nccl_open_groups(void);
/* Groups in which the ranks did not call the same. */
FAKE_API size_t fake_nccl_mismatches(void);

/* ---- what goes wrong ----------------------------------------------------------------------- */

/* The nth call of `name` from now on (1: the next), on any rank, answers `result` and does nothing;
 * NULL: none. */
FAKE_API void fake_nccl_fail(const char *name, size_t nth, ncclResult_t result);
/* ncclCommGetAsyncError tells this on all communicators. */
FAKE_API void fake_nccl_break(ncclResult_t result);
/* Calls of `name` block until an abort; NULL: none. */
FAKE_API void fake_nccl_hang(const char *name);

#endif
