/* concurrencykit's primitives on the compiler's atomic built-ins, for the thread sanitizer: it does
 * not see the inline assembly of the real header and would report correct code. Every access is
 * sequentially consistent, so the fences have nothing left to order. Thread sanitizer builds only;
 * there is no double-word compare-and-swap, so what needs it (ck_stack's batch pop for many
 * consumers, ck_fifo's for many) does not compile. */
#ifndef CK_PR_H
#define CK_PR_H

#include <ck_cc.h>
#include <ck_limits.h>
#include <ck_md.h>
#include <ck_stdbool.h>
#include <ck_stdint.h>

#define PST__CK_ORDER __ATOMIC_SEQ_CST

CK_CC_INLINE static void ck_pr_barrier(void) {
    __asm__ __volatile__("" ::: "memory");
}

CK_CC_INLINE static void ck_pr_stall(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#else
    ck_pr_barrier();
#endif
}

#define PST__CK_FENCE(name)                                                                        \
    CK_CC_INLINE static void ck_pr_fence_##name(void) {                                            \
        ck_pr_barrier();                                                                           \
    }                                                                                              \
    CK_CC_INLINE static void ck_pr_fence_strict_##name(void) {                                     \
        ck_pr_barrier();                                                                           \
    }

PST__CK_FENCE(atomic)
PST__CK_FENCE(atomic_load)
PST__CK_FENCE(atomic_store)
PST__CK_FENCE(store_atomic)
PST__CK_FENCE(load_atomic)
PST__CK_FENCE(load)
PST__CK_FENCE(load_depends)
PST__CK_FENCE(load_store)
PST__CK_FENCE(store)
PST__CK_FENCE(store_load)
PST__CK_FENCE(memory)
PST__CK_FENCE(acquire)
PST__CK_FENCE(release)
PST__CK_FENCE(acqrel)
PST__CK_FENCE(lock)
PST__CK_FENCE(unlock)
#undef PST__CK_FENCE

/* ---- pointers: taken as void *, as in the real header --------------------------------------- */

CK_CC_INLINE static void *ck_pr_md_load_ptr(const void *target) {
    return __atomic_load_n((void *const *)target, PST__CK_ORDER);
}

CK_CC_INLINE static void ck_pr_md_store_ptr(void *target, const void *value) {
    __atomic_store_n((void **)target, (void *)(uintptr_t)value, PST__CK_ORDER);
}

CK_CC_INLINE static void *ck_pr_fas_ptr(void *target, void *value) {
    return __atomic_exchange_n((void **)target, value, PST__CK_ORDER);
}

CK_CC_INLINE static bool ck_pr_cas_ptr_value(void *target, void *expected, void *value,
                                             void *found) {
    bool swapped = __atomic_compare_exchange_n((void **)target, &expected, value, false,
                                               PST__CK_ORDER, PST__CK_ORDER);
    *(void **)found = expected;
    return swapped;
}

CK_CC_INLINE static bool ck_pr_cas_ptr(void *target, void *expected, void *value) {
    void *found;
    return ck_pr_cas_ptr_value(target, expected, value, &found);
}

#define ck_pr_load_ptr(source)         ((__typeof__(*(source)))ck_pr_md_load_ptr(source))
#define ck_pr_store_ptr(target, value) ck_pr_md_store_ptr((target), (value))
#define ck_pr_store_ptr_unsafe         ck_pr_store_ptr

/* ---- integers ---------------------------------------------------------------------------------
 */

#define PST__CK_MODIFY(name, suffix, type)                                                         \
    CK_CC_INLINE static void ck_pr_##name##_##suffix(type *target, type value) {                   \
        (void)__atomic_fetch_##name(target, value, PST__CK_ORDER);                                 \
    }

#define PST__CK_INTEGER(suffix, type)                                                              \
    CK_CC_INLINE static type ck_pr_md_load_##suffix(const type *target) {                          \
        return __atomic_load_n(target, PST__CK_ORDER);                                             \
    }                                                                                              \
    CK_CC_INLINE static void ck_pr_md_store_##suffix(type *target, type value) {                   \
        __atomic_store_n(target, value, PST__CK_ORDER);                                            \
    }                                                                                              \
    CK_CC_INLINE static type ck_pr_fas_##suffix(type *target, type value) {                        \
        return __atomic_exchange_n(target, value, PST__CK_ORDER);                                  \
    }                                                                                              \
    CK_CC_INLINE static type ck_pr_faa_##suffix(type *target, type value) {                        \
        return __atomic_fetch_add(target, value, PST__CK_ORDER);                                   \
    }                                                                                              \
    CK_CC_INLINE static bool ck_pr_cas_##suffix##_value(type *target, type expected, type value,   \
                                                        type *found) {                             \
        bool swapped = __atomic_compare_exchange_n(target, &expected, value, false, PST__CK_ORDER, \
                                                   PST__CK_ORDER);                                 \
        *found = expected;                                                                         \
        return swapped;                                                                            \
    }                                                                                              \
    CK_CC_INLINE static bool ck_pr_cas_##suffix(type *target, type expected, type value) {         \
        return ck_pr_cas_##suffix##_value(target, expected, value, &expected);                     \
    }                                                                                              \
    CK_CC_INLINE static void ck_pr_inc_##suffix(type *target) {                                    \
        (void)__atomic_fetch_add(target, 1, PST__CK_ORDER);                                        \
    }                                                                                              \
    CK_CC_INLINE static void ck_pr_dec_##suffix(type *target) {                                    \
        (void)__atomic_fetch_sub(target, 1, PST__CK_ORDER);                                        \
    }                                                                                              \
    CK_CC_INLINE static bool ck_pr_dec_##suffix##_is_zero(type *target) {                          \
        return __atomic_sub_fetch(target, 1, PST__CK_ORDER) == 0;                                  \
    }                                                                                              \
    CK_CC_INLINE static void ck_pr_dec_##suffix##_zero(type *target, bool *zero) {                 \
        *zero = ck_pr_dec_##suffix##_is_zero(target);                                              \
    }                                                                                              \
    PST__CK_MODIFY(add, suffix, type)                                                              \
    PST__CK_MODIFY(sub, suffix, type)                                                              \
    PST__CK_MODIFY(and, suffix, type)                                                              \
    PST__CK_MODIFY(or, suffix, type)                                                               \
    PST__CK_MODIFY(xor, suffix, type)

PST__CK_INTEGER(char, char)
PST__CK_INTEGER(int, int)
PST__CK_INTEGER(uint, unsigned int)
PST__CK_INTEGER(8, uint8_t)
PST__CK_INTEGER(16, uint16_t)
PST__CK_INTEGER(32, uint32_t)
PST__CK_INTEGER(64, uint64_t)
#undef PST__CK_INTEGER
#undef PST__CK_MODIFY

#define ck_pr_load_char(source)         ck_pr_md_load_char(source)
#define ck_pr_load_int(source)          ck_pr_md_load_int(source)
#define ck_pr_load_uint(source)         ck_pr_md_load_uint(source)
#define ck_pr_load_8(source)            ck_pr_md_load_8(source)
#define ck_pr_load_16(source)           ck_pr_md_load_16(source)
#define ck_pr_load_32(source)           ck_pr_md_load_32(source)
#define ck_pr_load_64(source)           ck_pr_md_load_64(source)
#define ck_pr_store_char(target, value) ck_pr_md_store_char((target), (value))
#define ck_pr_store_int(target, value)  ck_pr_md_store_int((target), (value))
#define ck_pr_store_uint(target, value) ck_pr_md_store_uint((target), (value))
#define ck_pr_store_8(target, value)    ck_pr_md_store_8((target), (value))
#define ck_pr_store_16(target, value)   ck_pr_md_store_16((target), (value))
#define ck_pr_store_32(target, value)   ck_pr_md_store_32((target), (value))
#define ck_pr_store_64(target, value)   ck_pr_md_store_64((target), (value))

/* What the other headers of concurrencykit ask for before they offer a function. */
#define CK_F_PR_LOAD_32
#define CK_F_PR_LOAD_64
#define CK_F_PR_STORE_64
#define CK_F_PR_FAA_32
#define CK_F_PR_FAA_64
#define CK_F_PR_CAS_PTR
#define CK_F_PR_CAS_PTR_VALUE

#endif
