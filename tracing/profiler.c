#include "tracing/profiler.h"

#include <penstock/trace.h>

#if __has_include(<nvtx3/nvToolsExt.h>)

#include <nvtx3/nvToolsExt.h>
#include <pthread.h>
#include <stdlib.h>

static nvtxDomainHandle_t domain; /* NULL: nobody is attached; written once, by attach */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void attach(void) {
    const char *path = getenv("NVTX_INJECTION64_PATH");
    if (path != NULL && path[0] != '\0') domain = nvtxDomainCreateA("penstock");
}

int pst_profiler_is_attached(void) {
    (void)pthread_once(&once, attach); /* orders what it wrote for whoever returns from it */
    return domain != NULL;
}

static nvtxEventAttributes_t named(const char *name) {
    nvtxEventAttributes_t event = {0};
    event.version = NVTX_VERSION;
    event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    event.messageType = NVTX_MESSAGE_TYPE_ASCII;
    event.message.ascii = name;
    return event;
}

void pst__profiler_push(const char *name) {
    const nvtxEventAttributes_t event = named(name);
    (void)nvtxDomainRangePushEx(domain, &event);
}

void pst__profiler_pop(void) {
    (void)nvtxDomainRangePop(domain);
}

uint64_t pst_profiler_begin(const char *name) {
    if (!pst_profiler_is_attached()) return 0;
    const nvtxEventAttributes_t event = named(name);
    return nvtxDomainRangeStartEx(domain, &event);
}

void pst_profiler_end(uint64_t range) {
    if (range != 0) nvtxDomainRangeEnd(domain, range);
}

#else

int pst_profiler_is_attached(void) {
    return 0;
}

void pst__profiler_push(const char *name) {
    (void)name;
}

void pst__profiler_pop(void) {}

uint64_t pst_profiler_begin(const char *name) {
    (void)name;
    return 0;
}

void pst_profiler_end(uint64_t range) {
    (void)range;
}

#endif
