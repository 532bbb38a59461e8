/* The kernels of sched/cuda/kernels.cu on the host, thread after thread. */
#ifndef PST_TESTS_CUDA_KERNELS_EMULATE_H
#define PST_TESTS_CUDA_KERNELS_EMULATE_H

#ifdef __cplusplus
extern "C" {
#endif

/* Runs `blocks` blocks of `threads` of the kernel of that name; 0, or -1 if there is none. */
int emulate(const char *kernel, unsigned blocks, unsigned threads, const void *arguments);
int emulate_has(const char *kernel);

#ifdef __cplusplus
}
#endif
#endif
