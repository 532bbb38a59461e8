# CUDA's headers, 12.8 or later, from the toolkit or from the wheels that torch depends on; nothing
# of CUDA is linked. Without them pst_cuda_device_create answers that it was not built.
#
# Sets PENSTOCK_CUDA_INCLUDE, empty where there are none.
file(GLOB wheels /usr/lib/python3*/*-packages/nvidia/*/include
     /usr/local/lib/python3*/*-packages/nvidia/*/include
     ${CMAKE_CURRENT_SOURCE_DIR}/.venv/lib/python3*/site-packages/nvidia/*/include
     $ENV{VIRTUAL_ENV}/lib/python3*/site-packages/nvidia/*/include)
if(Python_EXECUTABLE)
  get_filename_component(prefix ${Python_EXECUTABLE} DIRECTORY)
  file(GLOB more ${prefix}/../lib/python3*/site-packages/nvidia/*/include)
  list(APPEND wheels ${more})
endif()
find_path(PENSTOCK_CUDA_HEADERS cudaTypedefs.h
          HINTS $ENV{CUDA_HOME}/include $ENV{CUDA_PATH}/include
          PATHS /usr/local/cuda/include ${wheels})
set(PENSTOCK_CUDA_INCLUDE "")
if(PENSTOCK_CUDA_HEADERS)
  file(STRINGS ${PENSTOCK_CUDA_HEADERS}/cuda.h version REGEX "^#define CUDA_VERSION ")
  string(REGEX MATCH "[0-9]+" version "${version}")
  if(version GREATER_EQUAL 12080)
    set(PENSTOCK_CUDA_INCLUDE ${PENSTOCK_CUDA_HEADERS})
    message(STATUS "CUDA headers ${version} in ${PENSTOCK_CUDA_HEADERS}")
  else()
    message(STATUS "CUDA headers in ${PENSTOCK_CUDA_HEADERS} are older than 12.8: no device cuda")
  endif()
else()
  message(STATUS "No CUDA headers: no device cuda")
endif()
