/* The profiler that is attached to the process, if one is: see penstock/trace.h. NVTX's headers
 * load the library that NVTX_INJECTION64_PATH names, and call it; there is nothing to link. */
#ifndef PST_TRACING_PROFILER_H
#define PST_TRACING_PROFILER_H

/* For a profiler that is attached: a range of the calling thread, which nests with its others. */
void pst__profiler_push(const char *name);
void pst__profiler_pop(void);

#endif
