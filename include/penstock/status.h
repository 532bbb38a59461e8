/* penstock/status.h - status codes: every function that can fail returns one. */
#ifndef PENSTOCK_STATUS_H
#define PENSTOCK_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define PST_API __attribute__((visibility("default")))
#else
#define PST_API
#endif

/* One line a status: name, value, text. Zero is success, positive means "not yet", negative is an
 * error. */
#define PST_STATUS_MAP(X)                                                                          \
    X(PENDING, 1, "in progress")                                                                   \
    X(OK, 0, "success")                                                                            \
    X(EINVAL, -1, "invalid argument")                                                              \
    X(ENOMEM, -2, "out of memory")                                                                 \
    X(EBUSY, -3, "object is in use")                                                               \
    X(ESTATE, -4, "operation does not fit the object's state")                                     \
    X(ECYCLE, -5, "the graph has a cycle")                                                         \
    X(ECANCELED, -6, "canceled")                                                                   \
    X(ETIMEDOUT, -7, "deadline passed")                                                            \
    X(EMISMATCH, -8, "ranks disagree")                                                             \
    X(EPEER, -9, "a peer or the connection to it failed")                                          \
    X(EDEVICE, -10, "device error")                                                                \
    X(EUNSUPPORTED, -11, "not supported by this device or communicator")                           \
    X(EIO, -12, "input or output failed")                                                          \
    X(ESYSTEM, -13, "a call to the operating system failed")                                       \
    X(ESKIPPED, -14, "it did not run, because what it waits for failed")

typedef enum pst_status {
#define PST_STATUS_ENUM(name, value, text) PST_##name = (value),
    PST_STATUS_MAP(PST_STATUS_ENUM)
#undef PST_STATUS_ENUM
} pst_status;

/* The constant's name without prefix ("ENOMEM"), and its one-line text. Static strings, never NULL,
 * also for values that are no status. Any thread. */
PST_API const char *pst_status_name(pst_status status);
PST_API const char *pst_status_text(pst_status status);

#ifdef __cplusplus
}
#endif
#endif
