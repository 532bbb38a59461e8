/* Groups that are looked up: of a large table, an embedding's, a use reads few rows, and few of its
 * gradient are not zero. Each rank has named its own. A gather brings these alone, from where their
 * owners have them, and a push writes these alone; how many they are no other rank needs to know.
 *
 * What was gathered for one use is of no worth to another one, which names other rows. So it goes
 * stale at once, and each use has a gather of its own, on all ranks; none goes out ahead of its
 * use, as nobody has named its rows by then. */
#include "ops/zero/engine.h"

int pst__lookup_serves(const pst_zero *engine) {
    const pst__carrier *carrier = &engine->carrier;
    const pst_zero_options *options = &engine->options;
    return carrier->asynchronous && carrier->device->ops->copy_rows != NULL && carrier->world > 1 &&
           options->gather_comm->ops->rows && options->reduce_comm->ops->rows &&
           !options->shards_on_host;
}

static pst_table_rows table_of(const pst__group *group, size_t element_bytes) {
    const pst__member *table = &group->layout.members[0];
    return (pst_table_rows){.rows = table->rows, .row_bytes = table->row_elements * element_bytes};
}

pst_status pst_zero_name_rows(pst_zero *engine, uint32_t index, const int64_t *indices,
                              size_t count) {
    pst_status status = pst__zero_check(engine, index);
    if (status != PST_OK) return status;
    pst__group *group = &engine->groups[index];
    if (!group->may_be_looked_up)
        return pst__zero_fail(engine, PST_EINVAL, "group '%s' is not one that is looked up",
                              group->name);
    if (!group->is_looked_up || indices == NULL) return PST_OK;
    group->named.indices = indices;
    group->named.count = count;
    return pst__carrier_record(&engine->carrier, group->named_at);
}

void pst__lookup_note_use(pst_zero *engine, uint32_t index) {
    pst__group *group = &engine->groups[index];
    if (!group->is_looked_up) return;
    if (engine->pass.kind == PST__FORWARD && engine->pass.grad && group->lookups++ == 0)
        group->named_first = group->named;
    group->named.indices = NULL;
}

void pst__lookup_forget(pst_zero *engine) {
    for (size_t i = 0; i < engine->group_count; i++)
        engine->groups[i].lookups = 0;
}

void pst__lookup_gather(const pst__group *group, pst__operation *operation) {
    if (!group->is_looked_up) return;
    operation->rows = table_of(group, group->layout.gather_element_bytes);
    operation->rows.indices = group->named.indices;
    operation->rows.count = group->named.count;
    operation->work.collective.rows = &operation->rows;
}

void pst__lookup_push(const pst__group *group, pst__operation *operation, size_t first,
                      int is_made) {
    const size_t element = group->layout.reduce_element_bytes;
    if (!group->is_looked_up) return;
    operation->rows = table_of(group, element);
    operation->rows.offset = first * element;
    if (group->lookups == 1 && !is_made) {
        operation->rows.indices = group->named_first.indices;
        operation->rows.count = group->named_first.count;
    }
    operation->work.collective.rows = &operation->rows;
}

size_t pst__lookup_bytes(const pst__group *group) {
    const size_t whole = group->layout.gathered_bytes;
    const pst_table_rows table = table_of(group, group->layout.gather_element_bytes);
    const int is_less = group->named.indices != NULL && group->named.count < table.rows;
    return is_less ? group->named.count * table.row_bytes : whole;
}

int pst__lookup_is_over(const pst__group *group) {
    return group->is_looked_up && !pst__gathered_is_current(&group->gathered);
}
