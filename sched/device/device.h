/* What a user of a device calls, and so must find filled in. */
#ifndef PST_SCHED_DEVICE_DEVICE_H
#define PST_SCHED_DEVICE_DEVICE_H

#include <penstock/device.h>

typedef enum pst__device_needs {
    PST__NEEDS_STREAMS = 1 << 0, /* lanes: streams, launches, events */
    PST__NEEDS_MEMORY = 1 << 1,
    PST__NEEDS_COPIES = 1 << 2, /* and the kernels */
    PST__NEEDS_ALL = PST__NEEDS_STREAMS | PST__NEEDS_MEMORY | PST__NEEDS_COPIES
} pst__device_needs;

/* The first of the slots needed that is NULL, by its name; NULL: none is. The device has this
 * library's interface version. */
const char *pst__device_lacks(const pst_device *device, unsigned needs);

/* Blocks until the stream has done all that it was given so far, for which the event is recorded
 * there; 0: not until pst__now() is `until`, or the device has failed. */
int pst__device_wait_stream(pst_device *device, pst_stream *stream, pst_event *event,
                            uint64_t until);

/* What the device has said to the calling thread about its latest failure; "" if it says nothing.
 */
static inline const char *pst__device_text(pst_device *device) {
    const char *text = device->ops->error_text == NULL ? NULL : device->ops->error_text(device);
    return text == NULL ? "" : text;
}

#endif
