/* NCCL's functions, found at run time. */
#ifndef PST_OPS_COMM_NCCL_LIBRARY_H
#define PST_OPS_COMM_NCCL_LIBRARY_H

#include "base/error.h"

#include <nccl.h>

#define PST__NCCL_MAP(NEEDED)                                                                      \
    NEEDED(ncclGetVersion)                                                                         \
    NEEDED(ncclGetErrorString)                                                                     \
    NEEDED(ncclGetLastError)                                                                       \
    NEEDED(ncclGetUniqueId)                                                                        \
    NEEDED(ncclCommInitRankConfig)                                                                 \
    NEEDED(ncclCommGetAsyncError)                                                                  \
    NEEDED(ncclCommFinalize)                                                                       \
    NEEDED(ncclCommDestroy)                                                                        \
    NEEDED(ncclCommAbort)                                                                          \
    NEEDED(ncclGroupStart)                                                                         \
    NEEDED(ncclGroupEnd)                                                                           \
    NEEDED(ncclAllGather)                                                                          \
    NEEDED(ncclAllReduce)                                                                          \
    NEEDED(ncclBroadcast)                                                                          \
    NEEDED(ncclSend)                                                                               \
    NEEDED(ncclRecv)

typedef struct pst__nccl_library {
    void *handle;
    int version; /* 22809: 2.28.9 */
#define PST__NCCL_ENTRY(name) __typeof__(&(name)) name;
    PST__NCCL_MAP(PST__NCCL_ENTRY)
#undef PST__NCCL_ENTRY
} pst__nccl_library;

/* Loads `path`; NULL: what the process has already, or "libnccl.so.2". PST_EUNSUPPORTED with a text
 * that names what is missing. NCCL keeps threads, so it stays loaded for good. */
pst_status pst__nccl_library_open(pst__nccl_library *library, const char *path, pst__error *error);

/* NCCL's answers as ours. */
pst_status pst__nccl_status_of(ncclResult_t result);

#endif
