/* The recorded rings as Chrome trace JSON. */
#ifndef PST_TRACING_CHROME_H
#define PST_TRACING_CHROME_H

#include "tracing/trace.h"

/* Holds a copy of the rings while it writes, and 64 KiB of text. Not beside pst__trace_start.
 * PST_EIO names the path and the system's reason, PST_ENOMEM. */
pst_status pst__chrome_write(pst__trace *trace, const char *path);

#endif
