/* What a recorded pass would take with collectives of other cost: on other ranks, say. No engine.
 */
#include "ops/zero/plan.h"

#include "base/options.h"
#include "sched/runtime.h"

static pst_status forecast_of(const pst__plan_input *input, pst_zero_forecast *forecast) {
    pst__plan *plan = NULL;
    const pst_status status = pst__plan_create(input, &plan);
    if (status != PST_OK) return status;
    pst__write_sized(forecast, &plan->forecast, sizeof plan->forecast);
    pst__plan_destroy(input->heap, plan);
    return PST_OK;
}

static pst_status predict(pst_runtime *runtime, const pst_zero_predict_options *options,
                          pst__measured *measured, pst__need *need, pst_zero_forecast *forecast) {
    const pst__heap *heap = pst__runtime_heap(runtime);
    pst__costs costs;
    for (size_t i = 0; i < options->group_count; i++)
        need[i] = options->needed[i] ? PST__NEED_SOME : PST__NEED_NONE;
    pst__measure(options->operations, options->times, options->count, options->group_count,
                 measured);
    pst_status status =
        pst__costs_create(heap, measured, options->group_count, options->gather_bytes,
                          options->reduce_bytes, options->by_rows, 0, &costs);
    const pst__plan_input input = {.runtime = runtime,
                                   .heap = heap,
                                   .operations = options->operations,
                                   .count = options->count,
                                   .group_count = options->group_count,
                                   .bytes = options->gather_bytes,
                                   .reduce_bytes = options->reduce_bytes,
                                   .need = need,
                                   .is_looked_up = options->by_rows,
                                   .grad = options->grad != 0,
                                   .window = options->stage == 3,
                                   .ahead = options->prefetch_ahead,
                                   .budget = options->prefetch_bytes,
                                   .keep_bytes = options->keep_bytes,
                                   .costs = &costs};
    if (status == PST_OK) status = forecast_of(&input, forecast);
    pst__costs_free(heap, &costs);
    return status;
}

static int is_sound(const pst_zero_predict_options *options) {
    return options->operations != NULL && options->times != NULL && options->gather_bytes != NULL &&
           options->reduce_bytes != NULL && options->needed != NULL;
}

pst_status pst_zero_predict(pst_runtime *runtime, const pst_zero_predict_options *given,
                            pst_zero_forecast *forecast) {
    pst_zero_predict_options options;
    if (runtime == NULL || forecast == NULL ||
        !pst__read_options(&options, sizeof options, given) || !is_sound(&options))
        return PST_EINVAL;
    const pst__heap *heap = pst__runtime_heap(runtime);
    const size_t measured_bytes = options.group_count * sizeof(pst__measured);
    const size_t need_bytes = options.group_count * sizeof(pst__need);
    pst__measured *measured = pst__heap_alloc(heap, measured_bytes);
    pst__need *need = pst__heap_alloc(heap, need_bytes);
    const pst_status status = measured == NULL || need == NULL
                                  ? PST_ENOMEM
                                  : predict(runtime, &options, measured, need, forecast);
    pst__heap_free(heap, measured, measured_bytes);
    pst__heap_free(heap, need, need_bytes);
    return status;
}
