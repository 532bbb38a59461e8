/* What the rest of mem/ asks an arena beyond its public interface. */
#ifndef PST_MEM_ARENA_H
#define PST_MEM_ARENA_H

#include <penstock/memory.h>

#define PST__ROUND_FAILED SIZE_MAX

/* Rounds up to a multiple of `alignment` (a power of two); PST__ROUND_FAILED on overflow. */
static inline size_t pst__round_up(size_t bytes, size_t alignment) {
    return bytes > SIZE_MAX - alignment ? PST__ROUND_FAILED
                                        : (bytes + alignment - 1) & ~(alignment - 1);
}

pst_device *pst__arena_device(const pst_arena *arena);
/* Instead of pst_arena_destroy: the segments stay as they are, since somebody may still write
 * there.
 */
void pst__arena_leave(pst_arena *arena);

/* pst_arena_trim where freed memory is used only behind all events that the arena waits for. */
void pst__arena_trim_in_order(pst_arena *arena);

#endif
