/* Registered memory: what each rank has exported and the others have mapped. */
#ifndef PST_OPS_COMM_CE_MEMORY_H
#define PST_OPS_COMM_CE_MEMORY_H

#include "ops/comm/ce/link.h"

typedef struct pst__region {
    size_t bytes;                  /* 0: free */
    char *views[PST_CE_MAX_RANKS]; /* by rank, as this device sees them; the own one too */
} pst__region;

/* Two are the communicator's own. */
#define PST__REGIONS (PST_CE_MAX_REGIONS + 2)

typedef struct pst__regions {
    pst_device *device;
    const pst__link *link;
    pst__region regions[PST__REGIONS];
} pst__regions;

/* A place in registered memory. */
typedef struct pst__place {
    const pst__region *region;
    uint32_t index; /* of the region */
    size_t offset;
} pst__place;

/* See pst_ce_register. `text` gets why it failed. */
pst_status pst__regions_add(pst__regions *regions, void *memory, size_t bytes, char *text,
                            size_t size);
void pst__regions_remove(pst__regions *regions, const void *memory);
void pst__regions_clear(pst__regions *regions);

/* 1 when all `bytes` at `memory` lie in one registration. Any thread, also while another is being
 * added. */
int pst__regions_find(const pst__regions *regions, const void *memory, size_t bytes,
                      pst__place *place);

#endif
