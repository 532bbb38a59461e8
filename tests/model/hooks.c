/* Poison hooks: one call each, and none after its removal. */
#include "programs.h"
#include "world.h"

static int calls, is_gone;

static void note_call(void *context, pst_status status) {
    (void)context;
    model_check(status == PST_EIO, "the hook is not told why");
    model_check(!is_gone, "a hook is called after its removal");
    calls++;
    model_point();
    model_check(!is_gone, "a removal returns while the hook runs");
}

static void add_hook(void) {
    check_ok(pst_runtime_add_poison_hook(world.runtime, note_call, NULL), "no hook");
}

static void remove_hook(void) {
    pst_runtime_remove_poison_hook(world.runtime, note_call, NULL);
    is_gone = 1;
}

static void poison(void) {
    world.poison = PST_EIO;
    pst_runtime_poison(world.runtime, PST_EIO, NULL);
}

static void set_up_runtime(void) {
    open_runtime();
    calls = is_gone = 0;
}

static void set_up_hook(void) {
    set_up_runtime();
    add_hook();
}

static void check_called(void) {
    model_check(calls == 1, "not one call of the hook");
    pst_runtime_destroy(world.runtime);
}

static void check_removed(void) {
    model_check(calls <= 1, "more than one call of the hook");
    pst_runtime_destroy(world.runtime);
}

const model_program hook_and_poison = {.setup = set_up_runtime,
                                       .threads = {add_hook, poison},
                                       .finish = check_called,
                                       .preemptions = 4};

const model_program hook_and_two_poisons = {
    .setup = set_up_hook, .threads = {poison, poison}, .finish = check_called, .preemptions = 3};

const model_program hook_removed = {.setup = set_up_hook,
                                    .threads = {remove_hook, poison},
                                    .finish = check_removed,
                                    .preemptions = 4};
