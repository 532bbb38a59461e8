# The library, compiled once: `penstock`, shared, with public names only, is what users get;
# `penstock_internal`, static, lets tests reach everything.
find_package(Threads REQUIRED)

file(GLOB sources CONFIGURE_DEPENDS base/*.c tracing/*.c sched/*.c sched/device/*.c sched/cuda/*.c
     mem/*.c ops/*/*.c ops/*/*/*.c)
if(PENSTOCK_CUDA_INCLUDE)
  list(FILTER sources EXCLUDE REGEX "/sched/cuda/absent\\.c$")
else()
  list(FILTER sources EXCLUDE REGEX "/sched/cuda/[a-z]+\\.c$")
  list(APPEND sources ${CMAKE_CURRENT_SOURCE_DIR}/sched/cuda/absent.c)
endif()
if(PENSTOCK_NCCL_INCLUDE)
  list(FILTER sources EXCLUDE REGEX "/ops/comm/nccl/absent\\.c$")
else()
  list(FILTER sources EXCLUDE REGEX "/ops/comm/nccl/[a-z]+\\.c$")
  list(APPEND sources ${CMAKE_CURRENT_SOURCE_DIR}/ops/comm/nccl/absent.c)
endif()

set(PENSTOCK_SOURCES ${sources}) # tests/sim and tests/model compile them in their own ways

# The text of the kernels, which is compiled when a GPU is found.
set(kernels sched/device/adamw.h sched/cuda/arguments.h sched/cuda/kernels.cu sched/cuda/adamw.cu)
list(TRANSFORM kernels PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
set(kernels_source ${CMAKE_CURRENT_BINARY_DIR}/cuda_kernels_source.c)
add_custom_command(
  OUTPUT ${kernels_source}
  COMMAND ${CMAKE_COMMAND} -D NAME=pst__cuda_kernels_source -D OUTPUT=${kernels_source}
          -P ${CMAKE_CURRENT_SOURCE_DIR}/cmake/embed.cmake -- ${kernels}
  DEPENDS ${kernels} ${CMAKE_CURRENT_SOURCE_DIR}/cmake/embed.cmake VERBATIM)
if(PENSTOCK_CUDA_INCLUDE)
  list(APPEND sources ${kernels_source})
endif()

add_library(penstock_objects OBJECT ${sources} ${PENSTOCK_CK_SOURCES})
target_include_directories(
  penstock_objects PUBLIC include ${CMAKE_CURRENT_SOURCE_DIR} ${PENSTOCK_CK_INCLUDE}
                          ${PENSTOCK_JEMALLOC_INCLUDE})
target_include_directories(penstock_objects SYSTEM PUBLIC ${PENSTOCK_CUDA_INCLUDE}
                           ${PENSTOCK_NCCL_INCLUDE})
target_compile_definitions(penstock_objects PUBLIC _GNU_SOURCE)
target_compile_options(penstock_objects PUBLIC -Wall -Wextra -Wconversion)
# A multiply-add is fused where it is written so, as on GPUs: results have the same bits there.
target_compile_options(penstock_objects PUBLIC -ffp-contract=off)
# Loops over blocks of numbers: vectorised, square roots too.
set_source_files_properties(sched/device/host_adamw.c PROPERTIES
  COMPILE_OPTIONS "-O3;-fno-math-errno;-fno-trapping-math")
# What a task throws, or the end of its thread, unwinds the library's frames: see pst__advance_leave.
target_compile_options(penstock_objects PUBLIC $<$<COMPILE_LANGUAGE:C>:-fexceptions>)
if(PENSTOCK_SANITIZE STREQUAL "thread" AND CMAKE_C_COMPILER_ID STREQUAL "GNU")
  # gcc points out that the sanitizer takes no notice of lone fences; the accesses around each one
  # are atomic, which it does see.
  target_compile_options(penstock_objects PUBLIC -Wno-tsan)
endif()
set(needs ${PENSTOCK_CK_LIBRARY} ${PENSTOCK_JEMALLOC_LIBRARY} Threads::Threads ${CMAKE_DL_LIBS} m)

add_library(penstock_internal STATIC)
target_link_libraries(penstock_internal PUBLIC penstock_objects ${needs})

set(map ${CMAKE_CURRENT_SOURCE_DIR}/cmake/penstock.map)
add_library(penstock SHARED)
set_target_properties(penstock PROPERTIES SOVERSION 0 LINK_DEPENDS ${map})
if(NOT SKBUILD) # a wheel has no links, so there the file bears the name that programs look for
  set_target_properties(penstock PROPERTIES VERSION ${PROJECT_VERSION})
endif()
target_link_libraries(penstock PRIVATE penstock_objects ${needs})
target_include_directories(
  penstock INTERFACE $<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}/include>
                     $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
# nodelete: a thread that ends after dlclose would run jemalloc's destructor for it.
target_link_options(penstock PRIVATE -Wl,--version-script=${map} -Wl,--exclude-libs,ALL
                    -Wl,-z,nodelete)
if(NOT PENSTOCK_SANITIZE)
  target_link_options(penstock PRIVATE -Wl,-z,defs)
endif()
