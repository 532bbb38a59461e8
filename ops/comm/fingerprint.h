/* What a collective is, as far as it has to be the same on all ranks: for comparing, and for naming
 * those that differ. */
#ifndef PST_OPS_COMM_FINGERPRINT_H
#define PST_OPS_COMM_FINGERPRINT_H

#include <penstock/comm.h>

#define PST__FINGERPRINT_NAME 32

typedef struct pst__fingerprint {
    uint32_t hash; /* of all that has to be the same */
    uint16_t kind, dtype;
    uint64_t bytes;
    uint64_t name[PST__FINGERPRINT_NAME / sizeof(uint64_t)]; /* cut and ended by NUL */
} pst__fingerprint;

/* `region`, `offset`: where peers read its source, if they do. */
pst__fingerprint pst__fingerprint_of(const pst_collective *collective, uint32_t region,
                                     size_t offset);

/* "rank 2: all_gather 'block 3' of 100 bytes of float32". */
void pst__fingerprint_describe(const pst__fingerprint *fingerprint, int rank, char *text,
                               size_t size);

#endif
