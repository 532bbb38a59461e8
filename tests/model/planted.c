/* Linked with a bug in the library: the program that is named on the command line must find it. */
#include "programs.h"

#include <stdio.h>
#include <string.h>

static const struct {
    const char *name;
    const model_program *program;
} programs[] = {
    {"launch_over_launch", &launch_over_launch},
    {"two_launchers", &two_launchers},
    {"launch_in_callback", &launch_in_callback},
    {"destroy_after_wait", &destroy_after_wait},
    {"poison_and_launch", &poison_and_launch},
    {"poison_and_add", &poison_and_add},
    {"poison_and_add_gate", &poison_and_add_gate},
    {"growing_gate_and_destroy", &growing_gate_and_destroy},
    {"hook_and_poison", &hook_and_poison},
    {"hook_removed", &hook_removed},
    {"flight_behind_flight", &flight_behind_flight},
    {"late_edge_behind_flight", &late_edge_behind_flight},
    {"late_wait", &late_wait},
    {"flight_over_flight", &flight_over_flight},
    {"loop_and_helper", &loop_and_helper},
};

static const model_program *find(const char *name) {
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++)
        if (strcmp(programs[i].name, name) == 0) return programs[i].program;
    return NULL;
}

int main(int count, char **words) {
    const model_program *program = count == 2 ? find(words[1]) : NULL;
    if (program == NULL) {
        (void)fprintf(stderr, "usage: %s PROGRAM\n", words[0]);
        return 2;
    }
    const model_outcome outcome = model_explore(program, MODEL_NO_PLANT);
    printf("%s: %lu runs: %s\n", words[1], outcome.runs,
           outcome.failed == NULL ? "the planted bug was not found" : outcome.failed);
    return outcome.failed == NULL;
}
