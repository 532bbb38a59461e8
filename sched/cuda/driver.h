/* The CUDA driver's entry points, found at run time: one library works with a GPU and without. */
#ifndef PST_SCHED_CUDA_DRIVER_H
#define PST_SCHED_CUDA_DRIVER_H

#include <cuda.h>
#include <cudaTypedefs.h>
#include <penstock/runtime.h>

/* One line an entry point: name, and the driver version whose interface is meant (plain dlsym would
 * yield the oldest). NEEDED ones are there in every driver that can run this library; without the
 * others (NULL then) their callers have another way. */
#define PST__CUDA_DRIVER_MAP(NEEDED, OPTIONAL)                                                     \
    NEEDED(cuInit, 2000)                                                                           \
    NEEDED(cuDriverGetVersion, 2020)                                                               \
    NEEDED(cuGetErrorName, 6000)                                                                   \
    NEEDED(cuGetErrorString, 6000)                                                                 \
    NEEDED(cuDeviceGet, 2000)                                                                      \
    NEEDED(cuDeviceGetCount, 2000)                                                                 \
    NEEDED(cuDeviceGetAttribute, 2000)                                                             \
    NEEDED(cuDevicePrimaryCtxRetain, 7000)                                                         \
    NEEDED(cuDevicePrimaryCtxRelease, 11000)                                                       \
    NEEDED(cuCtxGetCurrent, 4000)                                                                  \
    NEEDED(cuCtxSetCurrent, 4000)                                                                  \
    NEEDED(cuCtxGetStreamPriorityRange, 5050)                                                      \
    NEEDED(cuThreadExchangeStreamCaptureMode, 10010)                                               \
    NEEDED(cuStreamCreateWithPriority, 5050)                                                       \
    NEEDED(cuStreamDestroy, 4000)                                                                  \
    NEEDED(cuStreamQuery, 2000)                                                                    \
    NEEDED(cuStreamIsCapturing, 10000)                                                             \
    NEEDED(cuStreamWaitEvent, 3020)                                                                \
    NEEDED(cuStreamWriteValue32, 11070)                                                            \
    NEEDED(cuStreamWaitValue32, 11070)                                                             \
    NEEDED(cuStreamBatchMemOp, 11070)                                                              \
    NEEDED(cuEventCreate, 2000)                                                                    \
    NEEDED(cuEventDestroy, 4000)                                                                   \
    NEEDED(cuEventRecord, 2000)                                                                    \
    NEEDED(cuEventQuery, 2000)                                                                     \
    NEEDED(cuEventElapsedTime, 2000)                                                               \
    NEEDED(cuMemcpyAsync, 4000)                                                                    \
    NEEDED(cuMemcpy2DAsync, 3020)                                                                  \
    OPTIONAL(cuMemcpyBatchAsync, 12080)                                                            \
    NEEDED(cuMemHostRegister, 6050)                                                                \
    NEEDED(cuMemHostUnregister, 4000)                                                              \
    NEEDED(cuMemGetAllocationGranularity, 10020)                                                   \
    NEEDED(cuMemAddressReserve, 10020)                                                             \
    NEEDED(cuMemAddressFree, 10020)                                                                \
    NEEDED(cuMemCreate, 10020)                                                                     \
    NEEDED(cuMemRelease, 10020)                                                                    \
    NEEDED(cuMemMap, 10020)                                                                        \
    NEEDED(cuMemUnmap, 10020)                                                                      \
    NEEDED(cuMemSetAccess, 10020)                                                                  \
    NEEDED(cuMemExportToShareableHandle, 10020)                                                    \
    NEEDED(cuMemImportFromShareableHandle, 10020)                                                  \
    NEEDED(cuMemRetainAllocationHandle, 11000)                                                     \
    NEEDED(cuModuleLoadData, 2000)                                                                 \
    NEEDED(cuModuleUnload, 2000)                                                                   \
    NEEDED(cuModuleGetFunction, 2000)                                                              \
    NEEDED(cuLaunchKernel, 4000)                                                                   \
    NEEDED(cuLaunchHostFunc, 10000)

typedef struct pst__cuda_driver {
    void *library;
#define PST__CUDA_ENTRY(name, version) PFN_##name##_v##version name;
    PST__CUDA_DRIVER_MAP(PST__CUDA_ENTRY, PST__CUDA_ENTRY)
#undef PST__CUDA_ENTRY
} pst__cuda_driver;

/* Loads `path` (NULL: "libcuda.so.1") and finds the entry points. PST_EUNSUPPORTED with the
 * runtime's error text naming what is missing; then there is nothing to close. */
pst_status pst__cuda_driver_open(pst__cuda_driver *driver, const char *path, pst_runtime *runtime);
void pst__cuda_driver_close(pst__cuda_driver *driver);

#endif
