/* Memory: physical memory is a memory file, which other processes can map too. */
#include "internal.h"

#include <sys/mman.h>
#include <unistd.h>

#define GRANULARITY ((size_t)2 << 20)

typedef struct physical {
    int file, users; /* the handle's and the mappings' */
    size_t bytes;
    int exports;
} physical;

/* A piece of the address space: reserved (nothing behind it), mapped, or registered host memory. */
typedef struct range {
    struct range *next;
    CUdeviceptr address;
    size_t bytes;
    physical *behind;
    int registered, accessible;
} range;

static range *ranges;
static size_t physical_count;

static range *find(CUdeviceptr address, size_t bytes) {
    for (range *at = ranges; at != NULL; at = at->next)
        if (address >= at->address && bytes <= at->bytes &&
            address - at->address <= at->bytes - bytes)
            return at;
    return NULL;
}

static range *find_exactly(CUdeviceptr address, size_t bytes) {
    range *found = find(address, bytes);
    return found != NULL && found->address == address && found->bytes == bytes ? found : NULL;
}

static void add(CUdeviceptr address, size_t bytes, int registered) {
    range *added = calloc(1, sizeof *added);
    if (added == NULL) abort();
    *added = (range){ranges, address, bytes, NULL, registered, registered};
    ranges = added;
}

static void drop(range *gone) {
    range **link = &ranges;
    while (*link != gone)
        link = &(*link)->next;
    *link = gone->next;
    free(gone);
}

int fake_reaches(CUdeviceptr address, size_t bytes) {
    const range *found = find(address, bytes);
    return found != NULL && found->accessible;
}

size_t fake_cuda_live_memory(void) {
    size_t count = 0;
    if (fake_enter("live memory", NULL, 0) != CUDA_SUCCESS) return 0;
    count = physical_count;
    for (const range *at = ranges; at != NULL; at = at->next)
        count++;
    fake_leave();
    return count;
}

/* ---- physical memory ---------------------------------------------------------------- */

static void release(physical *memory) {
    if (--memory->users > 0) return;
    (void)close(memory->file);
    free(memory);
    physical_count--;
}

static physical *adopt(int file, size_t bytes, int exports) {
    physical *memory = calloc(1, sizeof *memory);
    if (memory == NULL) abort();
    *memory = (physical){file, 1, bytes, exports};
    physical_count++;
    return memory;
}

static physical *of(CUmemGenericAllocationHandle handle) {
    return (physical *)(uintptr_t)handle;
}

CUresult CUDAAPI cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *kind,
                                               CUmemAllocationGranularity_flags which) {
    CALL(cuMemGetAllocationGranularity, NULL);
    (void)kind, (void)which;
    *bytes = GRANULARITY;
    return fake_end(CUDA_SUCCESS);
}

CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                             const CUmemAllocationProp *kind, unsigned long long flags) {
    CALL(cuMemCreate, NULL);
    (void)flags;
    if (bytes == 0 || bytes % GRANULARITY != 0) return fake_end(CUDA_ERROR_INVALID_VALUE);
    const int file = memfd_create("fake device memory", MFD_CLOEXEC);
    if (file < 0) return fake_end(CUDA_ERROR_OUT_OF_MEMORY);
    if (ftruncate(file, (off_t)bytes) != 0) {
        (void)close(file);
        return fake_end(CUDA_ERROR_OUT_OF_MEMORY);
    }
    const int exports = kind->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)adopt(file, bytes, exports);
    return fake_end(CUDA_SUCCESS);
}

CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
    CALL(cuMemRelease, NULL);
    release(of(handle));
    return fake_end(CUDA_SUCCESS);
}

CUresult CUDAAPI cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *memory) {
    CALL(cuMemRetainAllocationHandle, NULL);
    const range *found = find((CUdeviceptr)(uintptr_t)memory, 1);
    if (found == NULL || found->behind == NULL) return fake_end(CUDA_ERROR_INVALID_VALUE);
    found->behind->users++;
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)found->behind;
    return fake_end(CUDA_SUCCESS);
}

CUresult CUDAAPI cuMemExportToShareableHandle(void *descriptor, CUmemGenericAllocationHandle handle,
                                              CUmemAllocationHandleType type,
                                              unsigned long long flags) {
    CALL(cuMemExportToShareableHandle, NULL);
    (void)flags;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !of(handle)->exports)
        return fake_end(CUDA_ERROR_INVALID_VALUE);
    const int copy = dup(of(handle)->file);
    memcpy(descriptor, &copy, sizeof copy);
    return fake_end(copy < 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS);
}

CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle,
                                                void *descriptor, CUmemAllocationHandleType type) {
    CALL(cuMemImportFromShareableHandle, NULL);
    const int given = (int)(intptr_t)descriptor;
    const off_t bytes = lseek(given, 0, SEEK_END);
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || bytes <= 0)
        return fake_end(CUDA_ERROR_INVALID_VALUE);
    const int copy = dup(given);
    if (copy < 0) return fake_end(CUDA_ERROR_OUT_OF_MEMORY);
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)adopt(copy, (size_t)bytes, 1);
    return fake_end(CUDA_SUCCESS);
}

/* ---- addresses ---------------------------------------------------------------------- */

CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment,
                                     CUdeviceptr wanted, unsigned long long flags) {
    CALL(cuMemAddressReserve, NULL);
    (void)alignment, (void)wanted, (void)flags;
    if (bytes == 0 || bytes % GRANULARITY != 0) return fake_end(CUDA_ERROR_INVALID_VALUE);
    void *reserved =
        mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) return fake_end(CUDA_ERROR_OUT_OF_MEMORY);
    *address = (CUdeviceptr)(uintptr_t)reserved;
    add(*address, bytes, 0);
    return fake_end(CUDA_SUCCESS);
}

CUresult CUDAAPI cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    CALL(cuMemAddressFree, NULL);
    range *found = find_exactly(address, bytes);
    if (found == NULL || found->behind != NULL || found->registered)
        return fake_end(CUDA_ERROR_INVALID_VALUE);
    (void)munmap((void *)(uintptr_t)address, bytes);
    drop(found);
    return fake_end(CUDA_SUCCESS);
}

CUresult CUDAAPI cuMemMap(CUdeviceptr address, size_t bytes, size_t offset,
                          CUmemGenericAllocationHandle handle, unsigned long long flags) {
    CALL(cuMemMap, NULL);
    (void)flags;
    range *found = find_exactly(address, bytes);
    if (found == NULL || found->behind != NULL || offset != 0 || bytes > of(handle)->bytes)
        return fake_end(CUDA_ERROR_INVALID_VALUE);
    if (mmap((void *)(uintptr_t)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, of(handle)->file,
             0) == MAP_FAILED)
        return fake_end(CUDA_ERROR_OUT_OF_MEMORY);
    found->behind = of(handle);
    found->behind->users++;
    return fake_end(CUDA_SUCCESS);
}

CUresult CUDAAPI cuMemUnmap(CUdeviceptr address, size_t bytes) {
    CALL(cuMemUnmap, NULL);
    range *found = find_exactly(address, bytes);
    if (found == NULL || found->behind == NULL) return fake_end(CUDA_ERROR_INVALID_VALUE);
    (void)mmap((void *)(uintptr_t)address, bytes, PROT_NONE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    release(found->behind);
    found->behind = NULL;
    found->accessible = 0;
    return fake_end(CUDA_SUCCESS);
}

CUresult CUDAAPI cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access,
                                size_t count) {
    CALL(cuMemSetAccess, NULL);
    range *found = find_exactly(address, bytes);
    if (found == NULL || found->behind == NULL || count != 1 ||
        access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        return fake_end(CUDA_ERROR_INVALID_VALUE);
    (void)mprotect((void *)(uintptr_t)address, bytes, PROT_READ | PROT_WRITE);
    found->accessible = 1;
    return fake_end(CUDA_SUCCESS);
}

/* ---- host memory -------------------------------------------------------------------- */

CUresult CUDAAPI cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags) {
    CALL(cuMemHostRegister, NULL);
    (void)flags;
    if (find((CUdeviceptr)(uintptr_t)memory, bytes) != NULL)
        return fake_end(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    add((CUdeviceptr)(uintptr_t)memory, bytes, 1);
    return fake_end(CUDA_SUCCESS);
}

CUresult CUDAAPI cuMemHostUnregister(void *memory) {
    CALL(cuMemHostUnregister, NULL);
    range *found = find((CUdeviceptr)(uintptr_t)memory, 1);
    if (found == NULL || !found->registered) return fake_end(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    drop(found);
    return fake_end(CUDA_SUCCESS);
}
