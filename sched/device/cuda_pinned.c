/* Pinned memory of the device cuda: pages of the GPU's NUMA node, brought in by several threads,
 * because most of what page-locking takes is bringing them in. */
#include "sched/device/cuda.h"
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

static size_t round_up(size_t bytes) {
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
    const size_t count = thread_count(bytes), each = round_up(bytes / count);
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

pst_status pst__cuda_pinned_alloc(pst__cuda *cuda, size_t bytes, void **memory) {
    const size_t whole = round_up(bytes);
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

void pst__cuda_pinned_free(pst__cuda *cuda, void *memory, size_t bytes) {
    (void)cuda->driver.cuMemHostUnregister(memory);
    (void)munmap(memory, round_up(bytes));
}
