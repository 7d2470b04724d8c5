# SPDX-License-Identifier: Apache-2.0
# Compiler settings that every target shares, as the interface target attend_options.

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
endif()

find_package(Threads REQUIRED)

add_library(attend_options INTERFACE)
target_include_directories(attend_options INTERFACE ${CMAKE_SOURCE_DIR})
# -Wrestrict: GCC 12 sees overlaps in std::string's operator+ that are not there (GCC bug 105651).
set(warnings -Wall -Wextra -Wno-sign-compare -Wno-restrict -Werror)
# Another compiler's own warnings stop nobody: Clang builds the fuzz targets alone.
target_compile_options(attend_options INTERFACE "$<$<COMPILE_LANG_AND_ID:CXX,GNU>:${warnings}>")
target_link_libraries(attend_options INTERFACE Threads::Threads)

if(ATTEND_SANITIZE)
  # Of debug information only lines, which is what reports show: a fifth of the time for half of it.
  set(sanitize_flags -fsanitize=${ATTEND_SANITIZE} -fno-omit-frame-pointer -g1)
  if(ATTEND_SANITIZE MATCHES undefined)
    list(APPEND sanitize_flags -fno-sanitize-recover=undefined)
  endif()
  if(ATTEND_FUZZ)  # what libFuzzer sees of the code; and GCC's word for AddressSanitizer
    list(APPEND sanitize_flags -fsanitize=fuzzer-no-link)
    target_compile_definitions(attend_options INTERFACE __SANITIZE_ADDRESS__=1)
  endif()
  target_compile_options(attend_options INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${sanitize_flags}>")
  target_link_options(attend_options INTERFACE ${sanitize_flags})
  find_program(LLD_PROGRAM ld.lld)
  if(LLD_PROGRAM)
    add_link_options(-fuse-ld=lld)
  endif()
endif()
