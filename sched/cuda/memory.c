/* Memory of the device cuda. Device memory: physical memory that other processes can map, at an
 * address range of its own. Pinned memory: pages of the GPU's NUMA node, brought in by several
 * threads, because most of what page-locking takes is bringing them in. */
#include "sched/cuda/cuda.h"
#include "sched/thread.h"

#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PAGE         ((size_t)4096)
#define THREADS      8u
#define EACH_THREAD  ((size_t)16 << 20) /* less is not worth a thread */
#define PREFER_NODE  1                  /* MPOL_PREFERRED: another node's where this one is full */
#define NODES        1024u
#define BITS_OF_WORD (8u * sizeof(unsigned long))

/* ---- device memory ------------------------------------------------------------------ */

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

/* ---- pinned memory ------------------------------------------------------------------ */

static size_t whole_pages(size_t bytes) {
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

/* A wish: memory of another node works too, and so does a system that does not hear of nodes. */
static void prefer_node(const pst__cuda *cuda, void *memory, size_t bytes) {
    unsigned long nodes[NODES / BITS_OF_WORD] = {0};
    if (cuda->numa_node < 0 || (unsigned)cuda->numa_node >= NODES) return;
    const unsigned node = (unsigned)cuda->numa_node;
    nodes[node / BITS_OF_WORD] = 1ul << node % BITS_OF_WORD;
    (void)syscall(SYS_mbind, memory, bytes, PREFER_NODE, nodes, (unsigned long)NODES, 0u);
}

typedef struct part {
    pthread_t thread;
    int started;
    volatile char *first;
    size_t bytes;
} part;

static void *touch(void *argument) {
    const part *part = argument;
    for (size_t at = 0; at < part->bytes; at += PAGE)
        part->first[at] = 0;
    return NULL;
}

static size_t thread_count(size_t bytes) {
    const long processors = sysconf(_SC_NPROCESSORS_ONLN);
    size_t count = bytes / EACH_THREAD + 1;
    if (processors > 0 && count > (size_t)processors) count = (size_t)processors;
    return count < THREADS ? count : THREADS;
}

/* The first part is the calling thread's, and so is that of a thread which could not start. */
static void touch_all(void *memory, size_t bytes) {
    part parts[THREADS] = {0};
    const size_t count = thread_count(bytes), each = whole_pages(bytes / count);
    for (size_t i = 0; i < count; i++) {
        const size_t from = i * each < bytes ? i * each : bytes;
        parts[i].first = (volatile char *)memory + from;
        parts[i].bytes = bytes - from < each ? bytes - from : each;
        parts[i].started = i > 0 && pst__thread_start(&parts[i].thread, touch, &parts[i]) == 0;
    }
    for (size_t i = 0; i < count; i++)
        if (!parts[i].started) (void)touch(&parts[i]);
    for (size_t i = 0; i < count; i++)
        if (parts[i].started) (void)pthread_join(parts[i].thread, NULL);
}

static pst_status alloc_pinned(pst__cuda *cuda, size_t bytes, void **memory) {
    const size_t whole = whole_pages(bytes);
    void *mapped = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED)
        return pst__cuda_refuse(cuda, PST_ENOMEM, "no address space for %zu pinned bytes", whole);
    (void)madvise(mapped, whole, MADV_HUGEPAGE); /* fewer and faster faults */
    prefer_node(cuda, mapped, whole);
    touch_all(mapped, whole);
    const pst_status status =
        pst__cuda_call(cuda, cuMemHostRegister,
                       (mapped, whole, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP),
                       "%zu bytes", whole);
    if (status == PST_OK)
        *memory = mapped;
    else
        (void)munmap(mapped, whole);
    return status;
}

static void free_pinned(pst__cuda *cuda, void *memory, size_t bytes) {
    (void)cuda->driver.cuMemHostUnregister(memory);
    (void)munmap(memory, whole_pages(bytes));
}

/* ---- the table's functions ---------------------------------------------------------- */

pst_status pst__cuda_alloc(pst_device *device, pst_memory_kind kind, size_t bytes, void **memory) {
    pst__cuda *cuda = pst__cuda_of(device);
    *memory = NULL;
    if (bytes == 0) return pst__cuda_refuse(cuda, PST_EINVAL, "an allocation of 0 bytes");
    PST__CUDA_ENTER_OR_RETURN(cuda, NULL);
    return kind == PST_MEMORY_PINNED   ? alloc_pinned(cuda, bytes, memory)
           : kind == PST_MEMORY_SHARED ? pst__cuda_shared_alloc(cuda, bytes, memory)
                                       : alloc_device(cuda, bytes, memory);
}

void pst__cuda_free(pst_device *device, pst_memory_kind kind, void *memory, size_t bytes) {
    pst__cuda *cuda = pst__cuda_of(device);
    CUcontext previous;
    if (memory == NULL || pst__cuda_enter(cuda, &previous) != PST_OK) return;
    if (kind == PST_MEMORY_PINNED)
        free_pinned(cuda, memory, bytes);
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
    *descriptor = -1;
    PST__CUDA_ENTER_OR_RETURN(cuda, NULL);
    return export_memory(cuda, memory, descriptor);
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
    *memory = NULL;
    if (bytes == 0) return pst__cuda_refuse(cuda, PST_EINVAL, "an import of 0 bytes");
    PST__CUDA_ENTER_OR_RETURN(cuda, NULL);
    return import_memory(cuda, descriptor, bytes, memory);
}

void pst__cuda_memory_unmap(pst_device *device, void *memory, size_t bytes) {
    pst__cuda_free(device, PST_MEMORY_DEVICE, memory, bytes);
}
