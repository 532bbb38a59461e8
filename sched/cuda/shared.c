/* Shared memory of the device cuda: a memory file that each process registers for its own device.
 * Its size is sealed, so that no process can pull it away under another, and so that its descriptor
 * can be told from the driver's. */
#include "sched/cuda/cuda.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW)

struct pst__cuda_shared {
    pst__cuda_shared *next;
    void *memory;
    size_t bytes; /* whole pages */
    int descriptor;
};

static size_t whole_pages(size_t bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (bytes + page - 1) / page * page;
}

/* ---- the list ----------------------------------------------------------------------- */

static void enlist(pst__cuda *cuda, pst__cuda_shared *shared) {
    ck_spinlock_lock(&cuda->shared_lock);
    shared->next = cuda->shared;
    cuda->shared = shared;
    ck_spinlock_unlock(&cuda->shared_lock);
}

/* Under the lock: the link to the piece with this address. */
static pst__cuda_shared **find(pst__cuda *cuda, const void *address) {
    pst__cuda_shared **link = &cuda->shared;
    while (*link != NULL && (uintptr_t)address - (uintptr_t)(*link)->memory >= (*link)->bytes)
        link = &(*link)->next;
    return link;
}

int pst__cuda_shared_contains(pst__cuda *cuda, const void *address) {
    ck_spinlock_lock(&cuda->shared_lock);
    const int contains = *find(cuda, address) != NULL;
    ck_spinlock_unlock(&cuda->shared_lock);
    return contains;
}

int pst__cuda_shared_export(pst__cuda *cuda, const void *memory, int *descriptor) {
    ck_spinlock_lock(&cuda->shared_lock);
    const pst__cuda_shared *shared = *find(cuda, memory);
    if (shared != NULL) *descriptor = fcntl(shared->descriptor, F_DUPFD_CLOEXEC, 0);
    ck_spinlock_unlock(&cuda->shared_lock);
    return shared != NULL;
}

/* ---- pieces ------------------------------------------------------------------------- */

static pst_status map(pst__cuda *cuda, pst__cuda_shared *shared) {
    void *mapped =
        mmap(NULL, shared->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, shared->descriptor, 0);
    if (mapped == MAP_FAILED)
        return pst__cuda_refuse(cuda, PST_ENOMEM, "%zu bytes of shared memory cannot be mapped",
                                shared->bytes);
    const pst_status status = pst__cuda_call(
        cuda, cuMemHostRegister,
        (mapped, shared->bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP),
        "%zu shared bytes", shared->bytes);
    if (status == PST_OK)
        shared->memory = mapped;
    else
        (void)munmap(mapped, shared->bytes);
    return status;
}

/* Takes the descriptor over. */
static pst_status adopt(pst__cuda *cuda, int descriptor, size_t bytes, void **memory) {
    pst__cuda_shared *shared = pst__heap_alloc(&cuda->heap, sizeof *shared);
    pst_status status = PST_ENOMEM;
    if (shared != NULL) {
        shared->bytes = whole_pages(bytes);
        shared->descriptor = descriptor;
        status = map(cuda, shared);
    }
    if (status == PST_OK) {
        enlist(cuda, shared);
        *memory = shared->memory;
        return PST_OK;
    }
    if (shared == NULL) (void)pst__cuda_refuse(cuda, PST_ENOMEM, "no memory for shared memory");
    pst__heap_free(&cuda->heap, shared, sizeof *shared);
    (void)close(descriptor);
    return status;
}

pst_status pst__cuda_shared_alloc(pst__cuda *cuda, size_t bytes, void **memory) {
    const int descriptor = memfd_create("penstock shared memory", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (descriptor >= 0 && ftruncate(descriptor, (off_t)whole_pages(bytes)) == 0 &&
        fcntl(descriptor, F_ADD_SEALS, SEALS) == 0)
        return adopt(cuda, descriptor, bytes, memory);
    if (descriptor >= 0) (void)close(descriptor);
    return pst__cuda_refuse(cuda, PST_ESYSTEM, "the system gave no memory file of %zu bytes",
                            bytes);
}

int pst__cuda_is_shared(int descriptor) {
    const int seals = fcntl(descriptor, F_GET_SEALS);
    return seals >= 0 && (seals & SEALS) == SEALS;
}

pst_status pst__cuda_shared_import(pst__cuda *cuda, int descriptor, size_t bytes, void **memory) {
    if (lseek(descriptor, 0, SEEK_END) < (off_t)bytes)
        return pst__cuda_refuse(cuda, PST_EINVAL, "descriptor %d has less than %zu bytes",
                                descriptor, bytes);
    const int own = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
    if (own >= 0) return adopt(cuda, own, bytes, memory);
    return pst__cuda_refuse(cuda, PST_ESYSTEM, "descriptor %d cannot be kept", descriptor);
}

int pst__cuda_shared_free(pst__cuda *cuda, void *memory) {
    ck_spinlock_lock(&cuda->shared_lock);
    pst__cuda_shared **link = find(cuda, memory), *gone = *link;
    if (gone != NULL) *link = gone->next;
    ck_spinlock_unlock(&cuda->shared_lock);
    if (gone == NULL) return 0;
    (void)cuda->driver.cuMemHostUnregister(gone->memory);
    (void)munmap(gone->memory, gone->bytes);
    (void)close(gone->descriptor);
    pst__heap_free(&cuda->heap, gone, sizeof *gone);
    return 1;
}
