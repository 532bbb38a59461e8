#include "sched/cuda/driver.h"

#include "sched/runtime.h"

#include <dlfcn.h>
#include <string.h>

typedef struct entry {
    const char *name;
    int version;
    int needed;
    size_t offset; /* of the pointer in pst__cuda_driver */
} entry;

#define NEEDED(name, version)   {#name, version, 1, offsetof(pst__cuda_driver, name)},
#define OPTIONAL(name, version) {#name, version, 0, offsetof(pst__cuda_driver, name)},
static const entry entries[] = {PST__CUDA_DRIVER_MAP(NEEDED, OPTIONAL)};

static pst_status find_entries(pst__cuda_driver *driver, PFN_cuGetProcAddress_v11030 get,
                               const char *path, pst_runtime *runtime) {
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
        void *found = NULL;
        const CUresult result =
            get(entries[i].name, &found, entries[i].version, CU_GET_PROC_ADDRESS_LEGACY_STREAM);
        if (entries[i].needed && (result != CUDA_SUCCESS || found == NULL))
            return pst__runtime_fail(
                runtime, PST_EUNSUPPORTED,
                "device cuda: %s has no %s of version %d; install a newer driver", path,
                entries[i].name, entries[i].version);
        memcpy((char *)driver + entries[i].offset, &found, sizeof found);
    }
    return PST_OK;
}

pst_status pst__cuda_driver_open(pst__cuda_driver *driver, const char *path, pst_runtime *runtime) {
    memset(driver, 0, sizeof *driver);
    if (path == NULL) path = "libcuda.so.1";
    /* The driver has threads and state of its own, and others use it: it stays loaded. */
    driver->library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (driver->library == NULL)
        return pst__runtime_fail(runtime, PST_EUNSUPPORTED, "device cuda: no CUDA driver: %s",
                                 dlerror());
    PFN_cuGetProcAddress_v11030 get = NULL;
    void *symbol = dlsym(driver->library, "cuGetProcAddress");
    memcpy(&get, &symbol, sizeof get);
    pst_status status =
        get != NULL
            ? find_entries(driver, get, path, runtime)
            : pst__runtime_fail(runtime, PST_EUNSUPPORTED,
                                "device cuda: %s has no cuGetProcAddress; install a driver of CUDA "
                                "11.3 or later",
                                path);
    if (status != PST_OK) pst__cuda_driver_close(driver);
    return status;
}

void pst__cuda_driver_close(pst__cuda_driver *driver) {
    if (driver->library != NULL) (void)dlclose(driver->library);
    driver->library = NULL;
}
