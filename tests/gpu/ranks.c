#include "ranks.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SLOT_BYTES   65536
#define PEER_SECONDS 120.0

typedef struct gate {
    int arrived;    /* at the present barrier */
    unsigned round; /* barriers so far */
} gate;

/* Between the ranks. Loads and stores are sequentially consistent: this is set-up, not speed. */
typedef struct meeting {
    gate all;
    gate groups[2][RANKS_MOST]; /* of stride 1, of others; by first rank */
    int gone;                   /* a rank has ended without success */
    char failures[RANKS_MOST][RANKS_TEXT];
    char slots[RANKS_MOST][SLOT_BYTES];
} meeting;

typedef struct rank {
    rank_context context;
    rank_group all;
    meeting *meeting;
    rank_body body;
    pthread_t thread;
    pid_t process;
    int over;
} rank;

static double now(void) {
    struct timespec time;
    (void)clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void nap(void) {
    (void)nanosleep(&(struct timespec){0, 20000}, NULL);
}

/* ---- the exchange ---------------------------------------------------------------------------- */

static pst_status barrier(meeting *meeting, gate *gate, int size) {
    double until = now() + PEER_SECONDS;
    unsigned round = __atomic_load_n(&gate->round, __ATOMIC_SEQ_CST);
    if (__atomic_add_fetch(&gate->arrived, 1, __ATOMIC_SEQ_CST) == size) {
        __atomic_store_n(&gate->arrived, 0, __ATOMIC_SEQ_CST);
        __atomic_store_n(&gate->round, round + 1, __ATOMIC_SEQ_CST);
        return PST_OK;
    }
    while (__atomic_load_n(&gate->round, __ATOMIC_SEQ_CST) == round) {
        if (__atomic_load_n(&meeting->gone, __ATOMIC_SEQ_CST)) return PST_EPEER;
        if (now() > until) return PST_ETIMEDOUT;
        nap();
    }
    return PST_OK;
}

static pst_status gather_part(const rank_group *group, const char *mine, size_t part, char *all,
                              size_t bytes) {
    meeting *meeting = group->rank->meeting;
    memcpy(meeting->slots[group->rank->context.rank], mine, part);
    pst_status status = barrier(meeting, group->gate, group->size);
    if (status != PST_OK) return status;
    for (int i = 0; i < group->size; i++)
        memcpy(all + (size_t)i * bytes, meeting->slots[group->first + i * group->stride], part);
    return barrier(meeting, group->gate, group->size);
}

static pst_status all_gather(void *context, const void *mine, size_t bytes, void *all) {
    pst_status status = PST_OK;
    for (size_t done = 0; status == PST_OK && done < bytes; done += SLOT_BYTES) {
        size_t left = bytes - done;
        status = gather_part(context, (const char *)mine + done,
                             left < SLOT_BYTES ? left : SLOT_BYTES, (char *)all + done, bytes);
    }
    return status;
}

pst_exchange rank_group_exchange(rank_context *context, rank_group *group, int first, int stride,
                                 int size) {
    rank_group *all = context->exchange.context;
    struct meeting *meeting = all->rank->meeting;
    *group = (rank_group){all->rank, &meeting->groups[stride != 1][first], first, stride, size};
    return (pst_exchange){all_gather, group, (context->rank - first) / stride, size};
}

void rank_meet(rank_context *context) {
    const rank_group *all = context->exchange.context;
    pst_status status = barrier(all->rank->meeting, all->gate, all->size);
    if (status != PST_OK)
        rank_fail(context, __FILE__, __LINE__, "meeting the others: %s", pst_status_text(status));
}

void rank_fail(rank_context *context, const char *file, int line, const char *format, ...) {
    if (context->failure[0] != '\0') return;
    int used = snprintf(context->failure, RANKS_TEXT, "%s:%d: ", file, line);
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(context->failure + used, RANKS_TEXT - (size_t)used, format, arguments);
    va_end(arguments);
}

/* ---- running --------------------------------------------------------------------------------- */

static void *run_rank(void *argument) {
    rank *rank = argument;
    rank->body(&rank->context);
    if (rank->context.failure[0] != '\0')
        __atomic_store_n(&rank->meeting->gone, 1, __ATOMIC_SEQ_CST);
    __atomic_store_n(&rank->over, 1, __ATOMIC_SEQ_CST);
    return NULL;
}

static void start(rank *rank, int threads) {
    if (threads) {
        if (pthread_create(&rank->thread, NULL, run_rank, rank) != 0) abort();
        return;
    }
    rank->process = fork();
    if (rank->process < 0) abort();
    if (rank->process > 0) return;
    (void)run_rank(rank);
    (void)fflush(NULL);
    _exit(rank->context.failure[0] != '\0'); /* without what the parent has registered at exit */
}

static void note_end(rank *rank, int state, int may_die) {
    rank->over = 1;
    if (WIFEXITED(state) && WEXITSTATUS(state) == 0) return;
    __atomic_store_n(&rank->meeting->gone, 1, __ATOMIC_SEQ_CST);
    if (may_die || rank->context.failure[0] != '\0') return;
    if (WIFSIGNALED(state))
        rank_fail(&rank->context, __FILE__, __LINE__, "ended by signal %d", WTERMSIG(state));
    else
        rank_fail(&rank->context, __FILE__, __LINE__, "exit status %d", WEXITSTATUS(state));
}

/* 1 when it is over. */
static int look(rank *rank, int threads, int may_die) {
    int state = 0;
    if (threads) return __atomic_load_n(&rank->over, __ATOMIC_SEQ_CST);
    if (!rank->over && waitpid(rank->process, &state, WNOHANG) == rank->process)
        note_end(rank, state, may_die);
    return rank->over;
}

static void give_up(rank *rank, int threads) {
    rank_fail(&rank->context, __FILE__, __LINE__, "not over in time");
    __atomic_store_n(&rank->meeting->gone, 1, __ATOMIC_SEQ_CST);
    if (threads) return;
    (void)kill(rank->process, SIGKILL);
    (void)waitpid(rank->process, NULL, 0);
}

static int report(rank *ranks, int count) {
    int failures = 0;
    for (int i = 0; i < count; i++) {
        if (ranks[i].context.failure[0] == '\0') continue;
        (void)fprintf(stderr, "rank %d: %s\n", i, ranks[i].context.failure);
        failures++;
    }
    return failures;
}

int ranks_run(const ranks_options *options, rank_body body, void *argument) {
    static rank ranks[RANKS_MOST];
    meeting *meeting =
        mmap(NULL, sizeof *meeting, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (meeting == MAP_FAILED || options->count > RANKS_MOST) abort();
    int left = options->count;
    double until = now() + options->seconds;
    (void)fflush(NULL); /* what is in a buffer would be printed by each process */
    for (int i = 0; i < options->count; i++) {
        ranks[i] = (rank){.meeting = meeting, .body = body};
        ranks[i].all = (rank_group){&ranks[i], &meeting->all, 0, 1, options->count};
        ranks[i].context =
            (rank_context){.rank = i,
                           .size = options->count,
                           .exchange = {all_gather, &ranks[i].all, i, options->count},
                           .argument = argument,
                           .failure = meeting->failures[i]};
        start(&ranks[i], options->threads);
    }
    while (left > 0 && now() < until) {
        nap();
        left = 0;
        for (int i = 0; i < options->count; i++)
            left += !look(&ranks[i], options->threads, (int)(options->may_die >> i & 1u));
    }
    for (int i = 0; i < options->count; i++)
        if (!look(&ranks[i], options->threads, 0)) give_up(&ranks[i], options->threads);
    int failures = report(ranks, options->count);
    if (options->threads && left > 0) _exit(1); /* threads cannot be killed */
    for (int i = 0; options->threads && i < options->count; i++)
        (void)pthread_join(ranks[i].thread, NULL);
    (void)munmap(meeting, sizeof *meeting);
    return failures;
}
