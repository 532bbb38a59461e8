/* Presence: what each rank had in a backward. At its end the ranks exchange, by one all-reduce of
 * maxima, who had which gradient, who needed which group, how often and where groups were reported.
 *
 * The host waits for the answer in a *careful* backward: on the host device always, and otherwise
 * as long as the last answer leaves a doubt that all ranks share: there is no plan, nothing was
 * agreed yet of a backward of this order, a parameter of it had no gradient anywhere, a group was
 * reported twice. What was agreed is kept by path, so that paths may take turns. Without a doubt a
 * backward counts as the last one: each parameter has a gradient, of zeros where no rank had one,
 * and a group that is reported twice is taken to be so on all ranks. The answer is then read
 * PST__PRESENCE_SLOTS backwards later, on all ranks in the same backward: it may raise a doubt, and
 * is an error if ranks took part in other reductions.
 */
#include "ops/zero/engine.h"

#include "base/atomic.h"
#include "base/hash.h"
#include "ops/transfer/replicas.h"
#include "sched/runtime.h"

#include <limits.h>
#include <string.h>

/* A parameter's word, and a group's word of need. */
enum { NOT_HERE = 0, ABSENT, PRESENT };

#define WORDS_A_GROUP 3u
#define HASH_WORDS    4u
#define LAST_WORDS    (HASH_WORDS + 1u) /* and the rank whose backward was broken off, from 1 */

static size_t bytes_of(const pst_zero *engine) {
    return engine->presence_words * sizeof(int32_t);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static pst_status agreement_alloc(const pst_zero *engine, pst__agreement *agreement) {
    agreement->groups =
        pst__heap_alloc(engine->carrier.heap, engine->group_count * sizeof *agreement->groups);
    agreement->has_gradient = pst__heap_alloc(engine->carrier.heap, engine->parameter_count);
    return agreement->groups == NULL || agreement->has_gradient == NULL ? PST_ENOMEM : PST_OK;
}

static void agreement_free(const pst_zero *engine, pst__agreement *agreement) {
    pst__heap_free(engine->carrier.heap, agreement->groups,
                   engine->group_count * sizeof *agreement->groups);
    pst__heap_free(engine->carrier.heap, agreement->has_gradient, engine->parameter_count);
    *agreement = (pst__agreement){0};
}

void pst__agreement_copy(const pst_zero *engine, pst__agreement *to, const pst__agreement *from) {
    to->order = from->order;
    to->turns = from->turns;
    memcpy(to->groups, from->groups, engine->group_count * sizeof *to->groups);
    memcpy(to->has_gradient, from->has_gradient, engine->parameter_count);
}

static pst_status alloc_agreements(pst_zero *engine) {
    pst_status status = agreement_alloc(engine, &engine->agreed_eagerly);
    for (size_t i = 0; status == PST_OK && i < PST__MOST_PATHS; i++)
        status = agreement_alloc(engine, &engine->history[1].paths[i].agreed);
    return status;
}

pst_status pst__presence_alloc(pst_zero *engine) {
    pst_device *device = engine->carrier.device;
    engine->presence_words =
        engine->parameter_count + WORDS_A_GROUP * engine->group_count + LAST_WORDS;
    for (size_t i = 0; i < PST__PRESENCE_SLOTS; i++) {
        void *memory = NULL;
        pst_status status =
            device->ops->alloc(device, PST_MEMORY_PINNED, bytes_of(engine), &memory);
        if (status != PST_OK) return status;
        engine->presence[i] = (pst__presence){.words = memory};
    }
    void *question = NULL;
    pst_status status =
        device->ops->alloc(device, PST_MEMORY_PINNED, sizeof *engine->question, &question);
    engine->question = question;
    return status == PST_OK ? alloc_agreements(engine) : status;
}

void pst__presence_free(pst_zero *engine) {
    if (engine->question != NULL)
        engine->carrier.device->ops->free(engine->carrier.device, PST_MEMORY_PINNED,
                                          engine->question, sizeof *engine->question);
    engine->question = NULL;
    agreement_free(engine, &engine->agreed_eagerly);
    for (size_t i = 0; i < PST__MOST_PATHS; i++)
        agreement_free(engine, &engine->history[1].paths[i].agreed);
    for (size_t i = 0; i < PST__PRESENCE_SLOTS; i++) {
        if (engine->presence[i].words != NULL)
            engine->carrier.device->ops->free(engine->carrier.device, PST_MEMORY_PINNED,
                                              engine->presence[i].words, bytes_of(engine));
        engine->presence[i].words = NULL;
    }
}

/* ---- doubt ----------------------------------------------------------------------------------- */

static int is_used(const pst_zero *engine, size_t group) {
    return engine->order.first_uses[group] != 0;
}

static int is_group_in_doubt(const pst_zero *engine, size_t group) {
    const pst__agreement *expected = engine->expected;
    const pst__layout *layout = &engine->groups[group].layout;
    for (size_t i = 0; i < layout->member_count; i++) {
        const pst__member *member = &layout->members[i];
        if (member->trainable && !expected->has_gradient[member->parameter]) return 1;
    }
    return 0;
}

static int is_in_doubt(const pst_zero *engine) {
    if (!engine->carrier.asynchronous || engine->expected == NULL) return 1;
    for (size_t i = 0; i < engine->group_count; i++) {
        if (engine->expected->groups[i].extra > 0) return 1;
        if (is_used(engine, i) && is_group_in_doubt(engine, i)) return 1;
    }
    return 0;
}

void pst__presence_begin(pst_zero *engine) {
    pst__path *path = engine->pass.backward_path;
    engine->backward_order = pst__backward_order(engine);
    engine->agreed = path == NULL ? &engine->agreed_eagerly : &path->agreed;
    engine->expected =
        path != NULL && path->agreed.order == engine->backward_order ? engine->agreed : NULL;
    engine->careful = is_in_doubt(engine);
}

/* ---- what this rank sends -------------------------------------------------------------------- */

/* By maxima alone all are seen to be equal if this and its complement are. */
static void write_hash(int32_t *words, uint64_t hash) {
    const uint32_t halves[2] = {(uint32_t)hash, (uint32_t)(hash >> 32)};
    for (size_t i = 0; i < 2; i++) {
        words[2 * i] = (int32_t)(halves[i] & INT32_MAX);
        words[2 * i + 1] = INT32_MAX - words[2 * i];
    }
}

static void write_parameters(const pst_zero *engine, int32_t *words) {
    for (size_t i = 0; i < engine->parameter_count; i++)
        words[i] = NOT_HERE;
    for (size_t g = 0; g < engine->group_count; g++) {
        const pst__layout *layout = &engine->groups[g].layout;
        for (size_t i = 0; is_used(engine, g) && i < layout->member_count; i++) {
            uint32_t index = layout->members[i].parameter;
            words[index] = ABSENT;
        }
    }
    for (size_t i = 0; i < engine->parameter_count; i++)
        if (engine->parameters[i].has_gradient_here) words[i] = PRESENT;
}

static void write_words(pst_zero *engine, int32_t *words, uint64_t hash) {
    write_parameters(engine, words);
    words += engine->parameter_count;
    for (size_t i = 0; i < engine->group_count; i++) {
        const pst__group *group = &engine->groups[i];
        int is_in_order = engine->order.gathers.position[i] != PST__NO_POSITION;
        *words++ = engine->needed_here[i] ? PRESENT : is_in_order ? ABSENT : NOT_HERE;
        *words++ = (int32_t)group->extra_reports;
        *words++ = is_used(engine, i) ? (int32_t)group->reported_after : NOT_HERE;
        engine->needed_here[i] = 0;
    }
    write_hash(words, hash);
    words[HASH_WORDS] = engine->is_broken ? (int32_t)pst__carrier_number(&engine->carrier) + 1 : 0;
}

/* ---- what it learns -------------------------------------------------------------------------- */

/* Frozen groups of a backward's order that no rank needed leave it; who was needed once stays. A
 * group with trainable parameters never leaves: the next backward may reach it on one rank alone.
 */
static void learn_need(pst_zero *engine, size_t index, int32_t word) {
    pst__need *need = &engine->need[index];
    if (word == PRESENT)
        *need = PST__NEED_SOME;
    else if (word == ABSENT && *need == PST__NEED_UNKNOWN &&
             engine->groups[index].layout.gradient_elements == 0)
        *need = PST__NEED_NONE;
}

static void learn(pst_zero *engine, const pst__presence *slot) {
    pst__agreement *agreement = slot->agreement;
    const int32_t *words = slot->words;
    agreement->order = slot->order;
    for (size_t i = 0; i < engine->parameter_count; i++, words++) {
        engine->parameters[i].has_gradient = *words == PRESENT;
        agreement->has_gradient[i] = *words == PRESENT;
    }
    for (size_t i = 0; i < engine->group_count; i++, words += WORDS_A_GROUP) {
        learn_need(engine, i, words[0]);
        agreement->groups[i] =
            (pst__agreed_group){.extra = (uint32_t)words[1], .after = (uint32_t)words[2]};
    }
}

static int32_t *last_words_of(const pst_zero *engine, const pst__presence *slot) {
    return slot->words + engine->presence_words - LAST_WORDS;
}

/* All ranks that break one backward off count it as not having been. */
static pst_status check_broken(pst_zero *engine, const pst__presence *slot) {
    const int32_t rank = last_words_of(engine, slot)[HASH_WORDS] - 1;
    if (rank < 0 || slot->is_broken) return PST_OK;
    return pst__carrier_give_up(
        &engine->carrier,
        pst__zero_fail(engine, PST_EMISMATCH,
                       "rank %d has broken a backward off that this rank has completed, "
                       "whose sums lack its gradients; all ranks must break it off alike",
                       (int)rank));
}

static pst_status check_hash(pst_zero *engine, const pst__presence *slot) {
    const int32_t *words = last_words_of(engine, slot);
    int32_t own[HASH_WORDS];
    int differs = 0;
    write_hash(own, slot->hash);
    for (size_t i = 0; i < HASH_WORDS; i++)
        differs |= own[i] != words[i];
    if (!differs) return PST_OK;
    return pst__carrier_give_up(
        &engine->carrier,
        pst__zero_fail(engine, PST_EMISMATCH, "%s",
                       "another rank's backward has another order of collectives: the "
                       "ranks ran different passes"));
}

static pst_status wait_for(pst_zero *engine, const pst__presence *slot) {
    /* Pairs with the release in arrive: the words are everybody's. Until then the operation is in
     * its queue. */
    const int has_arrived = pst__load_acquire(&slot->arrived);
    /* One that has failed may have been given back: then the runtime is poisoned. */
    const pst_status status = pst_runtime_status(engine->carrier.runtime);
    if (has_arrived || status != PST_OK) return status;
    return pst__operation_wait_end(slot->exchange, "wait presence");
}

static pst_status read_slot(pst_zero *engine, pst__presence *slot) {
    if (!slot->is_open) return PST_OK;
    pst_status status = wait_for(engine, slot);
    if (status == PST_OK) status = check_broken(engine, slot);
    if (status == PST_OK && !slot->is_broken) status = check_hash(engine, slot);
    if (status != PST_OK) return status;
    slot->is_open = 0;
    if (!slot->is_broken) learn(engine, slot);
    return PST_OK;
}

static void arrive(pst__operation *operation) {
    pst_zero *engine = operation->owner;
    /* Pairs with the acquire in wait_for. */
    pst__store_release(&engine->presence[operation->argument].arrived, 1);
}

/* In a careful backward each rank takes part in what any other has reported again. */
static uint64_t hash_of_reductions(const pst_zero *engine, uint64_t hash) {
    for (size_t i = 0; !engine->careful && i < engine->group_count; i++)
        hash = pst__hash(hash, &engine->groups[i].extra_reports, sizeof(uint32_t));
    return hash;
}

/* In a graph there is nobody to read an answer, and passes that differ are in no graph. */
pst_status pst__presence_exchange(pst_zero *engine) {
    if (engine->carrier.outside != NULL) return PST_OK;
    size_t index = engine->exchanges % PST__PRESENCE_SLOTS;
    pst__presence *slot = &engine->presence[index];
    pst__operation *operation;
    pst_status status = read_slot(engine, slot);
    if (status == PST_OK)
        status = pst__operation_take(&engine->carrier, PST__REDUCE_LANE, &operation);
    if (status != PST_OK) return status;
    slot->is_broken = engine->is_broken;
    slot->order = engine->backward_order;
    slot->agreement = engine->agreed;
    slot->hash = hash_of_reductions(engine, pst__backward_hash(engine, slot->order));
    write_words(engine, slot->words, slot->hash);
    pst__store_relaxed(&slot->arrived, 0); /* submitting publishes it */
    pst_collective *collective = &operation->work.collective;
    collective->kind = PST_ALL_REDUCE;
    collective->name = "presence";
    collective->dtype = PST_INT32;
    collective->destination = slot->words;
    collective->count = engine->presence_words;
    collective->reduce = PST_REDUCE_MAX;
    operation->owner = engine;
    operation->argument = index;
    operation->done = arrive;
    status = pst__replicas_submit_maxima(operation, bytes_of(engine), &slot->exchange);
    if (status != PST_OK) return status;
    engine->exchanges++;
    slot->is_open = 1;
    return PST_OK;
}

pst_status pst__presence_ask(pst_zero *engine, int32_t own, int32_t *largest) {
    pst__operation *operation;
    pst_status status = pst__operation_take(&engine->carrier, PST__GATHER_LANE, &operation);
    if (status != PST_OK) return status;
    *engine->question = own;
    pst_collective *collective = &operation->work.collective;
    collective->kind = PST_ALL_REDUCE;
    collective->name = "question";
    collective->dtype = PST_INT32;
    collective->destination = engine->question;
    collective->count = 1;
    collective->reduce = PST_REDUCE_MAX;
    status = pst__replicas_submit_maxima(operation, sizeof own, &operation);
    if (status == PST_OK) status = pst__operation_wait_end(operation, "wait question");
    if (status == PST_OK) *largest = *engine->question;
    return status;
}

/* No doubt: all parameters of this backward have gradients, and those that were reported although
 * the backward's order has no place for them. */
static void assume(pst_zero *engine) {
    for (size_t i = 0; i < engine->parameter_count; i++)
        engine->parameters[i].has_gradient = engine->parameters[i].has_gradient_here;
    for (size_t g = 0; g < engine->group_count; g++) {
        const pst__layout *layout = &engine->groups[g].layout;
        for (size_t i = 0; is_used(engine, g) && i < layout->member_count; i++)
            if (layout->members[i].trainable)
                engine->parameters[layout->members[i].parameter].has_gradient = 1;
    }
}

pst_status pst__presence_read(pst_zero *engine) {
    pst_status status = PST_OK;
    if (!engine->careful) {
        assume(engine);
        return PST_OK;
    }
    for (size_t i = 0; status == PST_OK && i < PST__PRESENCE_SLOTS; i++) /* oldest first */
        status =
            read_slot(engine, &engine->presence[(engine->exchanges + i) % PST__PRESENCE_SLOTS]);
    return status;
}
