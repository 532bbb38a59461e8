#include "sched/cuda/compile.h"

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OLDEST_MAJOR = 12 };

/* ---- finding it ------------------------------------------------------------------------- */

/* For good: whenever it is loaded anew it takes memory that it does not give back. */
static int load(pst__nvrtc *nvrtc, int mode) {
    nvrtc->library = dlopen(nvrtc->path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE | mode);
    return nvrtc->library != NULL;
}

static int load_named(pst__nvrtc *nvrtc, const char *folder, int major, int mode) {
    const int length = snprintf(nvrtc->path, sizeof nvrtc->path, "%slibnvrtc.so.%d", folder, major);
    return length < (int)sizeof nvrtc->path && load(nvrtc, mode);
}

/* Where a package that has `library` keeps NVRTC, from the folder of that library. */
typedef struct neighbour {
    const char *library, *folder;
} neighbour;

static const neighbour neighbours[] = {
    {"libcudart.so", ""},
    {"libcudart.so", "../../cuda_nvrtc/lib/"},
    {"libtorch_cpu.so", "../../nvidia/cu%d/lib/"},
    {"libtorch_cpu.so", "../../nvidia/cuda_nvrtc/lib/"},
};

typedef struct search {
    pst__nvrtc *nvrtc;
    int major;
} search;

static int load_beside(const search *search, const char *library, const neighbour *neighbour) {
    const char *slash = strrchr(library, '/');
    if (slash == NULL || strncmp(slash + 1, neighbour->library, strlen(neighbour->library)) != 0)
        return 0;
    char folder[PST__NVRTC_PATH_BYTES];
    int length = snprintf(folder, sizeof folder, "%.*s", (int)(slash + 1 - library), library);
    if (length >= (int)sizeof folder) return 0;
    /* The only %d is the table's own. */
    length +=
        snprintf(folder + length, sizeof folder - (size_t)length, neighbour->folder, search->major);
    return length < (int)sizeof folder && load_named(search->nvrtc, folder, search->major, 0);
}

static int look_beside(struct dl_phdr_info *loaded, size_t size, void *argument) {
    (void)size;
    for (size_t i = 0; i < sizeof neighbours / sizeof neighbours[0]; i++)
        if (load_beside(argument, loaded->dlpi_name, &neighbours[i])) return 1;
    return 0;
}

static int load_from_toolkit(pst__nvrtc *nvrtc, int major) {
    const char *const roots[] = {getenv("CUDA_HOME"), getenv("CUDA_PATH"), "/usr/local/cuda"};
    for (size_t i = 0; i < sizeof roots / sizeof roots[0]; i++) {
        char folder[PST__NVRTC_PATH_BYTES];
        if (roots[i] == NULL) continue;
        const int length = snprintf(folder, sizeof folder, "%s/lib64/", roots[i]);
        if (length < (int)sizeof folder && load_named(nvrtc, folder, major, 0)) return 1;
    }
    return 0;
}

/* Each place for all versions, before the next place. */
static int find(pst__nvrtc *nvrtc, int newest_major) {
    for (int major = newest_major; major >= OLDEST_MAJOR; major--)
        if (load_named(nvrtc, "", major, RTLD_NOLOAD)) return 1;
    for (int major = newest_major; major >= OLDEST_MAJOR; major--) {
        search search = {nvrtc, major};
        if (dl_iterate_phdr(look_beside, &search)) return 1;
    }
    for (int major = newest_major; major >= OLDEST_MAJOR; major--)
        if (load_named(nvrtc, "", major, 0)) return 1;
    for (int major = newest_major; major >= OLDEST_MAJOR; major--)
        if (load_from_toolkit(nvrtc, major)) return 1;
    return 0;
}

static pst_status find_entries(pst__nvrtc *nvrtc, pst__error *error) {
    static const char missing[] = "NVRTC: %s has no nvrtc%s; install one of CUDA 12 or later";
    void *symbol;
#define FIND(name, parameters)                                                                     \
    symbol = dlsym(nvrtc->library, "nvrtc" #name);                                                 \
    if (symbol == NULL) return pst__fail(error, PST_EUNSUPPORTED, missing, nvrtc->path, #name);    \
    memcpy(&nvrtc->name, &symbol, sizeof symbol);
    PST__NVRTC_MAP(FIND)
    FIND(GetErrorString, )
#undef FIND
    const int result = nvrtc->Version(&nvrtc->major, &nvrtc->minor);
    return result == 0 ? PST_OK
                       : pst__fail(error, PST_EUNSUPPORTED, "NVRTC: nvrtcVersion of %s: %s",
                                   nvrtc->path, nvrtc->GetErrorString(result));
}

pst_status pst__nvrtc_open(pst__nvrtc *nvrtc, const char *path, int newest_major,
                           pst__error *error) {
    memset(nvrtc, 0, sizeof *nvrtc);
    if (path != NULL) {
        (void)snprintf(nvrtc->path, sizeof nvrtc->path, "%s", path);
        if (!load(nvrtc, 0))
            return pst__fail(error, PST_EUNSUPPORTED, "NVRTC: %s cannot be loaded: %s", path,
                             dlerror());
    } else if (!find(nvrtc, newest_major)) {
        return pst__fail(
            error, PST_EUNSUPPORTED,
            "NVRTC: no libnvrtc.so.%d to .%d, which compiles the kernels; install CUDA's "
            "(nvidia-cuda-nvrtc of PyPI has it) or name its path",
            newest_major, OLDEST_MAJOR);
    }
    pst_status status = find_entries(nvrtc, error);
    if (status != PST_OK) pst__nvrtc_close(nvrtc);
    return status;
}

void pst__nvrtc_close(pst__nvrtc *nvrtc) {
    if (nvrtc->library != NULL) (void)dlclose(nvrtc->library);
    nvrtc->library = NULL;
}

/* ---- compiling -------------------------------------------------------------------------- */

static pst_status fail(const pst__nvrtc *nvrtc, int result, const char *call, const char *messages,
                       pst__error *error) {
    return pst__fail(error, PST_EDEVICE, "NVRTC: nvrtc%s of %s (%d.%d): %s%s%s", call, nvrtc->path,
                     nvrtc->major, nvrtc->minor, nvrtc->GetErrorString(result),
                     messages[0] != '\0' ? ": " : "", messages);
}

static pst_status fail_with_log(const pst__nvrtc *nvrtc, const pst__heap *heap,
                                pst__nvrtc_program *program, int result, pst__error *error) {
    size_t bytes = 0;
    char *log = NULL;
    if (nvrtc->GetProgramLogSize(program, &bytes) == 0) log = pst__heap_alloc(heap, bytes + 1);
    const int has_log = log != NULL && nvrtc->GetProgramLog(program, log) == 0;
    pst_status status = fail(nvrtc, result, "CompileProgram", has_log ? log : "", error);
    pst__heap_free(heap, log, bytes + 1);
    return status;
}

static pst_status take_image(const pst__nvrtc *nvrtc, const pst__heap *heap,
                             pst__nvrtc_program *program, pst__cuda_image *image,
                             pst__error *error) {
    int result = nvrtc->GetCUBINSize(program, &image->bytes);
    if (result != 0 || image->bytes == 0) return fail(nvrtc, result, "GetCUBINSize", "", error);
    image->data = pst__heap_alloc(heap, image->bytes);
    if (image->data == NULL)
        return pst__fail(error, PST_ENOMEM, "NVRTC: no memory for %zu bytes", image->bytes);
    result = nvrtc->GetCUBIN(program, image->data);
    if (result == 0) return PST_OK;
    pst__heap_free(heap, image->data, image->bytes);
    image->data = NULL;
    return fail(nvrtc, result, "GetCUBIN", "", error);
}

pst_status pst__nvrtc_compile(const pst__nvrtc *nvrtc, const pst__heap *heap, const char *source,
                              const char *const *options, int option_count, pst__cuda_image *image,
                              pst__error *error) {
    pst__nvrtc_program *program = NULL;
    image->data = NULL;
    int result = nvrtc->CreateProgram(&program, source, "kernels.cu", 0, NULL, NULL);
    if (result != 0) return fail(nvrtc, result, "CreateProgram", "", error);
    result = nvrtc->CompileProgram(program, option_count, options);
    pst_status status = result == 0 ? take_image(nvrtc, heap, program, image, error)
                                    : fail_with_log(nvrtc, heap, program, result, error);
    (void)nvrtc->DestroyProgram(&program);
    return status;
}
