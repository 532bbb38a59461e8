/* Every lease of every arena in a run, taken from the calls themselves (the linker leads them
 * here): no two that are alive may overlap. */
#ifndef PST_TESTS_SIM_LEASES_H
#define PST_TESTS_SIM_LEASES_H

#include <penstock/memory.h>

void leases_begin(void);

pst_status __real_pst_arena_acquire(pst_arena *arena, size_t bytes, pst_lease *lease);
pst_status __real_pst_arena_acquire_at(pst_arena *arena, size_t offset, size_t bytes,
                                       pst_lease *lease);
void __real_pst_arena_release(pst_arena *arena, const pst_lease *lease, pst_event *event);
void __real_pst_arena_destroy(pst_arena *arena);

pst_status __wrap_pst_arena_acquire(pst_arena *arena, size_t bytes, pst_lease *lease);
pst_status __wrap_pst_arena_acquire_at(pst_arena *arena, size_t offset, size_t bytes,
                                       pst_lease *lease);
void __wrap_pst_arena_release(pst_arena *arena, const pst_lease *lease, pst_event *event);
void __wrap_pst_arena_destroy(pst_arena *arena);

#endif
