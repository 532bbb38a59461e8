/* NVRTC, CUDA's compiler as a library, found at run time. */
#ifndef PST_SCHED_DEVICE_CUDA_NVRTC_H
#define PST_SCHED_DEVICE_CUDA_NVRTC_H

#include "base/error.h"
#include "base/heap.h"

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

#endif
