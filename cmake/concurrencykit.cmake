# concurrencykit: the distribution's headers and library. Under the thread sanitizer its inline
# assembly is replaced by compiler built-ins (sanitizer/thread/ck_pr.h), and the one compiled part
# that is used, the event count, is compiled against them.
#
# Sets PENSTOCK_CK_INCLUDE, PENSTOCK_CK_LIBRARY and PENSTOCK_CK_SOURCES.
include(${CMAKE_CURRENT_LIST_DIR}/fetch.cmake)

find_path(CK_INCLUDE ck_ec.h)
# The static one first, so that an installed libpenstock needs no package at run time.
find_library(CK_LIBRARY NAMES libck.a ck)
if(NOT CK_INCLUDE OR NOT CK_LIBRARY)
  message(FATAL_ERROR "concurrencykit is missing: install libck-dev (Debian, Ubuntu)")
endif()
set(PENSTOCK_CK_INCLUDE ${CK_INCLUDE})
set(PENSTOCK_CK_LIBRARY ${CK_LIBRARY})
set(PENSTOCK_CK_SOURCES "")

# SOURCE: the event count, to be compiled against headers of our own.
function(penstock_fetch_ck source)
  set(directory ${PROJECT_SOURCE_DIR}/.deps/ck)
  set(file ${directory}/ck-0.7.1/src/ck_ec.c)
  if(NOT EXISTS ${file})
    penstock_fetch(${directory} 296a4c803fecd1fb0191f78715c0ec97cc2d9109ed3c2c89b0385d4d2263d9c5
                   http://deb.debian.org/debian/pool/main/c/ck/ck_0.7.1.orig.tar.xz)
  endif()
  set(${source} ${file} PARENT_SCOPE)
endfunction()

if(PENSTOCK_SANITIZE STREQUAL "thread")
  penstock_fetch_ck(PENSTOCK_CK_SOURCES)
  set(PENSTOCK_CK_INCLUDE ${CMAKE_CURRENT_SOURCE_DIR}/cmake/sanitizer/thread ${CK_INCLUDE})
  set(PENSTOCK_CK_LIBRARY "")
  set_source_files_properties(${PENSTOCK_CK_SOURCES} PROPERTIES COMPILE_OPTIONS "-w")
endif()
