#include "ops/comm/nccl/library.h"

#include <dlfcn.h>
#include <string.h>

typedef struct entry {
    const char *name;
    size_t offset; /* of the pointer in pst__nccl_library */
} entry;

#define ENTRY(name) {#name, offsetof(pst__nccl_library, name)},
static const entry entries[] = {PST__NCCL_MAP(ENTRY)};

static void *load(const char *path) {
    if (path != NULL) return dlopen(path, RTLD_NOW | RTLD_LOCAL);
    /* Two copies in a process would not know of each other's kernels: take torch's. */
    void *loaded = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    return loaded != NULL ? loaded : dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
}

pst_status pst__nccl_library_open(pst__nccl_library *library, const char *path, pst__error *error) {
    memset(library, 0, sizeof *library);
    library->handle = load(path);
    if (library->handle == NULL)
        return pst__fail(error, PST_EUNSUPPORTED, "communicator nccl: no NCCL: %s", dlerror());
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
        void *found = dlsym(library->handle, entries[i].name);
        if (found == NULL)
            return pst__fail(error, PST_EUNSUPPORTED,
                             "communicator nccl: %s has no %s; install NCCL 2.18 or later",
                             path == NULL ? "libnccl.so.2" : path, entries[i].name);
        memcpy((char *)library + entries[i].offset, &found, sizeof found);
    }
    ncclResult_t result = library->ncclGetVersion(&library->version);
    if (result == ncclSuccess) return PST_OK;
    return pst__fail(error, pst__nccl_status_of(result),
                     "communicator nccl: ncclGetVersion failed: %s",
                     library->ncclGetErrorString(result));
}

pst_status pst__nccl_status_of(ncclResult_t result) {
    switch (result) {
    case ncclSuccess:
        return PST_OK;
    case ncclUnhandledCudaError:
        return PST_EDEVICE;
    case ncclInvalidArgument:
    case ncclInvalidUsage:
        return PST_EINVAL;
    case ncclRemoteError:
        return PST_EPEER;
    default: /* ncclSystemError, ncclInternalError */
        return PST_ESYSTEM;
    }
}
