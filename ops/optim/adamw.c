#include "sched/device/device.h"
#include "sched/device/host.h"
#include "sched/runtime.h"

#include <penstock/optim.h>

/* NULL is the host's, and what a device's slots return is told in its own words. */
static pst_device *device_of(pst_runtime *runtime, pst_device *given) {
    return given != NULL ? given : pst_runtime_host(runtime);
}

static pst_status told(pst_runtime *runtime, pst_device *device, pst_status status) {
    if (status == PST_OK) return PST_OK;
    return pst__runtime_fail(runtime, status, "adamw on %s: %s", device->ops->name,
                             pst__device_text(device));
}

static pst_status lacks(pst_runtime *runtime, const pst_device *device) {
    return pst__runtime_fail(runtime, PST_EUNSUPPORTED,
                             "adamw: device %s has no kernel for it (its slots adamw_prepare and "
                             "adamw are NULL)",
                             device->ops->name);
}

/* ---- coefficients ----------------------------------------------------------------------- */

/* False for NaN, too. */
static int is_beta(double value) {
    return value >= 0.0 && value < 1.0;
}

static pst_status check_settings(pst_runtime *runtime, const pst_adamw_settings *of) {
    if (of == NULL) return pst__runtime_fail(runtime, PST_EINVAL, "adamw: settings are NULL");
    if (!is_beta(of->beta1) || !is_beta(of->beta2))
        return pst__runtime_fail(runtime, PST_EINVAL,
                                 "adamw: betas are %g and %g: give 0 <= beta < 1", of->beta1,
                                 of->beta2);
    if (!(of->eps >= 0.0) || !(of->weight_decay >= 0.0) || !(of->lr_at != NULL || of->lr >= 0.0))
        return pst__runtime_fail(
            runtime, PST_EINVAL,
            "adamw: lr is %g, eps %g, weight_decay %g: none of them may be negative", of->lr,
            of->eps, of->weight_decay);
    return PST_OK;
}

pst_status pst_adamw_prepare(pst_runtime *runtime, pst_device *given, pst_stream *stream,
                             const pst_adamw_settings *settings, float *const *steps, size_t count,
                             void *coefficients) {
    if (runtime == NULL) return PST_EINVAL;
    pst_device *device = device_of(runtime, given);
    pst_status status = check_settings(runtime, settings);
    if (status != PST_OK || count == 0) return status;
    if (device->ops->adamw_prepare == NULL) return lacks(runtime, device);
    if (steps == NULL || coefficients == NULL || (uintptr_t)coefficients % 16 != 0)
        return pst__runtime_fail(
            runtime, PST_EINVAL,
            "adamw: %zu steps at %p, coefficients at %p: give both, the second aligned to 16",
            count, (const void *)steps, coefficients);
    for (size_t i = 0; i < count; i++)
        if (steps[i] == NULL)
            return pst__runtime_fail(runtime, PST_EINVAL, "adamw: step %zu of %zu is NULL", i,
                                     count);
    return told(runtime, device,
                device->ops->adamw_prepare(device, stream, settings, steps, count, coefficients));
}

/* ---- pieces ----------------------------------------------------------------------------- */

static int is_misaligned(const void *memory, pst_dtype dtype) {
    return memory != NULL && (uintptr_t)memory % pst_dtype_size(dtype) != 0;
}

static int has_gradient(const pst_adamw_piece *piece) {
    if (piece->source_count == 0) return piece->gradient != NULL;
    for (size_t i = 0; i < piece->source_count; i++)
        if (piece->sources == NULL || piece->sources[i] == NULL) return 0;
    return 1;
}

static int has_misaligned_source(const pst_adamw_piece *piece) {
    for (size_t i = 0; i < piece->source_count; i++)
        if (is_misaligned(piece->sources[i], piece->source_dtype)) return 1;
    return 0;
}

static pst_status check_dtypes(pst_runtime *runtime, const pst_adamw_piece *piece, size_t index) {
    const pst_status status = pst__adamw_check(piece);
    if (status == PST_OK) return PST_OK;
    return pst__runtime_fail(
        runtime, status,
        "adamw: piece %zu has parameter %s, gradient %s (%zu sources of %s), moments %s%s, copy "
        "%s: "
        "give float32, bfloat16 or float16%s, and up to %u sources",
        index, pst_dtype_name(piece->parameter_dtype), pst_dtype_name(piece->gradient_dtype),
        piece->source_count, pst_dtype_name(piece->source_dtype),
        pst_dtype_name(piece->moment_dtype), piece->rounds_randomly ? ", rounded randomly" : "",
        piece->copy != NULL ? pst_dtype_name(piece->copy_dtype) : "none",
        piece->rounds_randomly ? ", and round only bfloat16 randomly" : "", PST_ADAMW_MOST_SOURCES);
}

static pst_status check_piece(pst_runtime *runtime, const pst_adamw_piece *piece, size_t index) {
    const pst_status status = check_dtypes(runtime, piece, index);
    if (status != PST_OK || piece->count == 0) return status;
    if (piece->parameter == NULL || !has_gradient(piece) || piece->exp_avg == NULL ||
        piece->exp_avg_sq == NULL || piece->coefficients == NULL)
        return pst__runtime_fail(runtime, PST_EINVAL,
                                 "adamw: piece %zu of %zu elements lacks parameter, gradient or a "
                                 "source of it, a moment or coefficients: only max_exp_avg_sq and "
                                 "copy may be NULL",
                                 index, piece->count);
    if (is_misaligned(piece->parameter, piece->parameter_dtype) ||
        is_misaligned(piece->gradient, piece->gradient_dtype) ||
        is_misaligned(piece->exp_avg, piece->moment_dtype) ||
        is_misaligned(piece->exp_avg_sq, piece->moment_dtype) ||
        is_misaligned(piece->max_exp_avg_sq, piece->moment_dtype) ||
        (piece->copy != NULL && is_misaligned(piece->copy, piece->copy_dtype)) ||
        has_misaligned_source(piece) || (uintptr_t)piece->coefficients % 16 != 0)
        return pst__runtime_fail(
            runtime, PST_EINVAL,
            "adamw: piece %zu at %p: an address is not aligned to its elements "
            "(coefficients: to 16)",
            index, piece->parameter);
    return PST_OK;
}

pst_status pst_adamw(pst_runtime *runtime, pst_device *given, pst_stream *stream,
                     const pst_adamw_piece *pieces, size_t count) {
    if (runtime == NULL || (pieces == NULL && count > 0)) return PST_EINVAL;
    pst_device *device = device_of(runtime, given);
    if (device->ops->adamw == NULL) return lacks(runtime, device);
    for (size_t i = 0; i < count; i++) {
        const pst_status status = check_piece(runtime, &pieces[i], i);
        if (status != PST_OK) return status;
    }
    if (count == 0) return PST_OK;
    return told(runtime, device, device->ops->adamw(device, stream, pieces, count));
}
