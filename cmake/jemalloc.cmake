# The metadata heap's allocator. A distribution's libjemalloc cannot be loaded into a running
# process (its thread-local storage is of the initial-exec kind), so one is built here that can,
# with all its names behind the prefix pst_je_.
#
# Sets PENSTOCK_JEMALLOC_INCLUDE and PENSTOCK_JEMALLOC_LIBRARY.
include(${CMAKE_CURRENT_LIST_DIR}/fetch.cmake)

set(PENSTOCK_JEMALLOC "${CMAKE_CURRENT_SOURCE_DIR}/.deps/jemalloc/b" CACHE PATH
    "Where jemalloc is built, or was: include/ and lib/libjemalloc_pic.a, prefix pst_je_")

function(penstock_run directory)
  execute_process(COMMAND ${ARGN} WORKING_DIRECTORY ${directory} RESULT_VARIABLE result
                  OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    string(LENGTH "${output}" length)
    if(length GREATER 3000)
      math(EXPR begin "${length} - 3000")
      string(SUBSTRING "${output}" ${begin} -1 output)
    endif()
    message(FATAL_ERROR "'${ARGN}' failed in ${directory}: ${result}\n${output}")
  endif()
endfunction()

# Whether `build` holds a library of these flags. A library without a stamp was brought along, and
# is taken as it is.
function(penstock_has_jemalloc result build flags)
  set(have "${flags}")
  if(EXISTS ${build}/penstock.stamp)
    file(READ ${build}/penstock.stamp have)
  endif()
  if(have STREQUAL flags AND EXISTS ${build}/lib/libjemalloc_pic.a)
    set(${result} TRUE PARENT_SCOPE)
  else()
    set(${result} FALSE PARENT_SCOPE)
  endif()
endfunction()

function(penstock_build_jemalloc build version revision sha256)
  set(flags
      --with-version=${version}-0-g${revision}
      --with-jemalloc-prefix=pst_je_ --with-private-namespace=pst_je_ --without-export
      --disable-initial-exec-tls # dlopen works
      --disable-cxx --disable-libdl --disable-shared --disable-doc
      --disable-fill --disable-cache-oblivious
      --with-lg-page=12 --with-lg-hugepage=21
      "CFLAGS=-O3 -fPIC -fvisibility=hidden")
  penstock_has_jemalloc(found ${build} "${flags}")
  if(found)
    return()
  endif()
  get_filename_component(directory ${build} DIRECTORY)
  file(MAKE_DIRECTORY ${directory})
  file(LOCK ${directory} DIRECTORY GUARD FUNCTION TIMEOUT 600)
  penstock_has_jemalloc(found ${build} "${flags}") # by whoever held the lock
  if(found)
    return()
  endif()
  set(source ${directory}/jemalloc-${version})
  if(NOT EXISTS ${source}/configure)
    penstock_fetch(
      ${directory} ${sha256}
      http://deb.debian.org/debian/pool/main/j/jemalloc/jemalloc_${version}.orig.tar.bz2
      https://github.com/jemalloc/jemalloc/releases/download/${version}/jemalloc-${version}.tar.bz2)
  endif()
  message(STATUS "Building jemalloc ${version} (about a minute, once)")
  if(EXISTS ${build}/penstock.stamp)
    file(REMOVE_RECURSE ${build})
  endif()
  file(MAKE_DIRECTORY ${build})
  cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
  penstock_run(${build} ${source}/configure ${flags} CC=${CMAKE_C_COMPILER})
  penstock_run(${build} make -j${cores} build_lib_static)
  file(WRITE ${build}/penstock.stamp "${flags}")
endfunction()

if(PENSTOCK_SANITIZE)
  # The sanitizers watch the system's allocator only, so metadata comes from there.
  set(PENSTOCK_JEMALLOC_INCLUDE ${CMAKE_CURRENT_SOURCE_DIR}/cmake/sanitizer/heap)
  set(PENSTOCK_JEMALLOC_LIBRARY "")
else()
  penstock_build_jemalloc(
    ${PENSTOCK_JEMALLOC} 5.3.0 54eaed1d8b56b1aa528be3bdd1877e59c56fa90c
    2db82d1e7119df3e71b7640219b6dfe84789bc0537983c3b7ac4f7189aecfeaa)
  set(PENSTOCK_JEMALLOC_INCLUDE ${PENSTOCK_JEMALLOC}/include)
  set(PENSTOCK_JEMALLOC_LIBRARY ${PENSTOCK_JEMALLOC}/lib/libjemalloc_pic.a)
endif()
