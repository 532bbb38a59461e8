/* NCCL's functions, found at run time. */
#ifndef PST_OPS_NCCL_LIBRARY_H
#define PST_OPS_NCCL_LIBRARY_H

#include "base/error.h"

#include <nccl.h>

/* Without an OPTIONAL one (NULL then) its caller answers PST_EUNSUPPORTED. */
#define PST__NCCL_MAP(NEEDED, OPTIONAL)                                                            \
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
    NEEDED(ncclReduceScatter)                                                                      \
    NEEDED(ncclAllReduce)                                                                          \
    NEEDED(ncclReduce)                                                                             \
    NEEDED(ncclBroadcast)                                                                          \
    NEEDED(ncclSend)                                                                               \
    NEEDED(ncclRecv)                                                                               \
    OPTIONAL(ncclCommRegister)                                                                     \
    OPTIONAL(ncclCommDeregister)                                                                   \
    OPTIONAL(ncclCommWindowRegister)                                                               \
    OPTIONAL(ncclCommWindowDeregister)

typedef struct pst__nccl_library {
    void *handle;
    int version; /* 22809: 2.28.9 */
#define PST__NCCL_ENTRY(name) __typeof__(&(name)) name;
    PST__NCCL_MAP(PST__NCCL_ENTRY, PST__NCCL_ENTRY)
#undef PST__NCCL_ENTRY
} pst__nccl_library;

/* Loads `path`; NULL: what the process has already, or "libnccl.so.2". PST_EUNSUPPORTED with a text
 * that names what is missing. NCCL keeps threads, so it stays loaded for good. */
pst_status pst__nccl_library_open(pst__nccl_library *library, const char *path, pst__error *error);

/* NCCL's answers as ours; ncclInProgress is PST_PENDING. */
pst_status pst__nccl_status_of(ncclResult_t result);

#endif
