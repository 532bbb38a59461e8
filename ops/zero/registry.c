/* Parameters and groups, which are added before the engine is sealed. */
#include "ops/zero/engine.h"

#include "base/options.h"
#include "sched/runtime.h"

#include <stdio.h>
#include <string.h>

static pst_status check_open(pst_zero *engine, const char *what) {
    if (engine->sealed)
        return pst__zero_fail(engine, PST_ESTATE, "%s cannot be added to a sealed engine", what);
    return PST_OK;
}

static pst_status no_memory(pst_zero *engine, const char *what, const char *name) {
    return pst__zero_fail(engine, PST_ENOMEM, "%s '%s': no memory", what, name);
}

pst_status pst_zero_add_parameter(pst_zero *engine, const pst_parameter_options *given,
                                  uint32_t *parameter) {
    pst_parameter_options options;
    if (engine == NULL || parameter == NULL) return PST_EINVAL;
    if (!pst__read_options(&options, sizeof options, given) || options.name == NULL)
        return pst__zero_fail(engine, PST_EINVAL, "%s", "a parameter needs its size and a name");
    pst_status status = check_open(engine, "a parameter");
    if (status != PST_OK) return status;
    char *name = pst__heap_text(engine->carrier.heap, options.name);
    if (name == NULL || pst__heap_grow(engine->carrier.heap, (void **)&engine->parameters,
                                       &engine->parameter_capacity, engine->parameter_count + 1,
                                       sizeof *engine->parameters) != PST_OK) {
        pst__heap_free_text(engine->carrier.heap, name);
        return no_memory(engine, "parameter", options.name);
    }
    engine->parameters[engine->parameter_count] =
        (pst__parameter){.name = name,
                         .rows = options.rows,
                         .row_elements = options.row_elements,
                         .trainable = options.trainable != 0};
    *parameter = (uint32_t)engine->parameter_count++;
    return PST_OK;
}

/* ---- groups ---------------------------------------------------------------------------------- */

static void free_group(pst_zero *engine, pst__group *group) {
    const pst__heap *heap = engine->carrier.heap;
    pst__heap_free(heap, group->sources, group->layout.member_count * sizeof *group->sources);
    pst__layout_free(heap, &group->layout);
    pst__heap_free_text(heap, group->name);
    if (group->named_at != NULL)
        engine->carrier.device->ops->event_destroy(engine->carrier.device, group->named_at);
    if (group->uploaded != NULL)
        engine->carrier.device->ops->event_destroy(engine->carrier.device, group->uploaded);
    if (group->gathered.released != NULL)
        engine->carrier.device->ops->event_destroy(engine->carrier.device,
                                                   group->gathered.released);
}

static int is_member(const pst__group *group, uint32_t parameter) {
    for (size_t i = 0; i < group->layout.member_count; i++)
        if (group->layout.members[i].parameter == parameter) return 1;
    return 0;
}

/* One state for each (parameter, gather dtype): a second group of the same two has no meaning. */
static pst_status check_member(pst_zero *engine, const pst_group_options *options, size_t index) {
    uint32_t parameter = options->parameters[index];
    if (parameter >= engine->parameter_count)
        return pst__zero_fail(engine, PST_EINVAL, "group '%s': there is no parameter %u",
                              options->name, parameter);
    for (size_t i = 0; i < index; i++)
        if (options->parameters[i] == parameter)
            return pst__zero_fail(engine, PST_EINVAL, "group '%s': parameter '%s' is in it twice",
                                  options->name, engine->parameters[parameter].name);
    for (size_t i = 0; i < engine->group_count; i++)
        if (engine->groups[i].gather_dtype == options->gather_dtype &&
            is_member(&engine->groups[i], parameter))
            return pst__zero_fail(engine, PST_EINVAL,
                                  "group '%s': parameter '%s' is gathered as %s by group '%s'",
                                  options->name, engine->parameters[parameter].name,
                                  pst_dtype_name(options->gather_dtype), engine->groups[i].name);
    return PST_OK;
}

/* What the devices' kernels convert and sum; all else is only moved. */
static int is_computed(pst_dtype dtype) {
    return dtype == PST_FLOAT32 || dtype == PST_FLOAT64 || dtype == PST_FLOAT16 ||
           dtype == PST_BFLOAT16;
}

static int has_trainable(const pst_zero *engine, const pst_group_options *options) {
    for (size_t i = 0; i < options->parameter_count; i++)
        if (engine->parameters[options->parameters[i]].trainable) return 1;
    return 0;
}

static pst_status check_dtypes(pst_zero *engine, const pst_group_options *options) {
    int is_computable = is_computed(options->dtype);
    if (options->gather_dtype != options->dtype && !options->filled &&
        !(is_computable && is_computed(options->gather_dtype)))
        return pst__zero_fail(engine, PST_EUNSUPPORTED,
                              "group '%s': shards of %s cannot be converted to %s; gather them as "
                              "they are",
                              options->name, pst_dtype_name(options->dtype),
                              pst_dtype_name(options->gather_dtype));
    if (has_trainable(engine, options) && !(is_computable && is_computed(options->reduce_dtype)))
        return pst__zero_fail(engine, PST_EUNSUPPORTED,
                              "group '%s': gradients of %s shards cannot be summed in %s; freeze "
                              "the parameters, or train floats of 16 bits or more",
                              options->name, pst_dtype_name(options->dtype),
                              pst_dtype_name(options->reduce_dtype));
    return PST_OK;
}

static pst_status check_filled(pst_zero *engine, const pst_group_options *options) {
    if (!options->filled) return PST_OK;
    if (engine->options.fill_copy == NULL)
        return pst__zero_fail(engine, PST_EINVAL,
                              "group '%s' is to be filled: set options.fill_copy", options->name);
    if (engine->options.shards_on_host)
        return pst__zero_fail(engine, PST_EUNSUPPORTED,
                              "group '%s' is to be filled on the device, and its shard is on the "
                              "host",
                              options->name);
    return PST_OK;
}

static pst_status check_looked_up(pst_zero *engine, const pst_group_options *options) {
    if (!options->looked_up ||
        (options->parameter_count == 1 && options->forward_only && !options->filled))
        return PST_OK;
    return pst__zero_fail(engine, PST_EINVAL,
                          "group '%s' is looked up: it has one parameter, and is forward_only and "
                          "not filled",
                          options->name);
}

static pst_status check_group(pst_zero *engine, const pst_group_options *options) {
    if (options->parameters == NULL || options->parameter_count == 0)
        return pst__zero_fail(engine, PST_EINVAL, "group '%s' has no parameters", options->name);
    if (pst_dtype_size(options->dtype) == 0 || pst_dtype_size(options->gather_dtype) == 0 ||
        pst_dtype_size(options->reduce_dtype) == 0)
        return pst__zero_fail(engine, PST_EINVAL, "group '%s' has a dtype that is none",
                              options->name);
    for (size_t i = 0; i < options->parameter_count; i++) {
        pst_status status = check_member(engine, options, i);
        if (status != PST_OK) return status;
    }
    pst_status status = check_filled(engine, options);
    if (status == PST_OK) status = check_looked_up(engine, options);
    return status == PST_OK ? check_dtypes(engine, options) : status;
}

/* A trace may be written when the engine is gone. */
static const char *name_in_traces(pst_zero *engine, const char *what, const char *name) {
    const size_t bytes = strlen(what) + strlen(name) + sizeof " ";
    char *text = pst__heap_alloc(engine->carrier.heap, bytes);
    if (text == NULL) return NULL;
    (void)snprintf(text, bytes, "%s %s", what, name);
    const char *kept = pst__trace_intern(pst__runtime_trace(engine->carrier.runtime), text);
    pst__heap_free(engine->carrier.heap, text, bytes);
    return kept;
}

static pst_status name_group(pst_zero *engine, pst__group *group, const char *name) {
    group->wait_name = name_in_traces(engine, "wait", name);
    group->full_name = name_in_traces(engine, "memory full", name);
    group->name = pst__heap_text(engine->carrier.heap, name);
    return group->wait_name == NULL || group->full_name == NULL || group->name == NULL ? PST_ENOMEM
                                                                                       : PST_OK;
}

static pst_status take_members(pst_zero *engine, pst__group *group,
                               const pst_group_options *options) {
    pst__layout *layout = &group->layout;
    size_t count = options->parameter_count;
    layout->member_count = count;
    layout->members = pst__heap_alloc(engine->carrier.heap, count * sizeof *layout->members);
    group->sources = pst__heap_alloc(engine->carrier.heap, count * sizeof *group->sources);
    if (layout->members == NULL || group->sources == NULL) return PST_ENOMEM;
    for (size_t i = 0; i < count; i++) {
        const pst__parameter *parameter = &engine->parameters[options->parameters[i]];
        layout->members[i] = (pst__member){.parameter = options->parameters[i],
                                           .trainable = parameter->trainable,
                                           .rows = parameter->rows,
                                           .row_elements = parameter->row_elements};
    }
    return PST_OK;
}

/* Stages 1 and 2 hold for good what they have gathered. Where peers read memory that was opened to
 * them, and the communicator allows it, shards that are gathered as they are lie within. */
static int lies_within(const pst_zero *engine, const pst__group *group) {
    const pst_zero_options *options = &engine->options;
    return options->stage < 3 && engine->carrier.world > 1 &&
           options->gather_comm->ops->open_memory != NULL &&
           options->gather_comm->ops->gathers_within && !options->shards_on_host &&
           group->gather_dtype == group->dtype && !group->is_filled_outside;
}

static pst_status build_group(pst_zero *engine, pst__group *group,
                              const pst_group_options *options) {
    *group =
        (pst__group){.dtype = options->dtype,
                     .gather_dtype = options->gather_dtype,
                     .reduce_dtype = options->reduce_dtype,
                     .used_dtype = options->filled ? options->used_dtype : options->gather_dtype,
                     .is_filled_outside = options->filled != 0,
                     .forward_only = options->forward_only != 0,
                     .may_be_looked_up = options->looked_up != 0,
                     .copy_is_old = 1};
    group->layout.element_bytes = pst_dtype_size(options->dtype);
    group->layout.gather_element_bytes = pst_dtype_size(options->gather_dtype);
    group->layout.reduce_element_bytes = pst_dtype_size(options->reduce_dtype);
    group->layout.is_within = lies_within(engine, group);
    pst_status status = name_group(engine, group, options->name);
    if (status == PST_OK) status = take_members(engine, group, options);
    if (status == PST_OK)
        status = pst__layout_build(engine->carrier.heap, &group->layout, engine->carrier.world,
                                   engine->carrier.rank);
    group->layout.moves |= pst__is_transient(engine, group);
    group->is_looked_up = options->looked_up && pst__lookup_serves(engine);
    if (status == PST_OK)
        status = engine->carrier.device->ops->event_create(engine->carrier.device, 0,
                                                           &group->gathered.released);
    if (status == PST_OK && engine->options.shards_on_host && !engine->options.transient_copies)
        status =
            engine->carrier.device->ops->event_create(engine->carrier.device, 0, &group->uploaded);
    if (status == PST_OK && group->is_looked_up)
        status =
            engine->carrier.device->ops->event_create(engine->carrier.device, 0, &group->named_at);
    return status;
}

pst_status pst_zero_add_group(pst_zero *engine, const pst_group_options *given, uint32_t *group) {
    pst_group_options options;
    if (engine == NULL || group == NULL) return PST_EINVAL;
    if (!pst__read_options(&options, sizeof options, given) || options.name == NULL)
        return pst__zero_fail(engine, PST_EINVAL, "%s", "a group needs its size and a name");
    pst_status status = check_open(engine, "a group");
    if (status == PST_OK) status = check_group(engine, &options);
    if (status != PST_OK) return status;
    status = pst__heap_grow(engine->carrier.heap, (void **)&engine->groups, &engine->group_capacity,
                            engine->group_count + 1, sizeof *engine->groups);
    if (status != PST_OK) return no_memory(engine, "group", options.name);
    pst__group *fresh = &engine->groups[engine->group_count];
    status = build_group(engine, fresh, &options);
    if (status != PST_OK) {
        free_group(engine, fresh);
        if (status == PST_ENOMEM) return no_memory(engine, "group", options.name);
        return pst__zero_fail(engine, status, "group '%s': its parameters are too large",
                              options.name);
    }
    *group = (uint32_t)engine->group_count++;
    return PST_OK;
}

/* ---- layouts --------------------------------------------------------------------------------- */

pst_status pst_zero_group_layout(const pst_zero *engine, uint32_t group, pst_group_layout *layout) {
    if (engine == NULL || layout == NULL || group >= engine->group_count) return PST_EINVAL;
    const pst__layout *found = &engine->groups[group].layout;
    layout->shard_bytes = found->shard_elements * found->element_bytes;
    layout->gathered_bytes = found->gathered_bytes;
    layout->gradient_bytes = found->gradient_elements * found->element_bytes;
    return PST_OK;
}

static const pst__member *find_member(const pst__layout *layout, uint32_t parameter) {
    for (size_t i = 0; i < layout->member_count; i++)
        if (layout->members[i].parameter == parameter) return &layout->members[i];
    return NULL;
}

pst_status pst_zero_parameter_layout(const pst_zero *engine, uint32_t group, uint32_t parameter,
                                     pst_parameter_layout *layout) {
    if (engine == NULL || layout == NULL || group >= engine->group_count) return PST_EINVAL;
    const pst__layout *whole = &engine->groups[group].layout;
    const pst__member *member = find_member(whole, parameter);
    if (member == NULL)
        return pst__fail(engine->carrier.error, PST_EINVAL, "group '%s' has no parameter %u",
                         engine->groups[group].name, parameter);
    pst__rows rows = pst__rows_of(member->rows, engine->carrier.world, engine->carrier.rank);
    layout->first_row = rows.first;
    layout->shard_rows = rows.count;
    layout->shard_offset = member->shard_element * whole->element_bytes;
    layout->gathered_offset = member->gathered_offset;
    layout->gradient_offset =
        member->trainable ? member->gradient_element * whole->element_bytes : SIZE_MAX;
    return PST_OK;
}

int pst_zero_has_gradient(const pst_zero *engine, uint32_t parameter) {
    return engine != NULL && parameter < engine->parameter_count &&
           engine->parameters[parameter].has_gradient;
}

int pst_zero_has_written(const pst_zero *engine, uint32_t group) {
    return engine != NULL && group < engine->group_count && engine->groups[group].is_written &&
           !engine->groups[group].is_updated;
}

void pst__registry_free(pst_zero *engine) {
    for (size_t i = 0; i < engine->group_count; i++)
        free_group(engine, &engine->groups[i]);
    pst__heap_free(engine->carrier.heap, engine->groups,
                   engine->group_capacity * sizeof *engine->groups);
    for (size_t i = 0; i < engine->parameter_count; i++)
        pst__heap_free_text(engine->carrier.heap, engine->parameters[i].name);
    pst__heap_free(engine->carrier.heap, engine->parameters,
                   engine->parameter_capacity * sizeof *engine->parameters);
}
