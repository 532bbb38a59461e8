#include "tracing/page.h"

#include "base/atomic.h"
#include "base/clock.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define NAMES_BYTES (PST_PAGE_BYTES - sizeof(pst_page))

_Static_assert(sizeof(pst_page) == offsetof(pst_page, names), "names begin where the head ends");

/* ---- life --------------------------------------------------------------------------------- */

/* NULL: the system has no such file for us, or no descriptor. */
static pst_page *map_file(int descriptor) {
    if (descriptor < 0 || ftruncate(descriptor, PST_PAGE_BYTES) != 0 ||
        fchmod(descriptor, 0600) != 0)
        return NULL;
    void *memory = mmap(NULL, PST_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static pst_page *map_own(void) {
    void *memory =
        mmap(NULL, PST_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

pst_status pst_page_create(pst_page **created) {
    if (created == NULL) return PST_EINVAL;
    int descriptor = memfd_create("penstock", MFD_CLOEXEC);
    pst_page *page = map_file(descriptor);
    if (page == NULL && descriptor >= 0) {
        (void)close(descriptor);
        descriptor = -1;
    }
    if (page == NULL) page = map_own();
    *created = page;
    if (page == NULL) return PST_ESYSTEM;
    page->version = PST_PAGE_VERSION;
    page->head_bytes = sizeof *page;
    page->pid = getpid();
    page->descriptor = descriptor;
    return PST_OK;
}

void pst_page_destroy(pst_page *page) {
    if (page == NULL) return;
    if (page->descriptor >= 0) (void)close(page->descriptor);
    (void)munmap(page, PST_PAGE_BYTES);
}

void pst__page_show(pst_page *page, const char *job, int rank, int world_size) {
    if (page == NULL) return;
    (void)snprintf(page->job, sizeof page->job, "%s", job);
    page->rank = rank;
    page->world_size = world_size;
    /* Release: who finds the number, in whatever process, finds what is above. */
    pst__store_release(&page->magic, PST_PAGE_MAGIC);
}

void pst__page_hide(pst_page *page) {
    if (page != NULL) pst__store_relaxed(&page->magic, 0); /* what is read meanwhile is still so */
}

/* ---- places ------------------------------------------------------------------------------- */

pst_status pst_page_name_units(pst_page *page, const char *const *names, size_t count) {
    if (page == NULL || (names == NULL && count > 0)) return PST_EINVAL;
    if (page->unit_count != 0) return PST_ESTATE;
    size_t used = 0;
    uint32_t named = 0;
    for (; named < count; named++) {
        const size_t bytes = strlen(names[named]) + 1;
        if (bytes > NAMES_BYTES - used) break;
        memcpy(page->names + used, names[named], bytes);
        used += bytes;
    }
    pst__store_release(&page->unit_count, named); /* pairs with the acquire in name_of */
    return PST_OK;
}

/* Relaxed, all of it: one thread writes, and others read words that are a moment old. */
void pst_page_reach(pst_page *page, uint32_t step, uint32_t unit, pst_phase phase, int is_behind) {
    pst_page_place *place = &page->place;
    const uint64_t now = pst__now();
    if (place->count == 0) {
        pst__store_relaxed(&place->step_began, now);
    } else if (place->place >> 32 != step) {
        pst__store_relaxed(&place->steps, place->steps + 1);
        pst__store_relaxed(&place->steps_ns, place->steps_ns + now - place->step_began);
        pst__store_relaxed(&place->step_began, now);
    }
    const uint64_t number = (uint64_t)step << 32 | (uint64_t)(unit & 0xFFFFFFu) << 8 |
                            (uint64_t)phase << 1 | (is_behind != 0);
    pst__store_relaxed(&place->place, number);
    pst__store_relaxed(&place->since, now);
    pst__store_relaxed(&place->count, place->count + 1);
}

/* NULL: it has none. Nothing is believed of a page that another process writes. */
static const char *name_of(const pst_page *page, uint64_t unit) {
    /* Acquire: pairs with the release in pst_page_name_units. */
    if (unit >= pst__load_acquire(&page->unit_count)) return NULL;
    const char *name = page->names, *end = (const char *)page + PST_PAGE_BYTES;
    for (; unit > 0; unit--) {
        const char *last = memchr(name, '\0', (size_t)(end - name));
        if (last == NULL) return NULL;
        name = last + 1;
    }
    return memchr(name, '\0', (size_t)(end - name)) == NULL ? NULL : name;
}

void pst_page_describe(const pst_page *page, char *text, size_t size, uint64_t *since) {
    static const char *const phases[PST_PHASE_COUNT] = {"",         "forward",   "recompute",
                                                        "backward", "optimizer", "captured step"};
    const uint64_t place = pst__load_relaxed(&page->place.place); /* a moment old is as good */
    const uint64_t step = place >> 32, unit = place >> 8 & 0xFFFFFFu, phase = place >> 1 & 0x7Fu;
    const char *in = (place & 1) != 0 ? "behind" : "in";
    const char *name = unit == 0 ? NULL : name_of(page, unit);
    if (since != NULL) *since = pst__load_relaxed(&page->place.since);
    if (phase == PST_PHASE_NONE || phase >= PST_PHASE_COUNT)
        (void)snprintf(text, size, "before the first forward");
    else if (name == NULL)
        (void)snprintf(text, size, "%s the %s (step %" PRIu64 ")", in, phases[phase], step);
    else
        (void)snprintf(text, size, "%s '%s' (step %" PRIu64 ", %s)", in, name, step, phases[phase]);
}

/* The letter that the system has for the state of a process; 0: there is none. */
static int state_of(int64_t pid) {
    char path[48], stat[512];
    (void)snprintf(path, sizeof path, "/proc/%" PRId64 "/stat", pid);
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return '\0';
    const ssize_t bytes = read(file, stat, sizeof stat - 1);
    (void)close(file);
    stat[bytes < 0 ? 0 : bytes] = '\0';
    const char *name_end = strrchr(stat, ')');
    return name_end == NULL || name_end[1] != ' ' ? '\0' : name_end[2];
}

const char *pst__page_fault(const pst_page *page) {
    if (page->pid == getpid()) return NULL;
    const int state = state_of(page->pid);
    if (state == 'T' || state == 't') return "is stopped";
    return state == '\0' || state == 'Z' || state == 'X' ? "has ended" : NULL;
}

/* ---- figures ------------------------------------------------------------------------------ */

/* Relaxed: each word by itself is whole, and one that is a moment old is as good. */
static void store_words(void *to, const void *from, size_t bytes) {
    uint64_t *words = to;
    const uint64_t *given = from;
    for (size_t i = 0; i < bytes / sizeof *words; i++)
        pst__store_relaxed(&words[i], given[i]);
}

void pst__page_post(pst_page *page, const pst_page_engine *engine) {
    store_words(&page->engine, engine, sizeof *engine);
}

void pst__page_post_lanes(pst_page *page, const pst_page_lane *lanes, size_t count) {
    const uint64_t sequence = page->sequence;
    pst__store_relaxed(&page->sequence, sequence + 1);
    /* Who reads anything of what follows finds the number odd, or changed, behind it: pairs with
     * the reader's, between the lanes and its second look at the number. */
    __atomic_thread_fence(__ATOMIC_RELEASE);
    store_words(page->lanes, lanes, count * sizeof *lanes);
    pst__store_relaxed(&page->lane_count, count);
    pst__store_relaxed(&page->looked, pst__now());
    /* Release: who finds this number first finds the lanes. */
    pst__store_release(&page->sequence, sequence + 2);
}
