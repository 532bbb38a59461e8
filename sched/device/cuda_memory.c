/* Device memory of the device cuda: physical memory that other processes can map, at an address
 * range of its own. */
#include "sched/device/cuda.h"

static size_t round_up(const pst__cuda *cuda, size_t bytes) {
    return (bytes + cuda->granularity - 1) / cuda->granularity * cuda->granularity;
}

static void unmap(pst__cuda *cuda, void *memory, size_t bytes) {
    const size_t whole = round_up(cuda, bytes);
    (void)cuda->driver.cuMemUnmap(pst__cuda_address(memory), whole);
    (void)cuda->driver.cuMemAddressFree(pst__cuda_address(memory), whole);
}

/* Maps physical memory, here or a peer's, for the device's own use. */
static pst_status map(pst__cuda *cuda, CUmemGenericAllocationHandle handle, size_t bytes,
                      void **memory) {
    const size_t whole = round_up(cuda, bytes);
    const CUmemAccessDesc access = {
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = cuda->gpu},
        .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr address = 0;
    pst_status status =
        pst__cuda_call(cuda, cuMemAddressReserve, (&address, whole, 0, 0, 0), "%zu bytes", whole);
    if (status != PST_OK) return status;
    status = pst__cuda_call(cuda, cuMemMap, (address, whole, 0, handle, 0), "%zu bytes", whole);
    if (status != PST_OK) {
        (void)cuda->driver.cuMemAddressFree(address, whole);
        return status;
    }
    *memory = (void *)(uintptr_t)address;
    status =
        pst__cuda_call(cuda, cuMemSetAccess, (address, whole, &access, 1),
                       "%zu bytes for %s; memory of a peer needs peer access", whole, cuda->name);
    if (status == PST_OK) return PST_OK;
    unmap(cuda, *memory, bytes);
    *memory = NULL;
    return status;
}

/* The mapping keeps the physical memory: its handle is not needed beyond. */
static pst_status alloc_device(pst__cuda *cuda, size_t bytes, void **memory) {
    const size_t whole = round_up(cuda, bytes);
    const CUmemAllocationProp kind = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes =
            cuda->exports ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = cuda->gpu}};
    CUmemGenericAllocationHandle handle = 0;
    pst_status status =
        pst__cuda_call(cuda, cuMemCreate, (&handle, whole, &kind, 0), "%zu bytes", whole);
    if (status != PST_OK) return status;
    status = map(cuda, handle, bytes, memory);
    (void)cuda->driver.cuMemRelease(handle);
    return status;
}

pst_status pst__cuda_alloc(pst_device *device, pst_memory_kind kind, size_t bytes, void **memory) {
    pst__cuda *cuda = pst__cuda_of(device);
    CUcontext previous;
    *memory = NULL;
    if (bytes == 0) return pst__cuda_refuse(cuda, PST_EINVAL, "an allocation of 0 bytes");
    pst_status status = pst__cuda_enter(cuda, &previous);
    if (status != PST_OK) return status;
    status = kind == PST_MEMORY_PINNED   ? pst__cuda_pinned_alloc(cuda, bytes, memory)
             : kind == PST_MEMORY_SHARED ? pst__cuda_shared_alloc(cuda, bytes, memory)
                                         : alloc_device(cuda, bytes, memory);
    pst__cuda_leave(cuda, previous);
    return status;
}

void pst__cuda_free(pst_device *device, pst_memory_kind kind, void *memory, size_t bytes) {
    pst__cuda *cuda = pst__cuda_of(device);
    CUcontext previous;
    if (memory == NULL || pst__cuda_enter(cuda, &previous) != PST_OK) return;
    if (kind == PST_MEMORY_PINNED)
        pst__cuda_pinned_free(cuda, memory, bytes);
    else if (!pst__cuda_shared_free(cuda, memory))
        unmap(cuda, memory, bytes);
    pst__cuda_leave(cuda, previous);
}

/* ---- between processes -------------------------------------------------------------- */

static pst_status export_memory(pst__cuda *cuda, void *memory, int *descriptor) {
    CUmemGenericAllocationHandle handle = 0;
    if (pst__cuda_shared_export(cuda, memory, descriptor))
        return *descriptor >= 0
                   ? PST_OK
                   : pst__cuda_refuse(cuda, PST_ESYSTEM, "no descriptor is left for an export");
    if (!cuda->exports)
        return pst__cuda_refuse(cuda, PST_EUNSUPPORTED,
                                "the driver exports no memory as a file descriptor");
    pst_status status =
        pst__cuda_call(cuda, cuMemRetainAllocationHandle, (&handle, memory), "memory %p", memory);
    if (status != PST_OK) return status;
    status = pst__cuda_call(cuda, cuMemExportToShareableHandle,
                            (descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                            "memory %p", memory);
    (void)cuda->driver.cuMemRelease(handle);
    return status;
}

pst_status pst__cuda_memory_export(pst_device *device, void *memory, int *descriptor) {
    pst__cuda *cuda = pst__cuda_of(device);
    CUcontext previous;
    *descriptor = -1;
    pst_status status = pst__cuda_enter(cuda, &previous);
    if (status != PST_OK) return status;
    status = export_memory(cuda, memory, descriptor);
    pst__cuda_leave(cuda, previous);
    return status;
}

static pst_status import_memory(pst__cuda *cuda, int descriptor, size_t bytes, void **memory) {
    CUmemGenericAllocationHandle handle = 0;
    if (pst__cuda_is_shared(descriptor))
        return pst__cuda_shared_import(cuda, descriptor, bytes, memory);
    pst_status status = pst__cuda_call(
        cuda, cuMemImportFromShareableHandle,
        (&handle, (void *)(intptr_t)descriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
        "descriptor %d, %zu bytes; both processes need the same user", descriptor, bytes);
    if (status != PST_OK) return status;
    status = map(cuda, handle, bytes, memory);
    (void)cuda->driver.cuMemRelease(handle);
    return status;
}

pst_status pst__cuda_memory_import(pst_device *device, int descriptor, size_t bytes,
                                   void **memory) {
    pst__cuda *cuda = pst__cuda_of(device);
    CUcontext previous;
    *memory = NULL;
    if (bytes == 0) return pst__cuda_refuse(cuda, PST_EINVAL, "an import of 0 bytes");
    pst_status status = pst__cuda_enter(cuda, &previous);
    if (status != PST_OK) return status;
    status = import_memory(cuda, descriptor, bytes, memory);
    pst__cuda_leave(cuda, previous);
    return status;
}

void pst__cuda_memory_unmap(pst_device *device, void *memory, size_t bytes) {
    pst__cuda_free(device, PST_MEMORY_DEVICE, memory, bytes);
}
