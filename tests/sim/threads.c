#include "threads.h"

#include "sched/calls.h"
#include "tests/random.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#define THREADS      48u
#define STACK_BYTES  (192u * 1024u)
#define POINT_NS     25u
#define POINTS_LIMIT 10000000u
#define CLOCK_BEGIN  1000000000000u /* ck_ec takes times in the first second for ever past */
#define CLOCK_LIMIT  1600000000000u
#define STORES       4u

typedef enum thread_state { THREAD_UNUSED = 0, THREAD_READY, THREAD_ASLEEP, THREAD_ENDED } state;

typedef struct store {
    volatile void *address;
    unsigned bytes;
    uint64_t value;
} store;

typedef struct thread {
    state state;
    int has_begun, was_woken;
    jmp_buf context;
    ucontext_t entry;
    void *(*body)(void *);
    void *argument;
    const void *address; /* ASLEEP */
    uint64_t until;      /* ASLEEP */
    uint64_t put_aside;  /* READY, but not chosen before this point */
    store stores[STORES];
    unsigned store_count;
    void *values[SIM_KEYS];
    pst__call *calls; /* what pst__calls_of_thread points to, while another thread runs */
} thread;

/* One run at a time: the process has one simulated world. */
static struct {
    thread threads[THREADS];
    unsigned used; /* threads beyond were never in use in this run */
    thread *current;
    char *stacks;
    jmp_buf outside;
    uint64_t random, clock, points, signature;
    uint32_t switch_once_in, aside_once_in, delay_once_in;
    sim_report *report;
} world;

unsigned sim_delayed;

int sim_is_running(void) {
    return world.current != NULL;
}

uint64_t sim_clock(void) {
    return world.clock;
}

uint32_t sim_choose(uint32_t bound) {
    return random_below(&world.random, bound);
}

_Noreturn void sim_fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    if (!world.report->failed)
        (void)vsnprintf(world.report->text, sizeof world.report->text, format, arguments);
    va_end(arguments);
    world.report->failed = 1;
    world.current = NULL;
    *pst__calls_of_thread() = NULL;
    sim_delayed = 0;
    _longjmp(world.outside, 1);
}

/* ---- delayed stores --------------------------------------------------------------------- */

static void write_value(const store *store) {
    switch (store->bytes) {
    case 1:
        *(volatile uint8_t *)store->address = (uint8_t)store->value;
        break;
    case 2:
        *(volatile uint16_t *)store->address = (uint16_t)store->value;
        break;
    case 4:
        *(volatile uint32_t *)store->address = (uint32_t)store->value;
        break;
    default:
        *(volatile uint64_t *)store->address = store->value;
    }
}

static void publish_oldest(thread *owner) {
    write_value(&owner->stores[0]);
    owner->store_count--;
    memmove(&owner->stores[0], &owner->stores[1], owner->store_count * sizeof(store));
    if (owner == world.current) sim_delayed = owner->store_count;
}

static void publish_all(thread *owner) {
    while (owner->store_count > 0)
        publish_oldest(owner);
}

static void publish_some(void) {
    thread *owner = &world.threads[sim_choose(world.used)];
    if (owner->store_count > 0) publish_oldest(owner);
}

void sim_flush(void) {
    if (world.current != NULL) publish_all(world.current);
}

void sim_flush_at(const volatile void *address, unsigned long bytes) {
    const volatile char *begin = address;
    for (unsigned i = 0; i < world.current->store_count; i++) {
        const store *store = &world.current->stores[i];
        const volatile char *other = store->address;
        if (begin < other + store->bytes && other < begin + bytes) {
            sim_flush();
            return;
        }
    }
}

int sim_own_store(const volatile void *address, unsigned bytes, uint64_t *value) {
    for (unsigned i = world.current->store_count; i-- > 0;) {
        const store *store = &world.current->stores[i];
        if (store->address != address || store->bytes != bytes) continue;
        *value = store->value;
        return 1;
    }
    return 0;
}

void sim_store(volatile void *address, unsigned bytes, uint64_t value) {
    thread *self = world.current;
    const store added = {address, bytes, value};
    if (self == NULL) {
        write_value(&added);
        return;
    }
    if (self->store_count == STORES) publish_oldest(self);
    self->stores[self->store_count++] = added;
    sim_delayed = self->store_count;
    if (world.delay_once_in == 0 || !random_once_in(&world.random, world.delay_once_in))
        publish_all(self);
}

/* ---- who goes on ------------------------------------------------------------------------ */

static int can_go_on(thread *thread) {
    if (thread->state == THREAD_ASLEEP && thread->until <= world.clock) {
        thread->state = THREAD_READY;
        thread->was_woken = 0;
    }
    return thread->state == THREAD_READY && thread->put_aside <= world.points;
}

static thread *choose_ready(void) {
    thread *ready[THREADS];
    uint32_t count = 0;
    for (unsigned i = 0; i < world.used; i++)
        if (can_go_on(&world.threads[i])) ready[count++] = &world.threads[i];
    return count == 0 ? NULL : ready[sim_choose(count)];
}

static int is_all_over(void) {
    for (unsigned i = 0; i < world.used; i++)
        if (world.threads[i].state == THREAD_READY || world.threads[i].state == THREAD_ASLEEP)
            return 0;
    return 1;
}

static void bring_back_those_aside(void) {
    for (unsigned i = 0; i < world.used; i++)
        world.threads[i].put_aside = 0;
}

/* Nobody can go on: the clock moves to the first sleeper that ends by itself. */
static void jump(void) {
    uint64_t first = SIM_FOREVER;
    for (unsigned i = 0; i < world.used; i++)
        if (world.threads[i].state == THREAD_ASLEEP && world.threads[i].until < first)
            first = world.threads[i].until;
    if (first == SIM_FOREVER) sim_fail("all threads sleep for ever");
    if (first > CLOCK_LIMIT) sim_fail("the run does not end: its clock is beyond its limit");
    world.clock = first;
}

/* NULL: all have ended. */
static thread *choose_next(void) {
    thread *next = choose_ready();
    if (next != NULL || is_all_over()) return next;
    bring_back_those_aside();
    next = choose_ready();
    for (unsigned i = 0; next == NULL && i < world.used; i++)
        publish_all(&world.threads[i]);
    while (next == NULL) {
        jump();
        next = choose_ready();
    }
    return next;
}

static void go_to(thread *next) {
    pst__call **calls = pst__calls_of_thread();
    if (world.current != NULL) world.current->calls = *calls;
    *calls = next == NULL ? NULL : next->calls;
    world.current = next;
    if (next == NULL) _longjmp(world.outside, 1);
    sim_delayed = next->store_count;
    world.signature = (world.signature ^ (uint64_t)(next - world.threads)) * 0x100000001b3u;
    world.signature += world.clock;
    if (next->has_begun) _longjmp(next->context, 1);
    next->has_begun = 1;
    (void)setcontext(&next->entry);
}

static void leave(void) {
    thread *self = world.current;
    thread *next = choose_next();
    if (next == self) return;
    if (_setjmp(self->context) == 0) go_to(next);
}

void sim_point(void) {
    if (world.current == NULL) return;
    world.clock += POINT_NS;
    if (++world.points > POINTS_LIMIT) sim_fail("the run does not end: too many points");
    if (!random_once_in(&world.random, world.switch_once_in)) return;
    if (world.delay_once_in != 0) publish_some();
    if (random_once_in(&world.random, world.aside_once_in))
        world.current->put_aside = world.points + sim_choose(3000);
    leave();
}

void sim_yield(void) {
    world.clock += POINT_NS;
    if (++world.points > POINTS_LIMIT) sim_fail("the run does not end: too many points");
    publish_all(world.current);
    world.current->put_aside = world.points + sim_choose(8);
    leave();
}

int sim_block(const void *address, uint64_t until) {
    thread *self = world.current;
    publish_all(self);
    self->state = THREAD_ASLEEP;
    self->address = address;
    self->until = until;
    self->was_woken = 0;
    leave();
    return self->was_woken;
}

void sim_wake(const void *address) {
    publish_all(world.current);
    for (unsigned i = 0; i < world.used; i++) {
        thread *thread = &world.threads[i];
        if (thread->state != THREAD_ASLEEP || thread->address != address) continue;
        thread->state = THREAD_READY;
        thread->was_woken = 1;
    }
}

/* ---- threads ---------------------------------------------------------------------------- */

static void enter(void) {
    thread *self = world.current;
    (void)self->body(self->argument);
    publish_all(self);
    self->state = THREAD_ENDED;
    sim_wake(self);
    go_to(choose_next());
}

static char *stack_of(const thread *thread) {
    return world.stacks + (size_t)(thread - world.threads) * STACK_BYTES;
}

int sim_thread_create(unsigned long *id, void *(*body)(void *), void *argument) {
    unsigned i = 0;
    while (i < THREADS && world.threads[i].state != THREAD_UNUSED)
        i++;
    if (i == THREADS) return -1;
    thread *made = &world.threads[i];
    memset(made, 0, sizeof *made);
    made->state = THREAD_READY;
    made->body = body;
    made->argument = argument;
    (void)getcontext(&made->entry);
    made->entry.uc_stack.ss_sp = stack_of(made);
    made->entry.uc_stack.ss_size = STACK_BYTES;
    makecontext(&made->entry, enter, 0);
    if (i >= world.used) world.used = i + 1;
    *id = i + 1;
    sim_flush();
    return 0;
}

void sim_thread_join(unsigned long id) {
    thread *other = &world.threads[id - 1];
    while (other->state != THREAD_ENDED)
        (void)sim_block(other, SIM_FOREVER);
    other->state = THREAD_UNUSED;
}

unsigned long sim_thread_id(void) {
    return (unsigned long)(world.current - world.threads) + 1;
}

int sim_thread_has_ended(unsigned long id) {
    const state state = world.threads[id - 1].state;
    return state == THREAD_ENDED || state == THREAD_UNUSED;
}

void **sim_thread_value(unsigned key) {
    return &world.current->values[key];
}

/* ---- a run ------------------------------------------------------------------------------ */

typedef struct first_thread {
    void (*body)(void *);
    void *argument;
} first_thread;

static void *run_first(void *argument) {
    const first_thread *first = argument;
    first->body(first->argument);
    return NULL;
}

/* A run's own temper: how often threads change, how long one is left standing, and whether stores
 * are delayed. */
static void draw_temper(void) {
    static const uint32_t once_in[] = {1, 2, 4, 8, 24, 64};
    static const uint32_t delays[] = {0, 1, 2, 4};
    world.switch_once_in = once_in[sim_choose(6)];
    world.aside_once_in = 16u << sim_choose(5);
    world.delay_once_in = delays[sim_choose(4)];
}

void sim_run(uint64_t seed, void (*body)(void *argument), void *argument, sim_report *report) {
    char *stacks = world.stacks;
    unsigned long id;
    memset(report, 0, sizeof *report);
    memset(&world, 0, sizeof world);
    if (stacks == NULL)
        stacks = mmap(NULL, (size_t)THREADS * STACK_BYTES, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    first_thread first = {body, argument};
    world.stacks = stacks;
    world.random = seed;
    world.clock = CLOCK_BEGIN;
    world.report = report;
    draw_temper();
    if (stacks == MAP_FAILED || sim_thread_create(&id, run_first, &first) != 0) {
        report->failed = 1;
        (void)snprintf(report->text, sizeof report->text, "no memory for the run's stacks");
        return;
    }
    if (_setjmp(world.outside) == 0) go_to(&world.threads[0]);
    report->points = world.points;
    report->clock = world.clock - CLOCK_BEGIN;
    report->signature = world.signature;
}
