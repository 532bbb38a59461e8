# penstock._C and penstock._dc: the bindings against the libtorch of PYTHON's own torch. Its paths
# come from torch itself, because torch's CMake package asks for a CUDA toolkit where torch was built
# with CUDA.
enable_language(CXX)
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)

set(ask_torch [[
import sys, torch
from torch.utils import cpp_extension as extension
print(*[";".join(extension.include_paths()), ";".join(extension.library_paths()),
        int(torch.compiled_with_cxx11_abi()), torch.__version__], sep="\n", end="")
]])
if(NOT PENSTOCK_TORCH_PYTHON STREQUAL Python_EXECUTABLE)
  execute_process(COMMAND ${Python_EXECUTABLE} -c "${ask_torch}" RESULT_VARIABLE result
                  OUTPUT_VARIABLE answer ERROR_VARIABLE error)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${Python_EXECUTABLE} cannot import torch 2.11:\n${error}")
  endif()
  string(REGEX MATCH "([^\n]*)\n([^\n]*)\n([01])\n([^\n]*)$" _ "${answer}")
  set(PENSTOCK_TORCH_INCLUDE "${CMAKE_MATCH_1}" CACHE INTERNAL "torch's include directories")
  set(PENSTOCK_TORCH_LIB "${CMAKE_MATCH_2}" CACHE INTERNAL "torch's library directories")
  set(PENSTOCK_TORCH_ABI "${CMAKE_MATCH_3}" CACHE INTERNAL "_GLIBCXX_USE_CXX11_ABI of torch")
  set(PENSTOCK_TORCH_PYTHON "${Python_EXECUTABLE}" CACHE INTERNAL "interpreter whose torch this is")
  message(STATUS "torch ${CMAKE_MATCH_4} of ${Python_EXECUTABLE}")
endif()

function(link_torch target)
  target_include_directories(${target} SYSTEM PRIVATE ${PENSTOCK_TORCH_INCLUDE})
  target_compile_definitions(${target} PRIVATE _GLIBCXX_USE_CXX11_ABI=${PENSTOCK_TORCH_ABI})
  # Lines and names for a backtrace; the types of torch's headers would double the time.
  target_compile_options(${target} PRIVATE -Wall -Wextra $<$<CONFIG:RelWithDebInfo>:-g1>)
  target_link_directories(${target} PRIVATE ${PENSTOCK_TORCH_LIB})
  target_link_libraries(${target} PRIVATE penstock torch torch_cpu c10 torch_python)
  # Torch's headers and templates take most of the time of a compilation: the files of a target are
  # compiled as one.
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
endfunction()

# What both extensions are made of, compiled once: they share no object at run time, so neither
# needs the other.
set(shared bindings/torch/c10d.cpp bindings/torch/comms.cpp bindings/torch/dumps.cpp
           bindings/torch/log.cpp bindings/torch/page.cpp bindings/torch/process.cpp
           bindings/torch/runtime.cpp bindings/torch/segments.cpp)
add_library(penstock_binding OBJECT ${shared})
target_link_libraries(penstock_binding PRIVATE Python::Module)
link_torch(penstock_binding)
# torch's headers are most of what a file takes to compile: they are read once for all of them.
target_precompile_headers(penstock_binding PRIVATE
  <ATen/ATen.h> <torch/csrc/utils/pybind.h> <pybind11/functional.h> <pybind11/stl.h>)

list(TRANSFORM shared PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
file(GLOB sources CONFIGURE_DEPENDS bindings/torch/*.cpp)
list(REMOVE_ITEM sources ${shared})
Python_add_library(penstock_torch MODULE WITH_SOABI ${sources})
target_compile_definitions(penstock_torch PRIVATE TORCH_EXTENSION_NAME=_C
                           PENSTOCK_VERSION="${PROJECT_VERSION}")

# DeepCompile's operators: a process can hold one TORCH_LIBRARY(dc), so they are loaded on demand.
file(GLOB sources CONFIGURE_DEPENDS bindings/torch/deepcompile/*.cpp)
Python_add_library(penstock_deepcompile MODULE WITH_SOABI ${sources})
target_include_directories(penstock_deepcompile PRIVATE bindings/torch)
target_compile_definitions(penstock_deepcompile PRIVATE TORCH_EXTENSION_NAME=_dc)

foreach(extension penstock_torch penstock_deepcompile)
  link_torch(${extension})
  target_link_libraries(${extension} PRIVATE penstock_binding)
  target_precompile_headers(${extension} REUSE_FROM penstock_binding)
endforeach()

# The package as it is imported from a build: the sources' files as links, the compiled ones
# beside them. libtorch is in the process already when _C is loaded, and needs no path.
set(package ${CMAKE_CURRENT_BINARY_DIR}/python/penstock)
set_target_properties(penstock_torch penstock_deepcompile PROPERTIES
  LIBRARY_OUTPUT_DIRECTORY ${package} BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH $ORIGIN)
set_target_properties(penstock_torch PROPERTIES OUTPUT_NAME _C)
set_target_properties(penstock_deepcompile PROPERTIES OUTPUT_NAME _dc)
set_target_properties(penstock PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${package})
add_custom_target(penstock_package ALL
  COMMAND ${CMAKE_COMMAND} -D FROM=${CMAKE_CURRENT_SOURCE_DIR}/bindings/python/penstock
          -D TO=${package} -P ${CMAKE_CURRENT_SOURCE_DIR}/cmake/link_package.cmake)

install(TARGETS penstock_torch penstock_deepcompile LIBRARY DESTINATION penstock
        COMPONENT python EXCLUDE_FROM_ALL)
install(TARGETS penstock LIBRARY DESTINATION penstock COMPONENT python
        NAMELINK_SKIP EXCLUDE_FROM_ALL)
