/* Compiled kernels on disk. A file is found by the key that says all of what it was made from, and
 * believed if its checksum is right and nobody but this user could have written it. Writers make a
 * file of their own and rename it, so that any number of processes may write and read one key at
 * once. */
#ifndef PST_SCHED_DEVICE_CUDA_CACHE_H
#define PST_SCHED_DEVICE_CUDA_CACHE_H

#include "sched/device/cuda_nvrtc.h"

typedef struct pst__cuda_cache {
    char path[1024]; /* "": there is no cache */
    uint64_t key;
} pst__cuda_cache;

/* Where the image of `key` (any text) lies in `folder` (NULL: penstock in $XDG_CACHE_HOME, or in
 * $HOME/.cache; "": no cache). Touches no file. */
void pst__cuda_cache_find(pst__cuda_cache *cache, const char *folder, const char *key);

/* PST_OK with the image on `heap`; PST_EIO where there is none that can be believed; PST_ENOMEM. */
pst_status pst__cuda_cache_read(const pst__cuda_cache *cache, const pst__heap *heap,
                                pst__cuda_image *image);

/* Writes the image, and creates its folder if need be. PST_EIO if that cannot be; then what was
 * there stays. */
pst_status pst__cuda_cache_write(const pst__cuda_cache *cache, const pst__cuda_image *image);

#endif
