// Where memory comes from that torch counts and other processes can map: the functions that
// torch.cuda.memory.CUDAPluggableAllocator asks for by name. Device memory of the device cuda,
// which any number of processes can map.
#pragma once

#include <sys/types.h>

#include <cstddef>

extern "C" {
__attribute__((visibility("default"))) void *penstock_segment_alloc(ssize_t bytes, int device,
                                                                    void *stream);
__attribute__((visibility("default"))) void penstock_segment_free(void *memory, size_t bytes,
                                                                  int device, void *stream);
}
