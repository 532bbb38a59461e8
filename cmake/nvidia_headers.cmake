# Headers of CUDA and NCCL, from the toolkit or from the wheels that torch depends on. Nothing of
# either is linked: their libraries are found when a device or communicator is created.

file(GLOB PENSTOCK_WHEELS /usr/lib/python3*/*-packages/nvidia/*/include
     /usr/local/lib/python3*/*-packages/nvidia/*/include
     ${CMAKE_CURRENT_SOURCE_DIR}/.venv/lib/python3*/site-packages/nvidia/*/include
     $ENV{VIRTUAL_ENV}/lib/python3*/site-packages/nvidia/*/include)
if(Python_EXECUTABLE)
  get_filename_component(prefix ${Python_EXECUTABLE} DIRECTORY)
  file(GLOB more ${prefix}/../lib/python3*/site-packages/nvidia/*/include)
  list(APPEND PENSTOCK_WHEELS ${more})
endif()

# Sets PENSTOCK_<library>_INCLUDE to the folder of `header`, empty where there is none in which
# `macro` is at least `minimum`; `without` is what is then not built.
function(penstock_find_headers library header version_header macro minimum without)
  set(PENSTOCK_${library}_INCLUDE "" PARENT_SCOPE)
  find_path(PENSTOCK_${library}_HEADERS ${header}
            HINTS $ENV{${library}_HOME}/include $ENV{${library}_PATH}/include
            PATHS /usr/local/cuda/include ${PENSTOCK_WHEELS})
  set(folder ${PENSTOCK_${library}_HEADERS})
  if(NOT folder)
    message(STATUS "No headers of ${library}: no ${without}")
    return()
  endif()
  file(STRINGS ${folder}/${version_header} version REGEX "^#define ${macro} ")
  string(REGEX MATCH "[0-9]+" version "${version}")
  if(version LESS minimum)
    message(STATUS "Headers of ${library} ${version} in ${folder}: no ${without} below ${minimum}")
    return()
  endif()
  message(STATUS "Headers of ${library} ${version} in ${folder}")
  set(PENSTOCK_${library}_INCLUDE ${folder} PARENT_SCOPE)
endfunction()

# CUDA 12.8, NCCL 2.27.
penstock_find_headers(CUDA cudaTypedefs.h cuda.h CUDA_VERSION 12080 "device cuda")
penstock_find_headers(NCCL nccl.h nccl.h NCCL_VERSION_CODE 22700 "communicator nccl")
if(NOT PENSTOCK_CUDA_INCLUDE)
  set(PENSTOCK_NCCL_INCLUDE "") # its headers include CUDA's
endif()
