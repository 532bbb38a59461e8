/* Single structures. */
#include "programs.h"
#include "sched/queue.h"

/* ---- the fan-in counter ----------------------------------------------------------------- */

static struct {
    pst__node node;
    int last;       /* how many arrivals were told that they are the last */
    int written[3]; /* what each predecessor leaves for the node */
    int seen;       /* how much of it the last one finds */
} fan;

static void set_up_fan(void) {
    fan.node = (pst__node){.pending = 3, .predecessors = 3};
    fan.last = fan.seen = 0;
    fan.written[0] = fan.written[1] = fan.written[2] = 0;
}

static void arrive(int who, pst_status status) {
    fan.written[who] = 1;
    if (status < 0) pst__node_inherit(&fan.node, status);
    if (!pst__node_arrive(&fan.node, 1)) return;
    fan.last++;
    fan.seen = fan.written[0] + fan.written[1] + fan.written[2];
}

static void arrive_a(void) {
    arrive(0, PST_OK);
}
static void arrive_b(void) {
    arrive(1, PST_OK);
}
static void arrive_c(void) {
    arrive(2, PST_OK);
}
static void fail_a(void) {
    arrive(0, PST_EIO);
}
static void fail_b(void) {
    arrive(1, PST_EDEVICE);
}

static void check_one_is_last(void) {
    model_check(fan.last == 1, "not exactly one predecessor was the last to come");
    model_check(fan.seen == 3, "the last predecessor misses what another wrote");
    model_check(pst__node_is_ready(&fan.node), "all have come and the node is not ready");
}

static void check_no_failure(void) {
    check_one_is_last();
    model_check(pst__pending_status(fan.node.pending) == PST_OK, "a failure out of nowhere");
}

static void check_one_failure(void) {
    check_one_is_last();
    const pst_status status = pst__pending_status(fan.node.pending);
    model_check(status == PST_EIO || status == PST_EDEVICE, "the failure is no predecessor's");
}

const model_program fan_in = {.setup = set_up_fan,
                              .threads = {arrive_a, arrive_b, arrive_c},
                              .finish = check_no_failure,
                              .preemptions = MODEL_UNBOUNDED};

const model_program fan_in_of_failures = {.setup = set_up_fan,
                                          .threads = {fail_a, fail_b, arrive_c},
                                          .finish = check_one_failure,
                                          .preemptions = MODEL_UNBOUNDED};

/* ---- arrivals --------------------------------------------------------------------------- */

enum { PUSHES = 2 };

static struct {
    pst__arrivals arrivals;
    pst__fifo fifo;
    pst__node nodes[2][PUSHES];
} lane;

static void set_up_lane(void) {
    ck_stack_init(&lane.arrivals.stack);
    lane.fifo = (pst__fifo){NULL, NULL};
}

static void push_all(int who) {
    for (int i = 0; i < PUSHES; i++)
        pst__arrivals_push(&lane.arrivals, &lane.nodes[who][i]);
}

static void push_a(void) {
    push_all(0);
}
static void push_b(void) {
    push_all(1);
}

static void move(void) {
    for (int i = 0; i < 2; i++)
        if (!pst__arrivals_empty(&lane.arrivals)) pst__arrivals_move(&lane.arrivals, &lane.fifo);
}

static void check_all_have_arrived(void) {
    int next[2] = {0, 0}, count = 0;
    if (!pst__arrivals_empty(&lane.arrivals)) pst__arrivals_move(&lane.arrivals, &lane.fifo);
    for (; lane.fifo.first != NULL; pst__fifo_remove_first(&lane.fifo), count++) {
        const pst__node *node = lane.fifo.first;
        const int who = node >= lane.nodes[1];
        model_check(node == &lane.nodes[who][next[who]++], "nodes overtake or come twice");
        model_check(count < 2 * PUSHES, "the queue has no end");
    }
    model_check(count == 2 * PUSHES, "a node is lost");
}

const model_program arrivals = {.setup = set_up_lane,
                                .threads = {push_a, push_b, move},
                                .finish = check_all_have_arrived,
                                .preemptions = 5};
