/* A loop that is not the library's: it sleeps on pst_fd for no longer than pst_timeout. */
#include "program.h"
#include "system.h"
#include "threads.h"

/* Turns until there is nothing to do for now. 1 when all callbacks have come. */
static int turn(program *self) {
    for (;;) {
        int idle = 0;
        const pst_status status = pst_run_once(self->runtime, &idle);
        if (plan_has_ended(&self->plan)) return 1;
        if (idle) sim_fail("the runtime is idle, and not all callbacks have come");
        if (status == PST_PENDING) return 0;
        if (status != PST_OK) sim_fail("pst_run_once returned %d", (int)status);
    }
}

void loop_run(program *self) {
    for (;;) {
        const uint64_t pokes = system_pokes();
        if (turn(self)) return;
        system_poll(pst_timeout(self->runtime), pokes);
    }
}
