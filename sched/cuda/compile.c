#include "sched/cuda/compile.h"

#include <stdio.h>
#include <string.h>

enum { OPTION_COUNT = 4, OPTION_BYTES = 48 };

/* No contraction to fused multiply-adds: results are the host's, bit for bit. */
static int write_options(const pst__nvrtc *nvrtc, const pst__cuda_compile_options *options,
                         char text[OPTION_COUNT][OPTION_BYTES]) {
    const int large_parameters = options->major >= 7 && options->newest_cuda >= 12010 &&
                                 nvrtc->major * 1000 + nvrtc->minor * 10 >= 12010;
    (void)snprintf(text[0], OPTION_BYTES, "--gpu-architecture=sm_%d%d", options->major,
                   options->minor);
    (void)snprintf(text[1], OPTION_BYTES, "--fmad=false");
    (void)snprintf(text[2], OPTION_BYTES, "--std=c++17");
    (void)snprintf(text[3], OPTION_BYTES, "-DPST_CUDA_LARGE_PARAMETERS");
    return large_parameters ? 4 : 3;
}

/* All that the machine code is made from. */
static pst_status find_in_cache(const pst__nvrtc *nvrtc, const pst__heap *heap, const char *folder,
                                const char *const *options, int option_count,
                                pst__cuda_cache *cache) {
    const size_t bytes =
        strlen(pst__cuda_kernels_source) + sizeof(char[OPTION_COUNT][OPTION_BYTES + 1]) + 64;
    char *key = pst__heap_alloc(heap, bytes);
    if (key == NULL) return PST_ENOMEM;
    int length = snprintf(key, bytes, "NVRTC %d.%d", nvrtc->major, nvrtc->minor);
    for (int i = 0; i < option_count; i++)
        length += snprintf(key + length, bytes - (size_t)length, " %s", options[i]);
    (void)snprintf(key + length, bytes - (size_t)length, "\n%s", pst__cuda_kernels_source);
    pst__cuda_cache_find(cache, folder, key);
    pst__heap_free(heap, key, bytes);
    return PST_OK;
}

static pst_status compile(const pst__nvrtc *nvrtc, const pst__heap *heap,
                          const pst__cuda_compile_options *options, pst__cuda_image *image,
                          int *cached, pst__error *error) {
    char text[OPTION_COUNT][OPTION_BYTES];
    const char *list[OPTION_COUNT] = {text[0], text[1], text[2], text[3]};
    const int count = write_options(nvrtc, options, text);
    pst__cuda_cache cache;
    pst_status status = find_in_cache(nvrtc, heap, options->cache, list, count, &cache);
    if (status != PST_OK) return pst__fail(error, status, "NVRTC: no memory for the cache's key");
    *cached = pst__cuda_cache_read(&cache, heap, image) == PST_OK;
    if (*cached) return PST_OK;
    status = pst__nvrtc_compile(nvrtc, heap, pst__cuda_kernels_source, list, count, image, error);
    if (status == PST_OK)
        (void)pst__cuda_cache_write(&cache, image); /* else the next one compiles */
    return status;
}

pst_status pst__cuda_compile(const pst__heap *heap, const pst__cuda_compile_options *options,
                             pst__cuda_image *image, int *cached, pst__error *error) {
    pst__nvrtc nvrtc;
    int from_cache = 0;
    image->data = NULL;
    pst_status status = pst__nvrtc_open(&nvrtc, options->nvrtc, options->newest_cuda / 1000, error);
    if (status != PST_OK) return status;
    status = compile(&nvrtc, heap, options, image, &from_cache, error);
    pst__nvrtc_close(&nvrtc);
    if (cached != NULL) *cached = from_cache;
    return status;
}
