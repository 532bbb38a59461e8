# penstock._C: the binding against the libtorch of PYTHON's own torch. Its paths come from torch
# itself, because torch's CMake package asks for a CUDA toolkit where torch was built with CUDA.
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
  set(PENSTOCK_TORCH_PYTHON "${Python_EXECUTABLE}" CACHE INTERNAL "whom torch was asked of")
  message(STATUS "torch ${CMAKE_MATCH_4} of ${Python_EXECUTABLE}")
endif()

file(GLOB sources CONFIGURE_DEPENDS bindings/torch/*.cpp)
Python_add_library(penstock_torch MODULE WITH_SOABI ${sources})
target_include_directories(penstock_torch SYSTEM PRIVATE ${PENSTOCK_TORCH_INCLUDE})
target_compile_definitions(penstock_torch PRIVATE _GLIBCXX_USE_CXX11_ABI=${PENSTOCK_TORCH_ABI}
                           TORCH_EXTENSION_NAME=_C)
target_compile_options(penstock_torch PRIVATE -Wall -Wextra)
target_link_directories(penstock_torch PRIVATE ${PENSTOCK_TORCH_LIB})
target_link_libraries(penstock_torch PRIVATE penstock torch torch_cpu c10 torch_python)

# The package as it is imported from a build: the sources' files as links, the compiled ones
# beside them. libtorch is in the process already when _C is loaded, and needs no path.
set(package ${CMAKE_CURRENT_BINARY_DIR}/python/penstock)
set_target_properties(penstock_torch PROPERTIES
  OUTPUT_NAME _C LIBRARY_OUTPUT_DIRECTORY ${package} BUILD_WITH_INSTALL_RPATH ON
  INSTALL_RPATH $ORIGIN)
set_target_properties(penstock PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${package})
add_custom_target(penstock_package ALL
  COMMAND ${CMAKE_COMMAND} -D FROM=${CMAKE_CURRENT_SOURCE_DIR}/bindings/python/penstock
          -D TO=${package} -P ${CMAKE_CURRENT_SOURCE_DIR}/cmake/link_package.cmake)

install(TARGETS penstock_torch LIBRARY DESTINATION penstock COMPONENT python EXCLUDE_FROM_ALL)
install(TARGETS penstock LIBRARY DESTINATION penstock COMPONENT python
        NAMELINK_SKIP EXCLUDE_FROM_ALL)
