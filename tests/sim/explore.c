/* Runs seeds, each a random program under a random schedule, and says which one broke what. */
#include "graphs.h"
#include "launchers.h"
#include "ranks.h"
#include "tests/random.h"
#include "threads.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const char usage[] =
    "explore [--seeds N] [--seed S] [--program NAME] [--twice] [--expect TEXT]\n"
    "  --seeds N       how many seeds to run (1000)\n"
    "  --seed S        the first of them (1)\n"
    "  --program NAME  graphs, ranks, flat or launchers: only this one\n"
    "  --twice         run each seed twice and compare the runs\n"
    "  --expect TEXT   succeed only if a seed fails, with TEXT in what it says\n";

typedef struct options {
    uint64_t seeds, first;
    const char *program, *expect;
    int twice;
} options;

static const struct {
    const char *name;
    void (*run)(void *seed);
} programs[] = {
    {"graphs", graphs_run}, {"ranks", ranks_run}, {"flat", flat_run}, {"launchers", launchers_run}};
#define PROGRAMS (sizeof programs / sizeof *programs)

/* ---- a seed ----------------------------------------------------------------------------- */

static uint64_t seed_now; /* for the signal handler */
static const options *options_now;

static size_t program_of(uint64_t seed, const char *wanted) {
    uint64_t random = seed;
    for (size_t i = 0; i < PROGRAMS; i++)
        if (wanted != NULL && strcmp(wanted, programs[i].name) == 0) return i;
    return random_below(&random, PROGRAMS);
}

static void run_seed(uint64_t seed, const options *options, sim_report *report) {
    const size_t program = program_of(seed, options->program);
    uint64_t random = seed ^ 0x5851f42d4c957f2du;
    uint64_t of_program = random_next(&random);
    seed_now = seed;
    sim_run(random_next(&random), programs[program].run, &of_program, report);
}

static void report_failure(uint64_t seed, const options *options, const char *text) {
    printf("seed %" PRIu64 " (%s): %s\n  replay: ./dev sim --seed %" PRIu64 " --seeds 1%s%s\n",
           seed, programs[program_of(seed, options->program)].name, text, seed,
           options->program == NULL ? "" : " --program ",
           options->program == NULL ? "" : options->program);
}

/* A planted bug may well end in a crash. */
static void crashed(int number) {
    char text[64];
    (void)snprintf(text, sizeof text, "crashed with signal %d", number);
    report_failure(seed_now, options_now, text);
    fflush(stdout);
    const char *expected = options_now->expect;
    _exit(expected != NULL && strstr(text, expected) != NULL ? 0 : 1);
}

static void catch_crashes(void) {
    static char stack[65536];
    const stack_t other = {.ss_sp = stack, .ss_size = sizeof stack};
    struct sigaction action = {.sa_handler = crashed, .sa_flags = SA_ONSTACK};
    (void)sigaltstack(&other, NULL);
    (void)sigaction(SIGSEGV, &action, NULL);
    (void)sigaction(SIGBUS, &action, NULL);
    (void)sigaction(SIGFPE, &action, NULL);
    (void)sigaction(SIGABRT, &action, NULL);
}

/* ---- many seeds ------------------------------------------------------------------------- */

static double seconds(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static int compare_again(uint64_t seed, const options *options, sim_report *first) {
    sim_report second;
    run_seed(seed, options, &second);
    if (second.signature == first->signature && second.points == first->points) return 1;
    (void)snprintf(first->text, sizeof first->text, "two runs of this seed differ");
    return 0;
}

static int explore(const options *options) {
    const double begin = seconds();
    uint64_t points = 0;
    sim_report report;
    for (uint64_t i = 0; i < options->seeds; i++) {
        const uint64_t seed = options->first + i;
        run_seed(seed, options, &report);
        if (!report.failed && options->twice)
            report.failed = !compare_again(seed, options, &report);
        points += report.points;
        if (!report.failed) continue;
        report_failure(seed, options, report.text);
        return options->expect == NULL || strstr(report.text, options->expect) == NULL;
    }
    const double spent = seconds() - begin;
    printf("%" PRIu64 " seeds from %" PRIu64 ": no invariant broken; %.0f points a seed, "
           "%.0f seeds a second\n",
           options->seeds, options->first, (double)points / (double)options->seeds,
           (double)options->seeds / spent);
    return options->expect != NULL;
}

static int parse(int count, char **words, options *options) {
    for (int i = 1; i < count; i++) {
        const char *value = i + 1 < count ? words[i + 1] : NULL;
        if (strcmp(words[i], "--twice") == 0)
            options->twice = 1;
        else if (value == NULL)
            return 0;
        else if (strcmp(words[i], "--seeds") == 0)
            options->seeds = strtoull(words[++i], NULL, 0);
        else if (strcmp(words[i], "--seed") == 0)
            options->first = strtoull(words[++i], NULL, 0);
        else if (strcmp(words[i], "--program") == 0)
            options->program = words[++i];
        else if (strcmp(words[i], "--expect") == 0)
            options->expect = words[++i];
        else
            return 0;
    }
    return options->seeds > 0;
}

int main(int count, char **words) {
    options options = {.seeds = 1000, .first = 1};
    if (!parse(count, words, &options)) {
        fputs(usage, stderr);
        return 2;
    }
    options_now = &options;
    catch_crashes();
    return explore(&options);
}
