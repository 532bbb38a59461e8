/* penstock/optim.h - optimizers on a device: a step of AdamW over any number of pieces in one pass.
 *
 * A step is two calls in stream order: pst_adamw_prepare counts it and makes coefficients of
 * learning rate, betas and the number of the step; pst_adamw updates pieces by them, reading
 * gradient, parameter and moments once and writing parameter, moments and, where there is one, the
 * parameter's copy of fewer bits. Pieces of several settings go in one call; the pieces of a step
 * may also go in several, in any order.
 *
 * Learning rate, gradient scale, gradient factor (of clipping) and the flag that skips a step may
 * lie in the device's memory: nothing then waits for their values, and both calls can be captured
 * as a part of a CUDA graph.
 *
 * The formula and the order of operations are those of torch.optim.AdamW, in fp32:
 *     g = gradient * factor / scale       p = p * (1 - lr * weight_decay)
 *     m = lerp(m, g, 1 - beta1)           v = beta2 * v + (1 - beta2) * g * g
 *     p = p - lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
 * The devices `host` and `cuda` give the same bits, but for the last ones of parameters whose
 * moments have 16 bits.
 */
#ifndef PENSTOCK_OPTIM_H
#define PENSTOCK_OPTIM_H

#include <penstock/device.h>
#include <penstock/runtime.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Adds 1 to each of `count` steps and writes their coefficients, `count` times
 * PST_ADAMW_COEFFICIENTS_BYTES at `coefficients`, in the order of `steps`. device: NULL is the
 * runtime's host device; stream: of that device, NULL on the host. `steps` and `settings` are read
 * before it returns; what they point to lies in the device's memory until the stream has come so
 * far. Any thread; on the host it has happened on return, elsewhere it is enqueued. PST_EINVAL for
 * what is missing or out of range, PST_EUNSUPPORTED for a device that has no AdamW, and what the
 * device returns; the runtime's error text says which. Nothing is enqueued then. */
PST_API pst_status pst_adamw_prepare(pst_runtime *runtime, pst_device *device, pst_stream *stream,
                                     const pst_adamw_settings *settings, float *const *steps,
                                     size_t count, void *coefficients);

/* Updates `count` pieces, as pst_adamw_prepare about device, stream and threads; on the host
 * several threads may update different pieces by the same coefficients. PST_EINVAL for a piece
 * without an address or with one that is not aligned to its elements, PST_EUNSUPPORTED for dtypes
 * other than fp32, bfloat16 and float16, for random rounding of other moments than bfloat16 and for
 * a device that has no AdamW, and what the device returns. */
PST_API pst_status pst_adamw(pst_runtime *runtime, pst_device *device, pst_stream *stream,
                             const pst_adamw_piece *pieces, size_t count);

#ifdef __cplusplus
}
#endif
#endif
