#include "ops/comm/ce/link.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

/* While the ranks connect each listens on a socket in a folder of its own, which no other user can
 * enter: nobody else takes a place in the line of those that connect. */
typedef struct listener {
    int socket;
    struct sockaddr_un name;
} listener;

/* What each rank sends the others through the exchange. */
typedef struct invitation {
    int status;
    struct sockaddr_un name;
} invitation;

/* /dev/shm comes first: ranks in containers of their own share that one for NCCL, too. */
static const char *const folders[] = {"/dev/shm/penstock-XXXXXX", "/tmp/penstock-XXXXXX"};

static void set_limit(int socket, uint64_t deadline_ns) {
    const struct timeval limit = {(time_t)(deadline_ns / 1000000000u),
                                  (suseconds_t)(deadline_ns / 1000u % 1000000u)};
    (void)setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    (void)setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

static int socket_create(uint64_t deadline_ns) {
    const int made = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (made >= 0) set_limit(made, deadline_ns);
    return made;
}

static void close_socket(int *socket) {
    if (*socket >= 0) (void)close(*socket);
    *socket = -1;
}

void pst__link_close(pst__link *link) {
    for (int rank = 0; rank < link->size; rank++)
        close_socket(&link->sockets[rank]);
}

/* ---- connecting ------------------------------------------------------------------------------ */

static int make_folder(char *path, size_t size) {
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        (void)snprintf(path, size, "%s", folders[i]);
        if (mkdtemp(path) != NULL) return 1; /* with mode 0700 */
    }
    path[0] = '\0';
    return 0;
}

static void remove_folder(char *path) {
    if (path[0] == '\0') return;
    (void)unlink(path);
    *strrchr(path, '/') = '\0';
    (void)rmdir(path);
}

static void listener_close(listener *listener) {
    close_socket(&listener->socket);
    remove_folder(listener->name.sun_path);
}

static void listener_open(listener *listener, int size, uint64_t deadline_ns) {
    struct sockaddr_un *name = &listener->name;
    *listener = (struct listener){.socket = -1, .name.sun_family = AF_UNIX};
    if (!make_folder(name->sun_path, sizeof name->sun_path)) return;
    const size_t used = strlen(name->sun_path);
    (void)snprintf(name->sun_path + used, sizeof name->sun_path - used, "/socket");
    listener->socket = socket_create(deadline_ns);
    if (listener->socket < 0 ||
        bind(listener->socket, (const struct sockaddr *)name, sizeof *name) != 0 ||
        listen(listener->socket, size) != 0)
        close_socket(&listener->socket);
}

/* 1 when the other end is a process of the same user. */
static int is_same_user(int socket, struct ucred *other) {
    socklen_t size = sizeof *other;
    return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, other, &size) == 0 &&
           other->uid == geteuid();
}

static pst_status no_connection(const pst__meeting_place *place, pst_status status, int peer,
                                const char *why) {
    return pst__fail(place->error, status,
                     "rank %d, %s: no connection with rank %d (%s); copy engines need ranks of one "
                     "machine and one user that share /dev/shm or /tmp",
                     place->exchange->rank, place->what, peer, why);
}

static pst_status connect_to(const pst__meeting_place *place, pst__link *link, int peer,
                             const struct sockaddr_un *name, uint64_t deadline_ns) {
    struct ucred other;
    const int made = socket_create(deadline_ns);
    link->sockets[peer] = made;
    if (made < 0) return no_connection(place, PST_ESYSTEM, peer, strerror(errno));
    if (connect(made, (const struct sockaddr *)name, sizeof *name) != 0)
        return no_connection(place, PST_EPEER, peer, strerror(errno));
    if (!is_same_user(made, &other))
        return no_connection(place, PST_EPEER, peer, "it has another user");
    if (TEMP_FAILURE_RETRY(send(made, &link->rank, sizeof link->rank, MSG_NOSIGNAL)) !=
        (ssize_t)sizeof link->rank)
        return no_connection(place, PST_EPEER, peer, strerror(errno));
    return PST_OK;
}

/* From a rank above this one, which has said which it is before anybody accepts. */
static int is_expected(const pst__meeting_place *place, const pst__link *link, int socket,
                       int *peer) {
    struct ucred other = {0};
    if (is_same_user(socket, &other) &&
        TEMP_FAILURE_RETRY(recv(socket, peer, sizeof *peer, MSG_DONTWAIT)) ==
            (ssize_t)sizeof *peer &&
        *peer > link->rank && *peer < link->size && link->sockets[*peer] < 0)
        return 1;
    pst__log(place->error, PST_LOG_WARNING,
             "rank %d, %s: process %ld of user %lu, which is no rank, was turned away", link->rank,
             place->what, (long)other.pid, (unsigned long)other.uid);
    return 0;
}

static int find_missing(const pst__link *link) {
    int peer = link->rank + 1;
    while (peer < link->size && link->sockets[peer] >= 0)
        peer++;
    return peer;
}

/* All that are expected have connected. */
static pst_status accept_above(const pst__meeting_place *place, pst__link *link, int listener,
                               uint64_t deadline_ns) {
    for (int missing; (missing = find_missing(link)) < link->size;) {
        struct pollfd ready = {.fd = listener, .events = POLLIN};
        if (poll(&ready, 1, 0) <= 0)
            return no_connection(place, PST_EPEER, missing, "it did not come");
        int peer, made = (int)TEMP_FAILURE_RETRY(accept4(listener, NULL, NULL, SOCK_CLOEXEC));
        if (made < 0) return no_connection(place, PST_ESYSTEM, missing, strerror(errno));
        if (is_expected(place, link, made, &peer)) {
            set_limit(made, deadline_ns);
            link->sockets[peer] = made;
        } else {
            close_socket(&made);
        }
    }
    return PST_OK;
}

static pst_status connect_below(const pst__meeting_place *place, pst__link *link,
                                const invitation *invitations, uint64_t deadline_ns) {
    pst_status status = PST_OK;
    for (int peer = 0; status == PST_OK && peer < link->rank; peer++)
        status = connect_to(place, link, peer, &invitations[peer].name, deadline_ns);
    return status;
}

/* Nobody waits for a connection that a peer could not make: the listeners keep those that come
 * before they are accepted. */
static pst_status connect_all(const pst__meeting_place *place, pst__link *link, int listener,
                              const invitation *invitations, uint64_t deadline_ns) {
    pst_status status =
        pst__exchange_settle(place, connect_below(place, link, invitations, deadline_ns));
    if (status != PST_OK) return status;
    return pst__exchange_settle(place, accept_above(place, link, listener, deadline_ns));
}

static pst_status invite(const pst__meeting_place *place, listener *listener, uint64_t deadline_ns,
                         invitation *invitations) {
    invitation mine;
    memset(&mine, 0, sizeof mine);
    listener_open(listener, place->exchange->size, deadline_ns);
    mine.name = listener->name;
    mine.status = listener->socket < 0 ? PST_ESYSTEM : PST_OK;
    pst_status status = pst__exchange_all_gather(place, &mine, sizeof mine, invitations);
    for (int rank = 0; status == PST_OK && rank < place->exchange->size; rank++)
        if (invitations[rank].status != PST_OK)
            status = pst__fail(place->error, PST_EPEER, "%s: rank %d got no socket to listen on",
                               place->what, rank);
    return status;
}

pst_status pst__link_open(const pst__meeting_place *place, uint64_t deadline_ns, pst__link *link) {
    invitation invitations[PST_CE_MAX_RANKS];
    listener listener;
    *link = (pst__link){.rank = place->exchange->rank, .size = place->exchange->size};
    for (int rank = 0; rank < PST_CE_MAX_RANKS; rank++)
        link->sockets[rank] = -1;
    pst_status status = invite(place, &listener, deadline_ns, invitations);
    if (status == PST_OK)
        status = connect_all(place, link, listener.socket, invitations, deadline_ns);
    listener_close(&listener);
    if (status != PST_OK) pst__link_close(link);
    return status;
}

/* ---- messages -------------------------------------------------------------------------------- */

typedef union control {
    struct cmsghdr header;
    char bytes[CMSG_SPACE(sizeof(int))];
} control;

static pst_status outcome(ssize_t moved) {
    if (moved == (ssize_t)sizeof(pst__message)) return PST_OK;
    return moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) ? PST_ETIMEDOUT : PST_EPEER;
}

static pst_status send_one(int socket, const pst__message *message, int descriptor) {
    control control;
    struct iovec data = {(void *)(uintptr_t)message, sizeof *message};
    struct msghdr header = {.msg_iov = &data, .msg_iovlen = 1};
    memset(&control, 0, sizeof control);
    if (descriptor >= 0) {
        header.msg_control = &control;
        header.msg_controllen = sizeof control.bytes;
        struct cmsghdr *first = CMSG_FIRSTHDR(&header);
        first->cmsg_level = SOL_SOCKET;
        first->cmsg_type = SCM_RIGHTS;
        first->cmsg_len = CMSG_LEN(sizeof descriptor);
        memcpy(CMSG_DATA(first), &descriptor, sizeof descriptor);
    }
    return outcome(TEMP_FAILURE_RETRY(sendmsg(socket, &header, MSG_NOSIGNAL)));
}

static pst_status receive_one(int socket, pst__message *message, int *descriptor) {
    control control;
    struct iovec data = {message, sizeof *message};
    struct msghdr header = {.msg_iov = &data,
                            .msg_iovlen = 1,
                            .msg_control = &control,
                            .msg_controllen = sizeof control.bytes};
    const ssize_t got = TEMP_FAILURE_RETRY(recvmsg(socket, &header, MSG_CMSG_CLOEXEC));
    const struct cmsghdr *first = got > 0 ? CMSG_FIRSTHDR(&header) : NULL;
    /* Where this process has no descriptor left the kernel drops the one that was sent. */
    if (first != NULL && first->cmsg_type == SCM_RIGHTS &&
        first->cmsg_len >= CMSG_LEN(sizeof *descriptor))
        memcpy(descriptor, CMSG_DATA(first), sizeof *descriptor);
    return outcome(got);
}

static void close_all(int *descriptors, int size) {
    for (int rank = 0; rank < size; rank++)
        close_socket(&descriptors[rank]);
}

pst_status pst__link_swap(const pst__link *link, const pst__message *mine, int descriptor,
                          pst__message *messages, int *descriptors, int *culprit) {
    pst_status status = PST_OK;
    for (int peer = 0; peer < link->size; peer++)
        descriptors[peer] = -1;
    /* To those behind one that has gone, too: they would wait for this message before they see it.
     */
    for (int peer = 0; peer < link->size; peer++) {
        if (peer == link->rank) continue;
        const pst_status sent = send_one(link->sockets[peer], mine, descriptor);
        if (status != PST_OK || sent == PST_OK) continue;
        status = sent;
        *culprit = peer;
    }
    messages[link->rank] = *mine;
    for (int peer = 0; peer < link->size && status == PST_OK; peer++) {
        if (peer == link->rank) continue;
        status = receive_one(link->sockets[peer], &messages[peer], &descriptors[peer]);
        *culprit = peer;
    }
    if (status != PST_OK) close_all(descriptors, link->size);
    return status;
}

void pst__link_shut(const pst__link *link) {
    for (int rank = 0; rank < link->size; rank++)
        if (link->sockets[rank] >= 0) (void)shutdown(link->sockets[rank], SHUT_RDWR);
}

uint32_t pst__link_closed(const pst__link *link) {
    struct pollfd ends[PST_CE_MAX_RANKS];
    uint32_t closed = 0;
    for (int rank = 0; rank < link->size; rank++) /* poll ignores the -1 of the own rank */
        ends[rank] = (struct pollfd){.fd = link->sockets[rank], .events = POLLRDHUP};
    if (poll(ends, (nfds_t)link->size, 0) <= 0) return 0;
    for (int rank = 0; rank < link->size; rank++)
        if (ends[rank].revents != 0) closed |= UINT32_C(1) << rank;
    return closed;
}
