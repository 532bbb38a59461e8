#include "ops/comm/ce/memory.h"

#include "base/atomic.h"
#include "sched/device/device.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void unmap(pst__regions *regions, pst__region *region, size_t bytes) {
    for (int rank = 0; rank < regions->link->size; rank++) {
        if (rank != regions->link->rank && region->views[rank] != NULL)
            regions->device->ops->memory_unmap(regions->device, region->views[rank], bytes);
        pst__store_relaxed(&region->views[rank], NULL); /* as in remove */
    }
}

static uint32_t find_free(const pst__regions *regions) {
    uint32_t index = 0;
    while (index < PST__REGIONS && regions->regions[index].bytes != 0)
        index++;
    return index;
}

/* The first rank whose message says that it has failed, or is about something else. */
static pst_status check_messages(const pst__regions *regions, const pst__message *messages,
                                 const char *doing, char *text, size_t size) {
    const pst__message *mine = &messages[regions->link->rank];
    for (int rank = 0; rank < regions->link->size; rank++) {
        const pst__message *theirs = &messages[rank];
        if (theirs->status != PST_OK) {
            if (rank == regions->link->rank) continue; /* it has its own text */
            (void)snprintf(text, size, "rank %d could not %s the memory: %s", rank, doing,
                           pst_status_text(theirs->status));
            return theirs->status;
        }
        if (theirs->bytes != mine->bytes || theirs->index != mine->index) {
            (void)snprintf(text, size,
                           "rank %d registers %llu bytes as number %u, this rank %llu as number "
                           "%u; all must register equal sizes in one order",
                           rank, (unsigned long long)theirs->bytes, theirs->index,
                           (unsigned long long)mine->bytes, mine->index);
            return PST_EMISMATCH;
        }
    }
    return mine->status;
}

static pst_status import(pst__regions *regions, pst__region *region, size_t bytes,
                         const int *descriptors, char *text, size_t size) {
    pst_device *device = regions->device;
    for (int rank = 0; rank < regions->link->size; rank++) {
        void *view = NULL;
        if (rank == regions->link->rank) continue;
        if (descriptors[rank] < 0) {
            (void)snprintf(text, size,
                           "no file descriptor is left for the memory of rank %d: raise their "
                           "limit (ulimit -n)",
                           rank);
            return PST_ESYSTEM;
        }
        pst_status status = device->ops->memory_import(device, descriptors[rank], bytes, &view);
        if (status != PST_OK) {
            (void)snprintf(text, size, "the memory of rank %d cannot be mapped: %s (%s)", rank,
                           pst_status_text(status), pst__device_text(device));
            return status;
        }
        region->views[rank] = view;
    }
    return PST_OK;
}

static void close_all(int *descriptors, int count) {
    for (int i = 0; i < count; i++)
        if (descriptors[i] >= 0) (void)close(descriptors[i]);
}

static pst_status swap(const pst__regions *regions, const pst__message *mine, int descriptor,
                       pst__message *messages, int *descriptors, char *text, size_t size) {
    int culprit;
    pst_status status =
        pst__link_swap(regions->link, mine, descriptor, messages, descriptors, &culprit);
    if (status != PST_OK)
        (void)snprintf(text, size, "rank %d %s while memory is registered", culprit,
                       status == PST_EPEER ? "has gone" : "does not answer");
    return status;
}

static pst_status export(const pst__regions *regions, void *memory, uint32_t index, int *descriptor,
                         char *text, size_t size) {
    pst_device *device = regions->device;
    *descriptor = -1;
    if (index == PST__REGIONS) {
        (void)snprintf(text, size, "more than %d registrations", PST_CE_MAX_REGIONS);
        return PST_ENOMEM;
    }
    pst_status status = device->ops->memory_export(device, memory, descriptor);
    if (status != PST_OK)
        (void)snprintf(text, size, "memory %p cannot be exported: %s (%s)", memory,
                       pst_status_text(status), pst__device_text(device));
    return status;
}

/* Two rounds: descriptors, and whether all could map them. */
pst_status pst__regions_add(pst__regions *regions, void *memory, size_t bytes, char *text,
                            size_t size) {
    pst__message messages[PST_CE_MAX_RANKS];
    int descriptors[PST_CE_MAX_RANKS], descriptor;
    const uint32_t index = find_free(regions);
    pst__region *region = &regions->regions[index < PST__REGIONS ? index : 0];
    pst__message mine = {.index = index, .bytes = bytes};
    mine.status = export(regions, memory, index, &descriptor, text, size);
    pst_status status = swap(regions, &mine, descriptor, messages, descriptors, text, size);
    if (descriptor >= 0) (void)close(descriptor);
    if (status != PST_OK) return status;
    status = check_messages(regions, messages, "export", text, size);
    if (status == PST_OK) status = import(regions, region, bytes, descriptors, text, size);
    close_all(descriptors, regions->link->size);
    mine.status = status;
    int ignored[PST_CE_MAX_RANKS];
    const size_t text_bytes = status == PST_OK ? size : 0; /* the first reason stays */
    pst_status others = swap(regions, &mine, -1, messages, ignored, text, text_bytes);
    if (others == PST_OK) others = check_messages(regions, messages, "map", text, text_bytes);
    if (status == PST_OK) status = others;
    if (status != PST_OK) {
        if (index < PST__REGIONS) unmap(regions, region, bytes);
        return status;
    }
    region->views[regions->link->rank] = memory;
    /* Release: pairs with the acquire in find: who sees the size sees the views. */
    pst__store_release(&region->bytes, bytes);
    return PST_OK;
}

void pst__regions_remove(pst__regions *regions, const void *memory) {
    for (uint32_t i = 0; i < PST__REGIONS; i++) {
        pst__region *region = &regions->regions[i];
        const size_t bytes = region->bytes;
        if (bytes == 0 || region->views[regions->link->rank] != memory) continue;
        pst__store_relaxed(&region->bytes, 0); /* a find for other memory may be reading */
        unmap(regions, region, bytes);
        return;
    }
}

void pst__regions_clear(pst__regions *regions) {
    for (uint32_t i = 0; i < PST__REGIONS; i++)
        if (regions->regions[i].bytes != 0)
            pst__regions_remove(regions, regions->regions[i].views[regions->link->rank]);
}

int pst__regions_find(const pst__regions *regions, const void *memory, size_t bytes,
                      pst__place *place) {
    const int rank = regions->link->rank;
    for (uint32_t i = 0; i < PST__REGIONS; i++) {
        const pst__region *region = &regions->regions[i];
        const size_t size = pst__load_acquire(&region->bytes); /* see add */
        if (size == 0) continue;
        const size_t offset =
            (size_t)((uintptr_t)memory - (uintptr_t)pst__load_relaxed(&region->views[rank]));
        if (offset >= size || bytes > size - offset) continue;
        *place = (pst__place){region, i, offset};
        return 1;
    }
    return 0;
}
