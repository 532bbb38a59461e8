# NCCL's header, 2.27 or later, from the toolkit or from the wheels that torch depends on; nothing
# of NCCL is linked. It wants CUDA's headers (cmake/cuda.cmake).
#
# Sets PENSTOCK_NCCL_INCLUDE, empty where there is none.
find_path(PENSTOCK_NCCL_HEADERS nccl.h
          HINTS $ENV{NCCL_HOME}/include
          PATHS /usr/local/cuda/include ${wheels})
set(PENSTOCK_NCCL_INCLUDE "")
if(PENSTOCK_NCCL_HEADERS AND PENSTOCK_CUDA_INCLUDE)
  file(STRINGS ${PENSTOCK_NCCL_HEADERS}/nccl.h version REGEX "^#define NCCL_VERSION_CODE ")
  string(REGEX MATCH "[0-9]+" version "${version}")
  if(version GREATER_EQUAL 22700)
    set(PENSTOCK_NCCL_INCLUDE ${PENSTOCK_NCCL_HEADERS})
    message(STATUS "NCCL header ${version} in ${PENSTOCK_NCCL_HEADERS}")
  else()
    message(STATUS "NCCL's header in ${PENSTOCK_NCCL_HEADERS} is older than 2.27: no communicator nccl")
  endif()
else()
  message(STATUS "No NCCL header, or no CUDA headers: no communicator nccl")
endif()
