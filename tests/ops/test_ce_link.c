/* How ranks of `ce` get to each other: past strangers, and where there are no descriptors left. */
#include "ce_world.h"

#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- strangers ------------------------------------------------------------------------------- */

#define NOBODY 65534u

/* The address in a line of /proc/net/unix, if a socket of ours listens there. */
static socklen_t listening_address(const char *line, struct sockaddr_un *address) {
    unsigned flags, type, state;
    char name[sizeof address->sun_path];
    if (sscanf(line, "%*s %*s %*s %x %x %x %*s %107s", &flags, &type, &state, name) != 4 ||
        flags != 0x10000 || type != SOCK_SEQPACKET)
        return 0;
    const size_t length = strlen(name);
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(address->sun_path, name, length);
    if (name[0] != '@') return sizeof *address;
    address->sun_path[0] = '\0';
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length);
}

/* Of another user: connects as often as it can to every socket that listens, and stays. */
static int connect_as_stranger(int told) {
    struct sockaddr_un address;
    char line[512];
    FILE *sockets = fopen("/proc/net/unix", "r");
    if (setgid(NOBODY) != 0 || setuid(NOBODY) != 0 || sockets == NULL) return 1;
    while (fgets(line, sizeof line, sockets) != NULL) {
        const socklen_t length = listening_address(line, &address);
        for (int i = 0; length > 0 && i < 40; i++) {
            const int made = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0);
            if (connect(made, (struct sockaddr *)&address, length) != 0) break;
        }
    }
    (void)!write(told, "", 1);
    (void)pause();
    return 0;
}

static pid_t bring_stranger(void) {
    int ends[2];
    char byte;
    assert_int_equal(pipe(ends), 0);
    const pid_t made = fork();
    if (made == 0) _exit(connect_as_stranger(ends[1]));
    (void)close(ends[1]);
    assert_int_equal(read(ends[0], &byte, 1), 1);
    (void)close(ends[0]);
    return made;
}

/* The ranks' own exchange. Where they tell each other their sockets they go on when a stranger has
 * connected. */
typedef struct visited_exchange {
    pst_exchange inner;
    pid_t *stranger; /* rank 0's; NULL: of other ranks */
} visited_exchange;

static pst_status visited_all_gather(void *context, const void *mine, size_t bytes, void *all) {
    visited_exchange *visited = context;
    pst_status status = visited->inner.all_gather(visited->inner.context, mine, bytes, all);
    const int has_names = bytes > sizeof(struct sockaddr_un);
    if (has_names && visited->stranger != NULL) *visited->stranger = bring_stranger();
    char word = 0, words[PST_CE_MAX_RANKS];
    if (has_names && status == PST_OK)
        status = visited->inner.all_gather(visited->inner.context, &word, sizeof word, words);
    return status;
}

static pid_t stranger;

static void create_among_strangers(ce_rank *rank) {
    visited_exchange visited = {rank->exchange, rank->rank == 0 ? &stranger : NULL};
    const pst_exchange exchange = {visited_all_gather, &visited, rank->rank, rank->world->size};
    rank->status = pst_ce_create(rank->runtime, rank->world->device, &exchange, NULL, &rank->comm);
}

static ce_world *prepare_world(int size) {
    ce_world *world = calloc(1, sizeof *world);
    world->size = size;
    world->sim.latency_ns = 100;
    ce_prepare(world);
    return world;
}

static void close_world(ce_world *world) {
    for (int rank = 0; rank < world->size; rank++) {
        void *home; /* which ce_close frees */
        assert_int_equal(
            world->device->ops->alloc(world->device, PST_MEMORY_DEVICE, CE_HOME, &home), PST_OK);
        world->ranks[rank].home = home;
    }
    ce_close(world);
    free(world);
}

static void strangers_are_turned_away(void **state) {
    (void)state;
    if (geteuid() != 0) {
        print_message("skipped: only root can become another user\n");
        skip();
    }
    ce_world *world = prepare_world(3);
    ce_on_all(world, create_among_strangers);
    (void)kill(stranger, SIGKILL);
    (void)waitpid(stranger, NULL, 0);
    ce_assert_all(world, PST_OK);
    close_world(world);
}

/* ---- descriptors ----------------------------------------------------------------------------- */

static int full_at, received; /* the message that finds no room for a descriptor; atomic: so far */

ssize_t __real_recvmsg(int socket, struct msghdr *header, int flags);
ssize_t __wrap_recvmsg(int socket, struct msghdr *header, int flags);

ssize_t __wrap_recvmsg(int socket, struct msghdr *header, int flags) {
    struct rlimit usual, full;
    char byte;
    (void)recv(socket, &byte, 1, MSG_PEEK); /* what has come is counted */
    if (__atomic_add_fetch(&received, 1, __ATOMIC_RELAXED) != full_at)
        return __real_recvmsg(socket, header, flags);
    (void)getrlimit(RLIMIT_NOFILE, &usual);
    full = usual;
    full.rlim_cur = 0;
    (void)setrlimit(RLIMIT_NOFILE, &full);
    const ssize_t got = __real_recvmsg(socket, header, flags);
    (void)setrlimit(RLIMIT_NOFILE, &usual);
    return got;
}

/* 1 when the communicators work, 0 when there are none. */
static int create_with_full_table(int at) {
    ce_world *world = prepare_world(2);
    full_at = at;
    __atomic_store_n(&received, 0, __ATOMIC_RELAXED);
    ce_on_all(world, ce_create_rank);
    full_at = 0;
    const int is_made = world->ranks[0].comm != NULL;
    for (int rank = 0; rank < 2; rank++) {
        pst_comm *comm = world->ranks[rank].comm;
        assert_int_equal(comm != NULL, is_made);
        assert_int_equal(world->ranks[rank].status == PST_OK, is_made);
        if (is_made) assert_int_equal(comm->ops->status(comm), PST_OK);
    }
    close_world(world);
    return is_made;
}

/* The boards, then two pieces of memory: of each a message with a descriptor and one without, to
 * both ranks. */
static void a_rank_without_a_free_descriptor_fails_on_all(void **state) {
    (void)state;
    for (int at = 1; at <= 12; at++) {
        const int has_descriptor = (at - 1) % 4 < 2;
        if (has_descriptor && create_with_full_table(at)) fail_msg("made at %d", at);
    }
    assert_int_equal(create_with_full_table(13), 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(strangers_are_turned_away),
        cmocka_unit_test(a_rank_without_a_free_descriptor_fails_on_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
