/* A program: what a pass has submitted, as one sealed graph with a gate in front of each operation.
 * A later pass that submits the same is a launch of it: it submits nothing, but gives each step its
 * operation and opens the gate. The steps of a lane start in the order of the script, as they would
 * in a growing graph. */
#ifndef PST_OPS_TRANSFER_PROGRAM_H
#define PST_OPS_TRANSFER_PROGRAM_H

#include "base/heap.h"

#include <penstock/graph.h>

/* A line of a script: an operation that was submitted. */
typedef struct pst__submission {
    const char *name, *path; /* they live as long as the executor */
    pst_lane *lane;
    pst_lane *second_lane; /* of its second part; NULL: it has none */
    int is_behind;         /* 1: it begins behind the line before it, which is of another lane */
    size_t bytes;
    int kind; /* what else tells it from others */
} pst__submission;

/* What a pass submits, in order, while it is noted. */
typedef struct pst__script {
    pst__submission *lines;
    size_t count, capacity;
    int is_open;
} pst__script;

/* What the tasks of an operation do: on their lanes' threads, as those of pst_task_options. */
typedef struct pst__operation_calls {
    pst_status (*start)(void *operation, pst_stream *stream);
    pst_status (*start_second)(void *operation, pst_stream *stream);
    pst_status (*test)(void *operation); /* of the first part; NULL: its device tells */
    void (*ended)(void *operation, pst_status status);
} pst__operation_calls;

typedef struct pst__program pst__program;

/* Notes a submission if the script is open; without memory it closes. */
void pst__script_note(const pst__heap *heap, pst__script *script, const pst__submission *line);
void pst__script_free(const pst__heap *heap, pst__script *script);

/* `name` is copied. PST_ENOMEM, and what the scheduler returns. */
pst_status pst__program_create(pst_runtime *runtime, const pst__heap *heap, const char *name,
                               const pst__script *script, const pst__operation_calls *calls,
                               pst__program **program);
/* Blocks until what was launched has ended; what does not within two seconds stays. */
void pst__program_destroy(pst__program *program);
/* Nothing of it is in flight. */
int pst__program_is_idle(const pst__program *program);

/* A pass begins. 0: the last one is still in flight, or the runtime is poisoned; it goes on
 * without.
 */
int pst__program_launch(pst__program *program);
/* Is this the step that comes next? */
int pst__program_expects(const pst__program *program, const pst__submission *line);
/* The next step is this operation: its tasks, which may start, end and call back at once. The task
 * is its last one, of this launch. The runtime's status if that was poisoned before: then nothing
 * of it is called. */
pst_status pst__program_give(pst__program *program, void *operation, uint64_t ticket,
                             pst_launch *launch, pst_task *task);
/* All steps have their operations. */
int pst__program_is_whole(const pst__program *program);
/* The pass has left the program: the steps that are left do nothing, and hold nobody up. */
void pst__program_leave(pst__program *program);

#endif
