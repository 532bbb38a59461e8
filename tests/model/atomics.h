/* Included before everything else in the library's sources: atomic built-ins, the pause of a spin
 * loop, and threads become calls of the explorer. */
#ifndef PST_TESTS_MODEL_ATOMICS_H
#define PST_TESTS_MODEL_ATOMICS_H

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum model_change { MODEL_ADD, MODEL_SUB, MODEL_AND, MODEL_OR, MODEL_XOR } model_change;

uint64_t model_load(const volatile void *word, size_t size);
void model_store(volatile void *word, size_t size, uint64_t value, int order);
uint64_t model_exchange(volatile void *word, size_t size, uint64_t value);
bool model_cas(volatile void *word, void *expected, size_t size, uint64_t value);
uint64_t model_modify(volatile void *word, size_t size, model_change change, uint64_t value);
void model_fence(void);
void model_stall(void);
static inline int model_yield(void) {
    model_stall();
    return 0;
}
int model_thread_create(pthread_t *thread, const pthread_attr_t *attributes,
                        void *(*run)(void *argument), void *argument);
int model_thread_join(pthread_t thread, void **result);

#define MODEL_VALUE(v)         ((uint64_t)(uintptr_t)(v))
#define MODEL_TYPED(p, result) ((__typeof__(*(p)))(result))

#define __atomic_load_n(p, order)     MODEL_TYPED(p, model_load((p), sizeof *(p)))
#define __atomic_store_n(p, v, order) model_store((p), sizeof *(p), MODEL_VALUE(v), (order))
#define __atomic_exchange_n(p, v, order)                                                           \
    MODEL_TYPED(p, model_exchange((p), sizeof *(p), MODEL_VALUE(v)))
#define __atomic_compare_exchange_n(p, expected, v, weak, order, failed)                           \
    model_cas((p), (expected), sizeof *(p), MODEL_VALUE(v))
#define MODEL_MODIFY(p, change, v)                                                                 \
    MODEL_TYPED(p, model_modify((p), sizeof *(p), (change), MODEL_VALUE(v)))
#define __atomic_fetch_add(p, v, order) MODEL_MODIFY(p, MODEL_ADD, v)
#define __atomic_fetch_sub(p, v, order) MODEL_MODIFY(p, MODEL_SUB, v)
#define __atomic_fetch_and(p, v, order) MODEL_MODIFY(p, MODEL_AND, v)
#define __atomic_fetch_or(p, v, order)  MODEL_MODIFY(p, MODEL_OR, v)
#define __atomic_fetch_xor(p, v, order) MODEL_MODIFY(p, MODEL_XOR, v)
#define __atomic_sub_fetch(p, v, order) MODEL_TYPED(p, MODEL_MODIFY(p, MODEL_SUB, v) - (v))
#define __atomic_thread_fence(order)    model_fence()
#define __builtin_ia32_pause()          model_stall()
#define sched_yield()                   model_yield()
#define pthread_create                  model_thread_create
#define pthread_join                    model_thread_join
/* Coroutines have no signals of their own. */
#define pthread_sigmask(how, set, before) ((void)(set), (void)(before), 0)

#endif
