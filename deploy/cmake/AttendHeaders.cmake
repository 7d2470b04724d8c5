# SPDX-License-Identifier: Apache-2.0
# Proves that every header of the product compiles alone. One with a source of its own is that
# source's first include (tests/style.py). For each other one, attend_headers compiles a file that
# includes it, twice to prove its guard, and nothing else.
#
# Left out: .cuh, which only nvcc compiles, and CUDA's headers where there is no toolkit.

find_package(CLI11 REQUIRED)
find_package(hwy REQUIRED)
find_package(TBB REQUIRED)

set(folders client kernels proto server)
list(TRANSFORM folders PREPEND ${PROJECT_SOURCE_DIR}/)
list(TRANSFORM folders APPEND /*.h OUTPUT_VARIABLE patterns)
file(GLOB_RECURSE headers RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS ${patterns})
set(alone)
foreach(header IN LISTS headers)
  cmake_path(REMOVE_EXTENSION header LAST_ONLY OUTPUT_VARIABLE stem)
  if(EXISTS ${PROJECT_SOURCE_DIR}/${stem}.cc OR EXISTS ${PROJECT_SOURCE_DIR}/${stem}.cu
     OR (header MATCHES "^kernels/cuda/" AND NOT ATTEND_WITH_CUDA))
    continue()
  endif()
  set(source ${CMAKE_CURRENT_BINARY_DIR}/headers/${stem}.cc)
  file(CONFIGURE OUTPUT ${source} CONTENT "#include \"@header@\"\n#include \"@header@\"\n" @ONLY)
  list(APPEND alone ${source})
endforeach()

add_library(attend_headers OBJECT ${alone})
target_compile_options(attend_headers PRIVATE -O0)
target_link_libraries(attend_headers PRIVATE
  attend_client_tool attend_kernels attend_server_lib CLI11::CLI11 TBB::tbb hwy::hwy)
