#include "explorer.h"

#include "memory.h"
#include "sched/calls.h"

#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define MAX_THREADS   8
#define STACK_BYTES   (128u << 10)
#define BUFFER_STORES 8
#define MAX_CHOICES   4096
#define MAX_STEPS     20000u

typedef struct store {
    volatile void *word;
    size_t size;
    uint64_t value;
} store;

typedef struct thread {
    void (*program)(void);
    void *(*run)(void *);
    void *argument;
    const uint32_t *sleeps_on;
    int joins; /* the thread that must end first, or -1 */
    int stalled, ended, entered;
    store buffer[BUFFER_STORES];
    size_t buffered;
    jmp_buf where;
    pst__call *calls; /* what pst__calls_of_thread points to, while another thread runs */
} thread;

/* Stacks are entered once, and from then on begun again. */
static struct {
    int entered;
    jmp_buf begin;
} beginnings[MAX_THREADS];

typedef struct choice {
    unsigned char count, taken;
} choice;

/* One run at a time; the explorer itself is single-threaded. */
static struct {
    const model_program *program;
    model_plant plant;
    thread threads[MAX_THREADS];
    int count, current;
    enum { ALONE, EXPLORING, FINISHING } phase;
    unsigned preemptions, delays, steps;
    const char *failed;
    jmp_buf home;
    choice choices[MAX_CHOICES];
    size_t depth, length;
    char schedule[512];
    size_t written;
    unsigned since_switch;
} now;

static _Alignas(4096) unsigned char stacks[MAX_THREADS][STACK_BYTES];

/* ---- choices ---------------------------------------------------------------------------- */

static void leave(void) {
    *pst__calls_of_thread() = NULL;
    _longjmp(now.home, 1);
}

void model_check(int holds, const char *what) {
    if (holds) return;
    now.failed = what;
    leave();
}

/* 0 .. count - 1: what the previous run took here, or the first. */
static unsigned choose(unsigned count) {
    if (now.phase != EXPLORING || count < 2) return 0;
    if (now.depth == now.length) {
        model_check(now.length < MAX_CHOICES, "the program is too long for the explorer");
        now.choices[now.length++] = (choice){(unsigned char)count, 0};
    }
    return now.choices[now.depth++].taken;
}

/* 0 when all has been tried. */
static int next_run(void) {
    while (now.length > 0) {
        choice *last = &now.choices[now.length - 1];
        if (++last->taken < last->count) return 1;
        now.length--;
    }
    return 0;
}

/* ---- threads ---------------------------------------------------------------------------- */

static thread *self(void) {
    return &now.threads[now.current];
}

static int can_run(const thread *t) {
    return !t->ended && t->sleeps_on == NULL && !t->stalled &&
           (t->joins < 0 || now.threads[t->joins].ended);
}

static void note_switch(int next) {
    const size_t room = sizeof now.schedule - now.written;
    const int length =
        snprintf(now.schedule + now.written, room, "%d:%u ", now.current, now.since_switch);
    if ((size_t)length < room) now.written += (size_t)length;
    now.since_switch = 0;
    now.current = next;
}

static void enter(void) {
    (void)_setjmp(beginnings[now.current].begin);
    thread *t = self();
    if (t->program != NULL)
        t->program();
    else
        (void)t->run(t->argument);
    model_fence();
    t->ended = 1;
    model_point();
}

static void enter_stack(int index) {
    static ucontext_t entry;
    (void)getcontext(&entry);
    entry.uc_stack.ss_sp = stacks[index];
    entry.uc_stack.ss_size = STACK_BYTES;
    entry.uc_link = NULL;
    makecontext(&entry, enter, 0);
    beginnings[index].entered = 1;
    (void)setcontext(&entry);
}

static void resume(int next) {
    self()->calls = *pst__calls_of_thread();
    note_switch(next);
    thread *t = self();
    *pst__calls_of_thread() = t->calls;
    if (t->entered) _longjmp(t->where, 1);
    t->entered = 1;
    if (beginnings[next].entered) _longjmp(beginnings[next].begin, 1);
    enter_stack(next);
}

static void drain_oldest(thread *t);

/* Delayed stores get out before others can look, or do not yet. */
static void switch_to(int next) {
    while (self()->buffered > 0 && choose(2) == 1)
        drain_oldest(self());
    if (_setjmp(self()->where) == 0) resume(next);
}

static int add_thread(thread made) {
    model_check(now.count < MAX_THREADS, "too many threads");
    const int index = now.count++;
    thread *t = &now.threads[index];
    *t = made;
    t->joins = -1;
    return index;
}

/* Everybody who can run, the current thread first; when only spinning ones are left, those. */
static int list_runnable(int *list) {
    int count = 0;
    if (can_run(self())) list[count++] = now.current;
    for (int i = 0; i < now.count; i++)
        if (i != now.current && can_run(&now.threads[i])) list[count++] = i;
    if (count > 0) return count;
    for (int i = 0; i < now.count; i++) {
        if (!now.threads[i].stalled) continue;
        now.threads[i].stalled = 0;
        if (can_run(&now.threads[i])) list[count++] = i;
    }
    return count;
}

static void pick(void) {
    int list[MAX_THREADS];
    const int count = list_runnable(list);
    if (count == 0) {
        if (_setjmp(self()->where) == 0) leave(); /* somebody may wake it when it is finished */
        return;
    }
    const int may_stay = list[0] == now.current;
    if (may_stay && now.preemptions == 0) return;
    const int next = list[choose((unsigned)count)];
    if (next == now.current) return;
    if (may_stay && now.preemptions != MODEL_UNBOUNDED) now.preemptions--;
    switch_to(next);
}

static void step(void) {
    now.since_switch++;
    model_check(++now.steps < MAX_STEPS, "the threads run for ever");
}

/* Spinning threads have no reason to look again before something has changed. */
static void end_stalls(void) {
    for (int i = 0; i < now.count; i++)
        now.threads[i].stalled = 0;
}

static void point(void) {
    if (now.phase == ALONE) return;
    step();
    pick();
}

/* What a program does there may be a change. */
void model_point(void) {
    end_stalls();
    point();
}

void model_stall(void) {
    if (now.phase == ALONE) return;
    model_fence();
    step();
    self()->stalled = 1;
    pick();
}

int model_thread_create(pthread_t *created, const pthread_attr_t *attributes,
                        void *(*run)(void *argument), void *argument) {
    (void)attributes;
    *created = (pthread_t)add_thread((thread){.run = run, .argument = argument});
    return 0;
}

int model_thread_join(pthread_t joined, void **result) {
    (void)result;
    self()->joins = (int)joined;
    model_point();
    self()->joins = -1;
    return 0;
}

void model_sleep(const uint32_t *word, uint32_t expected) {
    model_fence();
    model_point();
    if (*(const volatile uint32_t *)word != expected) return;
    self()->sleeps_on = word;
    model_point();
}

void model_wake(const uint32_t *word) {
    model_point();
    for (int i = 0; i < now.count; i++)
        if (now.threads[i].sleeps_on == word) now.threads[i].sleeps_on = NULL;
}

int model_is_planted(model_plant plant) {
    return now.phase == EXPLORING && now.plant == plant;
}

/* ---- words ------------------------------------------------------------------------------ */

static uint64_t read_word(const volatile void *word, size_t size) {
    uint64_t value = 0;
    memcpy(&value, (const void *)(uintptr_t)word, size);
    return value;
}

static void write_word(volatile void *word, size_t size, uint64_t value) {
    if (read_word(word, size) != value) end_stalls();
    memcpy((void *)(uintptr_t)word, &value, size);
}

static void drain_oldest(thread *t) {
    write_word(t->buffer[0].word, t->buffer[0].size, t->buffer[0].value);
    t->buffered--;
    memmove(&t->buffer[0], &t->buffer[1], t->buffered * sizeof t->buffer[0]);
}

static void drain(void) {
    while (now.phase != ALONE && self()->buffered > 0)
        drain_oldest(self());
}

uint64_t model_load(const volatile void *word, size_t size) {
    point();
    if (now.phase != ALONE)
        for (size_t i = self()->buffered; i-- > 0;)
            if (self()->buffer[i].word == word) return self()->buffer[i].value;
    return read_word(word, size);
}

void model_store(volatile void *word, size_t size, uint64_t value, int order) {
    point();
    thread *t = self();
    if (order == __ATOMIC_SEQ_CST) drain();
    const int may_delay = now.phase == EXPLORING && order != __ATOMIC_SEQ_CST && now.delays > 0 &&
                          t->buffered < BUFFER_STORES;
    if (now.phase != ALONE && (t->buffered > 0 || (may_delay && choose(2) == 1))) {
        if (t->buffered == 0) now.delays--;
        if (t->buffered == BUFFER_STORES) drain_oldest(t);
        t->buffer[t->buffered++] = (store){word, size, value};
        return;
    }
    write_word(word, size, value);
}

/* The two halves of a read-modify-write; nobody comes between them unless a bug is planted. */
static uint64_t begin_change(const volatile void *word, size_t size, model_plant split) {
    point();
    drain();
    const uint64_t found = read_word(word, size);
    if (model_is_planted(split)) point();
    return found;
}

uint64_t model_exchange(volatile void *word, size_t size, uint64_t value) {
    const uint64_t found = begin_change(word, size, MODEL_SPLIT_EXCHANGE);
    write_word(word, size, value);
    return found;
}

bool model_cas(volatile void *word, void *expected, size_t size, uint64_t value) {
    const uint64_t found = begin_change(word, size, MODEL_SPLIT_CAS);
    const bool equal = read_word(expected, size) == found;
    if (equal)
        write_word(word, size, value);
    else
        write_word(expected, size, found);
    return equal;
}

uint64_t model_modify(volatile void *word, size_t size, model_change change, uint64_t value) {
    const uint64_t found = begin_change(word, size, MODEL_SPLIT_MODIFY);
    const uint64_t changed[] = {[MODEL_ADD] = found + value,
                                [MODEL_SUB] = found - value,
                                [MODEL_AND] = found & value,
                                [MODEL_OR] = found | value,
                                [MODEL_XOR] = found ^ value};
    write_word(word, size, changed[change]);
    return found;
}

void model_fence(void) {
    point();
    if (!model_is_planted(MODEL_NO_FENCE)) drain();
}

/* ---- crashes ---------------------------------------------------------------------------- */

/* What a broken structure may lead to; the coroutine's stack is left behind. */
static void crash(int signal) {
    (void)signal;
    now.failed = "the threads crash";
    leave();
}

static void catch_crashes(struct sigaction before[2]) {
    static _Alignas(16) unsigned char stack[64u << 10];
    const stack_t alternate = {.ss_sp = stack, .ss_size = sizeof stack};
    struct sigaction action = {.sa_handler = crash, .sa_flags = SA_ONSTACK | SA_NODEFER};
    (void)sigaltstack(&alternate, NULL);
    (void)sigaction(SIGSEGV, &action, &before[0]);
    (void)sigaction(SIGBUS, &action, &before[1]);
}

/* ---- runs ------------------------------------------------------------------------------- */

static void begin_run(void) {
    now.count = now.current = 0;
    now.depth = 0;
    now.preemptions = now.program->preemptions;
    now.delays = now.program->delays;
    now.steps = now.since_switch = 0;
    now.failed = NULL;
    now.written = 0;
    model_memory_begin();
    now.phase = ALONE;
}

static void add_program_threads(void) {
    for (size_t i = 0; i < MODEL_PROGRAM_THREADS; i++)
        if (now.program->threads[i] != NULL)
            (void)add_thread((thread){.program = now.program->threads[i]});
}

/* Runs until nobody can. The first choice is who begins. */
static void run_all(void) {
    if (_setjmp(now.home) == 0) resume((int)choose((unsigned)now.count));
}

static int all_ended(int count) {
    for (int i = 0; i < count; i++)
        if (!now.threads[i].ended) return 0;
    return 1;
}

static void setup_alone(void) {
    if (_setjmp(now.home) == 0) now.program->setup();
}

static void finish_run(void) {
    now.phase = FINISHING;
    const int last = add_thread((thread){.program = now.program->finish});
    if (_setjmp(now.home) == 0) resume(last);
    if (now.failed == NULL && !all_ended(now.count)) now.failed = "a thread never ends";
    if (now.failed == NULL) now.failed = model_memory_fault();
}

static void run_once(void) {
    begin_run();
    add_program_threads();
    const int program_threads = now.count;
    setup_alone();
    if (now.failed != NULL) return;
    now.phase = EXPLORING;
    run_all();
    if (now.failed == NULL && !all_ended(program_threads)) now.failed = "a thread sleeps for ever";
    if (now.failed == NULL) finish_run();
    now.phase = ALONE;
}

model_outcome model_explore(const model_program *program, model_plant plant) {
    model_outcome outcome = {0};
    struct sigaction before[2];
    catch_crashes(before);
    now.program = program;
    now.plant = plant;
    now.length = 0;
    do {
        run_once();
        outcome.runs++;
        if (now.steps > outcome.steps) outcome.steps = now.steps;
    } while (now.failed == NULL && next_run());
    (void)sigaction(SIGSEGV, &before[0], NULL);
    (void)sigaction(SIGBUS, &before[1], NULL);
    outcome.failed = now.failed;
    memcpy(outcome.schedule, now.schedule, sizeof outcome.schedule);
    return outcome;
}
