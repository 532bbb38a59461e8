/* A profiler of its own, as NVTX loads one (NVTX_INJECTION64_PATH): keeps what it is told, for the
 * program that it is in to read. */
#include <nvtx3/nvToolsExt.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))
enum { LINES = 8192, LINE_BYTES = 128, DOMAINS = 16 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char lines[LINES][LINE_BYTES];
static size_t line_count;
static char domains[DOMAINS][32];
static size_t domain_count;
static uint64_t range_count;

/* How many lines there are: "THREAD push|pop|begin|end DOMAIN NAME", where the range of `begin` and
 * `end` is a number before the name. */
EXPORTED size_t recorded_count(void) {
    (void)pthread_mutex_lock(&lock);
    const size_t count = line_count;
    (void)pthread_mutex_unlock(&lock);
    return count;
}

EXPORTED const char *recorded(size_t line) {
    return lines[line];
}

static void note(const char *what, nvtxDomainHandle_t domain, const char *name) {
    (void)pthread_mutex_lock(&lock);
    if (line_count < LINES)
        (void)snprintf(lines[line_count++], LINE_BYTES, "%ld %s %s %s", syscall(SYS_gettid), what,
                       (const char *)domain, name);
    (void)pthread_mutex_unlock(&lock);
}

static nvtxDomainHandle_t NVTX_API create_domain(const char *name) {
    (void)pthread_mutex_lock(&lock);
    char *made = domains[domain_count < DOMAINS - 1 ? domain_count++ : domain_count];
    (void)snprintf(made, sizeof domains[0], "%s", name);
    (void)pthread_mutex_unlock(&lock);
    return (nvtxDomainHandle_t)(void *)made;
}

static int NVTX_API push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *event) {
    note("push", domain, event->message.ascii);
    return 0;
}

static int NVTX_API pop(nvtxDomainHandle_t domain) {
    note("pop", domain, "");
    return 0;
}

static nvtxRangeId_t NVTX_API begin(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *event) {
    char text[LINE_BYTES];
    const uint64_t range = __atomic_add_fetch(&range_count, 1, __ATOMIC_RELAXED);
    (void)snprintf(text, sizeof text, "%ld %s", (long)range, event->message.ascii);
    note("begin", domain, text);
    return range;
}

static void NVTX_API end(nvtxDomainHandle_t domain, nvtxRangeId_t range) {
    char text[LINE_BYTES];
    (void)snprintf(text, sizeof text, "%ld", (long)range);
    note("end", domain, text);
}

EXPORTED int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t tables) {
    const NvtxExportTableCallbacks *callbacks = tables(NVTX_ETID_CALLBACKS);
    NvtxFunctionTable table;
    unsigned size = 0;
    if (callbacks == NULL ||
        !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) ||
        size <= NVTX_CBID_CORE2_DomainCreateA)
        return 0;
    *table[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)create_domain;
    *table[NVTX_CBID_CORE2_DomainRangePushEx] = (NvtxFunctionPointer)push;
    *table[NVTX_CBID_CORE2_DomainRangePop] = (NvtxFunctionPointer)pop;
    *table[NVTX_CBID_CORE2_DomainRangeStartEx] = (NvtxFunctionPointer)begin;
    *table[NVTX_CBID_CORE2_DomainRangeEnd] = (NvtxFunctionPointer)end;
    return 1;
}
