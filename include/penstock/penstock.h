/* penstock/penstock.h - all public headers. */
#ifndef PENSTOCK_PENSTOCK_H
#define PENSTOCK_PENSTOCK_H

#include <penstock/comm.h>
#include <penstock/copy_engine.h>
#include <penstock/crossover.h>
#include <penstock/cuda.h>
#include <penstock/device.h>
#include <penstock/exchange.h>
#include <penstock/flat.h>
#include <penstock/graph.h>
#include <penstock/hierarchy.h>
#include <penstock/memory.h>
#include <penstock/nccl.h>
#include <penstock/offload.h>
#include <penstock/optim.h>
#include <penstock/page.h>
#include <penstock/partition.h>
#include <penstock/runtime.h>
#include <penstock/status.h>
#include <penstock/trace.h>
#include <penstock/zero.h>

#endif
