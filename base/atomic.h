/* Atomic operations of the library: the compiler's built-ins under names that say the order. Each
 * use names its partner in a comment. concurrencykit's structures bring their own (ck_pr). */
#ifndef PST_BASE_ATOMIC_H
#define PST_BASE_ATOMIC_H

#define pst__load_relaxed(p)     __atomic_load_n((p), __ATOMIC_RELAXED)
#define pst__load_acquire(p)     __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define pst__store_relaxed(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)
#define pst__store_release(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define pst__add_relaxed(p, v)   __atomic_fetch_add((p), (v), __ATOMIC_RELAXED)
#define pst__add_acq_rel(p, v)   __atomic_fetch_add((p), (v), __ATOMIC_ACQ_REL)
#define pst__sub_acq_rel(p, v)   __atomic_fetch_sub((p), (v), __ATOMIC_ACQ_REL)
#define pst__swap_acq_rel(p, v)  __atomic_exchange_n((p), (v), __ATOMIC_ACQ_REL)
/* Strong compare-and-swap; *expected gets the value found. */
#define pst__cas_acq_rel(p, expected, v)                                                           \
    __atomic_compare_exchange_n((p), (expected), (v), 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)
/* Orders an earlier store before a later load: "I set my flag, now I look at yours". */
#define pst__fence_store_load() __atomic_thread_fence(__ATOMIC_SEQ_CST)

#endif
