/* What code that is compiled for the thread sanitizer calls: here every atomic operation becomes a
 * point of the simulation, and the sanitizer's own runtime is not linked. Plain accesses matter
 * only to a thread's own delayed stores. */
#include "threads.h"

#define RELEASE_AT_MOST(order) ((order) != __ATOMIC_SEQ_CST)

/* ---- atomic operations ------------------------------------------------------------------ */

#define MODIFY(bits, type, name)                                                                   \
    type __tsan_atomic##bits##_fetch_##name(volatile type *address, type value, int order) {       \
        (void)order;                                                                               \
        sim_point();                                                                               \
        sim_flush();                                                                               \
        return __atomic_fetch_##name(address, value, __ATOMIC_SEQ_CST);                            \
    }

#define OPERATIONS(bits, type)                                                                     \
    type __tsan_atomic##bits##_load(const volatile type *address, int order) {                     \
        uint64_t own;                                                                              \
        (void)order;                                                                               \
        sim_point();                                                                               \
        if (sim_delayed != 0) {                                                                    \
            if (sim_own_store(address, sizeof(type), &own)) return (type)own;                      \
            sim_flush_at(address, sizeof(type));                                                   \
        }                                                                                          \
        return __atomic_load_n(address, __ATOMIC_SEQ_CST);                                         \
    }                                                                                              \
    void __tsan_atomic##bits##_store(volatile type *address, type value, int order) {              \
        sim_point();                                                                               \
        if (RELEASE_AT_MOST(order)) {                                                              \
            sim_store(address, sizeof(type), (uint64_t)value);                                     \
            return;                                                                                \
        }                                                                                          \
        sim_flush();                                                                               \
        __atomic_store_n(address, value, __ATOMIC_SEQ_CST);                                        \
    }                                                                                              \
    type __tsan_atomic##bits##_exchange(volatile type *address, type value, int order) {           \
        (void)order;                                                                               \
        sim_point();                                                                               \
        sim_flush();                                                                               \
        return __atomic_exchange_n(address, value, __ATOMIC_SEQ_CST);                              \
    }                                                                                              \
    int __tsan_atomic##bits##_compare_exchange_strong(volatile type *address, type *expected,      \
                                                      type value, int order, int fail) {           \
        (void)order, (void)fail;                                                                   \
        sim_point();                                                                               \
        sim_flush();                                                                               \
        return __atomic_compare_exchange_n(address, expected, value, 0, __ATOMIC_SEQ_CST,          \
                                           __ATOMIC_SEQ_CST);                                      \
    }                                                                                              \
    int __tsan_atomic##bits##_compare_exchange_weak(volatile type *address, type *expected,        \
                                                    type value, int order, int fail) {             \
        return __tsan_atomic##bits##_compare_exchange_strong(address, expected, value, order,      \
                                                             fail);                                \
    }                                                                                              \
    type __tsan_atomic##bits##_compare_exchange_val(volatile type *address, type expected,         \
                                                    type value, int order, int fail) {             \
        (void)__tsan_atomic##bits##_compare_exchange_strong(address, &expected, value, order,      \
                                                            fail);                                 \
        return expected;                                                                           \
    }                                                                                              \
    MODIFY(bits, type, add)                                                                        \
    MODIFY(bits, type, sub)                                                                        \
    MODIFY(bits, type, and)                                                                        \
    MODIFY(bits, type, or)                                                                         \
    MODIFY(bits, type, xor)

#pragma GCC diagnostic ignored "-Wmissing-prototypes"
OPERATIONS(8, uint8_t)
OPERATIONS(16, uint16_t)
OPERATIONS(32, uint32_t)
OPERATIONS(64, uint64_t)

void __tsan_atomic_thread_fence(int order) {
    sim_point();
    if (!RELEASE_AT_MOST(order)) sim_flush();
}

void __tsan_atomic_signal_fence(int order) {
    (void)order;
}

/* ---- plain accesses --------------------------------------------------------------------- */

#define ACCESS(name, bytes)                                                                        \
    void __tsan_##name(void *address) {                                                            \
        if (sim_delayed != 0) sim_flush_at(address, bytes);                                        \
    }

#define ACCESSES(bytes)                                                                            \
    ACCESS(read##bytes, bytes)                                                                     \
    ACCESS(write##bytes, bytes)                                                                    \
    ACCESS(unaligned_read##bytes, bytes)                                                           \
    ACCESS(unaligned_write##bytes, bytes)                                                          \
    ACCESS(volatile_read##bytes, bytes)                                                            \
    ACCESS(volatile_write##bytes, bytes)

ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

void __tsan_read_range(void *address, unsigned long bytes) {
    if (sim_delayed != 0) sim_flush_at(address, bytes);
}

void __tsan_write_range(void *address, unsigned long bytes) {
    if (sim_delayed != 0) sim_flush_at(address, bytes);
}

void __tsan_func_entry(void *caller) {
    (void)caller;
}

void __tsan_func_exit(void) {}

void __tsan_init(void) {}
