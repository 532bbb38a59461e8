/* Memory of the device `sim`. All ranks of a simulation live in one process, on one device, and see
 * each other's memory where it is; what a rank frees stays until the last peer lets go of it. */
#include "tests/device/sim_queue.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct pst__sim_import {
    void *memory;
    size_t bytes; /* to be freed; 0: its owner still has it */
    int views;
    struct pst__sim_import *next;
};

/* What a descriptor stands for. */
typedef struct token {
    pst__sim *sim;
    pid_t process;
    void *memory;
} token;

#define ALIGNMENT ((size_t)512)

/* The heap's block begins before the memory, which has its address right before it. */
static size_t block_bytes(size_t bytes) {
    return bytes + ALIGNMENT + sizeof(void *);
}

static void *memory_in(void *block) {
    const uintptr_t first = (uintptr_t)block + sizeof(void *);
    char *memory =
        (char *)block + ((first + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT - (uintptr_t)block);
    memcpy(memory - sizeof block, &block, sizeof block);
    return memory;
}

static void free_block(const pst__sim *sim, const void *memory, size_t bytes) {
    void *block;
    if (memory == NULL) return;
    memcpy(&block, (const char *)memory - sizeof block, sizeof block);
    pst__heap_free(sim->heap, block, block_bytes(bytes));
}

static pst__sim_import **find(pst__sim *sim, const void *memory) {
    pst__sim_import **link = &sim->imports;
    while (*link != NULL && (*link)->memory != memory)
        link = &(*link)->next;
    return link;
}

pst_status pst__sim_alloc(pst_device *device, pst_memory_kind kind, size_t bytes, void **memory) {
    const pst__sim *sim = pst__sim_of(device);
    const pst_status fault = pst__sim_fault(sim, "alloc");
    (void)kind;
    *memory = NULL;
    if (fault != PST_OK || bytes == 0) return bytes == 0 ? PST_EINVAL : fault;
    void *block = pst__heap_alloc(sim->heap, block_bytes(bytes));
    if (block == NULL) return PST_ENOMEM;
    *memory = memory_in(block);
    return PST_OK;
}

void pst__sim_free(pst_device *device, pst_memory_kind kind, void *memory, size_t bytes) {
    pst__sim *sim = pst__sim_of(device);
    (void)kind;
    ck_spinlock_lock(&sim->lock);
    pst__sim_import *import = *find(sim, memory);
    if (import != NULL) import->bytes = bytes;
    ck_spinlock_unlock(&sim->lock);
    if (import == NULL) free_block(sim, memory, bytes);
}

pst_status pst__sim_memory_export(pst_device *device, void *memory, int *descriptor) {
    pst__sim *sim = pst__sim_of(device);
    const token token = {sim, getpid(), memory};
    const pst_status fault = pst__sim_fault(sim, "memory_export");
    if (fault != PST_OK) return fault;
    *descriptor = memfd_create("penstock sim", MFD_CLOEXEC);
    if (*descriptor < 0) return PST_ESYSTEM;
    if (pwrite(*descriptor, &token, sizeof token, 0) == (ssize_t)sizeof token) return PST_OK;
    (void)close(*descriptor);
    *descriptor = -1;
    return PST_ESYSTEM;
}

static pst_status add_view(pst__sim *sim, void *memory) {
    pst__sim_import *spare = pst__heap_alloc(sim->heap, sizeof *spare);
    if (spare == NULL) return PST_ENOMEM;
    ck_spinlock_lock(&sim->lock);
    pst__sim_import **link = find(sim, memory);
    if (*link == NULL) {
        spare->memory = memory;
        *link = spare;
        spare = NULL;
    }
    (*link)->views++;
    ck_spinlock_unlock(&sim->lock);
    pst__heap_free(sim->heap, spare, sizeof *spare);
    return PST_OK;
}

pst_status pst__sim_memory_import(pst_device *device, int descriptor, size_t bytes, void **memory) {
    pst__sim *sim = pst__sim_of(device);
    token token;
    pst_status status = pst__sim_fault(sim, "memory_import");
    (void)bytes;
    if (status != PST_OK) return status;
    if (pread(descriptor, &token, sizeof token, 0) != (ssize_t)sizeof token) return PST_EINVAL;
    if (token.process != getpid() || token.sim != sim) return PST_EUNSUPPORTED;
    status = add_view(sim, token.memory);
    if (status == PST_OK) *memory = token.memory;
    return status;
}

/* Takes the last view's record out; NULL: there are others. */
static pst__sim_import *drop_view(pst__sim *sim, const void *memory) {
    ck_spinlock_lock(&sim->lock);
    pst__sim_import **link = find(sim, memory), *last = NULL;
    if (*link != NULL && --(*link)->views == 0) {
        last = *link;
        *link = last->next;
    }
    ck_spinlock_unlock(&sim->lock);
    return last;
}

static void import_free(const pst__sim *sim, pst__sim_import *import) {
    if (import->bytes > 0) free_block(sim, import->memory, import->bytes);
    pst__heap_free(sim->heap, import, sizeof *import);
}

void pst__sim_memory_unmap(pst_device *device, void *memory, size_t bytes) {
    pst__sim *sim = pst__sim_of(device);
    pst__sim_import *last = drop_view(sim, memory);
    (void)bytes;
    if (last != NULL) import_free(sim, last);
}

void pst__sim_drop_memory(pst__sim *sim) {
    while (sim->imports != NULL) {
        pst__sim_import *next = sim->imports->next;
        import_free(sim, sim->imports);
        sim->imports = next;
    }
}
