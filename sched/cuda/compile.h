/* The kernels as machine code for one architecture: from the cache on disk, or from NVRTC, CUDA's
 * compiler as a library, found at run time. */
#ifndef PST_SCHED_CUDA_COMPILE_H
#define PST_SCHED_CUDA_COMPILE_H

#include "base/error.h"
#include "base/heap.h"

/* ---- NVRTC (nvrtc.c) -------------------------------------------------------------------- */

#define PST__NVRTC_PATH_BYTES 1024

typedef struct pst__nvrtc_program pst__nvrtc_program; /* NVRTC's own */

/* One line an entry point: name, parameters. All return 0 or an error that GetErrorString names. */
#define PST__NVRTC_MAP(ENTRY)                                                                      \
    ENTRY(Version, (int *major, int *minor))                                                       \
    ENTRY(CreateProgram,                                                                           \
          (pst__nvrtc_program * *program, const char *source, const char *name, int header_count,  \
           const char *const *headers, const char *const *include_names))                          \
    ENTRY(CompileProgram,                                                                          \
          (pst__nvrtc_program * program, int option_count, const char *const *options))            \
    ENTRY(GetProgramLogSize, (pst__nvrtc_program * program, size_t * bytes))                       \
    ENTRY(GetProgramLog, (pst__nvrtc_program * program, char *log))                                \
    ENTRY(GetCUBINSize, (pst__nvrtc_program * program, size_t * bytes))                            \
    ENTRY(GetCUBIN, (pst__nvrtc_program * program, char *image))                                   \
    ENTRY(DestroyProgram, (pst__nvrtc_program * *program))

typedef struct pst__nvrtc {
    void *library;
    char path[PST__NVRTC_PATH_BYTES]; /* for texts */
    int major, minor;                 /* its version */
    const char *(*GetErrorString)(int result);
#define PST__NVRTC_ENTRY(name, parameters) int(*name) parameters;
    PST__NVRTC_MAP(PST__NVRTC_ENTRY)
#undef PST__NVRTC_ENTRY
} pst__nvrtc;

/* Machine code, on the heap that it was asked with. */
typedef struct pst__cuda_image {
    void *data;
    size_t bytes;
} pst__cuda_image;

/* Loads `path`. If that is NULL: a version up to `newest_major`, 12 or later, the newest first,
 * that this process has loaded already; that lies where torch's or CUDA's own libraries have been
 * loaded from; that the loader finds; of the toolkit in $CUDA_HOME, $CUDA_PATH or /usr/local/cuda.
 * PST_EUNSUPPORTED with a text that says what is missing; then there is nothing to close. */
pst_status pst__nvrtc_open(pst__nvrtc *nvrtc, const char *path, int newest_major,
                           pst__error *error);
void pst__nvrtc_close(pst__nvrtc *nvrtc);

/* Compiles `source` to a CUBIN; the architecture is one of the options. PST_EDEVICE with NVRTC's
 * own messages as text, PST_ENOMEM. */
pst_status pst__nvrtc_compile(const pst__nvrtc *nvrtc, const pst__heap *heap, const char *source,
                              const char *const *options, int option_count, pst__cuda_image *image,
                              pst__error *error);

/* ---- the cache (cache.c) ------------------------------------------------------------------
 *
 * A file is found by the key that says all of what it was made from, and believed if its checksum
 * is right and nobody but this user could have written it. Writers make a file of their own and
 * rename it, so that any number of processes may write and read one key at once. */

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

/* ---- both (compile.c) ------------------------------------------------------------------- */

/* arguments.h and kernels.cu, as text. */
extern const char pst__cuda_kernels_source[];

typedef struct pst__cuda_compile_options {
    const char *nvrtc; /* path; NULL: see pst__nvrtc_open */
    const char *cache; /* folder; NULL and "": see pst__cuda_cache_find */
    int major, minor;  /* compute capability */
    int newest_cuda;   /* the driver's version as it tells it (12080), which limits NVRTC's */
} pst__cuda_compile_options;

/* PST_OK with the image, which the caller gives back to `heap`; *cached (may be NULL) says where it
 * came from. A cache that cannot be written is no error. May take seconds. PST_EUNSUPPORTED without
 * NVRTC, PST_EDEVICE if it refuses, PST_ENOMEM; `error` says why. */
pst_status pst__cuda_compile(const pst__heap *heap, const pst__cuda_compile_options *options,
                             pst__cuda_image *image, int *cached, pst__error *error);

#endif
