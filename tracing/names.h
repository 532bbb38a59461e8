/* Copies of names that outlive their owners (pst__trace_intern); for tracing's own files. */
#ifndef PST_TRACING_NAMES_H
#define PST_TRACING_NAMES_H

#include "tracing/state.h"

void pst__names_destroy(pst__trace *trace);

#endif
