# SPDX-License-Identifier: Apache-2.0
# Compiler settings that every target shares, as the interface target attend_options.

# Settings here apply to this folder and below, also if another project has added it.
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES AND PROJECT_IS_TOP_LEVEL)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
if(PROJECT_IS_TOP_LEVEL)
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
endif()
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")

# Compiles a target in two thirds of the time: for code that reads settings and prints text, and is
# not on a measured path.
function(attend_compile_fast target)
  target_compile_options(${target} PRIVATE "$<$<CONFIG:Release>:-O1>")
endfunction()

# Compiles the sources of a target's folders together in a release build, up to six at a time: most
# of a source's compile time is headers that its neighbours include too. The sources of a folder
# then share their anonymous namespaces. Other builds compile each source alone, which proves that
# it includes what it needs.
function(attend_unite target)
  if(NOT CMAKE_BUILD_TYPE STREQUAL "Release" OR ATTEND_SANITIZE)
    return()
  endif()
  set(together 6)
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "\\.cc$")
  foreach(source IN LISTS sources)
    cmake_path(GET source PARENT_PATH folder)
    string(MAKE_C_IDENTIFIER "folder_${folder}" folder)
    if(NOT DEFINED ${folder})
      set(${folder} 0)
    endif()
    math(EXPR group "${${folder}} / ${together}")
    math(EXPR ${folder} "${${folder}} + 1")
    set_property(SOURCE ${source} PROPERTY UNITY_GROUP ${folder}_${group})
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  # GCC takes the sources for headers, whose anonymous types would differ between includers.
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
endfunction()

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Share objects between checkouts.
  set(ccache ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1)
  if(ATTEND_PCH)  # required by ccache for precompiled headers
    list(APPEND ccache CCACHE_SLOPPINESS=pch_defines,time_macros)
  endif()
  set(CMAKE_CXX_COMPILER_LAUNCHER ${ccache} ${CCACHE_PROGRAM})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${ccache} ${CCACHE_PROGRAM})
endif()

find_package(Threads REQUIRED)

# The hardening of Debian's packages (dpkg-buildflags, hardening=+all), for everything that is
# shipped. Executables are position-independent and RELRO by the compiler's default.
set(attend_hardening)
if(NOT ATTEND_SANITIZE)
  set(host $<COMPILE_LANGUAGE:C,CXX>)
  set(attend_hardening
    "$<$<AND:${host},$<NOT:$<CONFIG:Debug>>>:SHELL:-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2>"
    "$<${host}:-fstack-protector-strong>"
    "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Xcompiler -fstack-protector-strong>")
  add_link_options(LINKER:-z,relro,-z,now)
endif()

add_library(attend_options INTERFACE)
target_include_directories(attend_options INTERFACE ${PROJECT_SOURCE_DIR})
# -Wno-restrict: GCC 12 reports false overlaps in std::string's operator+ (GCC bug 105651).
set(warnings -Wall -Wextra -Wno-sign-compare -Wno-restrict -Werror)
# Another compiler's own warnings are not errors: Clang only builds the sanitizers' tests. But it is
# the one that checks locks (kernels/util/mutex.h).
target_compile_options(attend_options INTERFACE
  "$<$<COMPILE_LANG_AND_ID:CXX,GNU>:${warnings}>"
  "$<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wthread-safety;-Werror=thread-safety>")
target_link_libraries(attend_options INTERFACE Threads::Threads)

if(ATTEND_SANITIZE)
  # Line tables only, which is all that reports show: saves a fifth of the build time and half of
  # the debug information.
  set(sanitize_flags -fsanitize=${ATTEND_SANITIZE} -fno-omit-frame-pointer -g1)
  if(ATTEND_SANITIZE MATCHES undefined)
    list(APPEND sanitize_flags -fno-sanitize-recover=undefined)
    if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")  # Highway converts NaN as the hardware does
      list(APPEND sanitize_flags -fno-sanitize=float-cast-overflow)
    endif()
  endif()
  if(ATTEND_SANITIZE STREQUAL "thread")
    # Not GCC's macro: it gives Protobuf's maps other members than the library has.
    target_compile_definitions(attend_options INTERFACE ATTEND_THREAD_SANITIZER=1)
  elseif(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")  # GCC's macro
    target_compile_definitions(attend_options INTERFACE __SANITIZE_ADDRESS__=1)
  endif()
  target_compile_options(attend_options INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${sanitize_flags}>")
  target_link_options(attend_options INTERFACE ${sanitize_flags})
  find_program(LLD_PROGRAM ld.lld)
  if(LLD_PROGRAM)
    add_link_options(-fuse-ld=lld)
  endif()
endif()

# Precompiles gRPC's headers, the generated ones and those given for a target, if ATTEND_PCH is set:
# for tests and sanitizer builds. The product's own objects do without, so that sources include what
# they need.
function(attend_precompile target)
  if(ATTEND_PCH)
    target_precompile_headers(${target} PRIVATE
      <grpcpp/grpcpp.h> <attend/v1/attention.grpc.pb.h> ${ARGN})
    target_compile_options(${target} PRIVATE
      $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>
      "$<$<CXX_COMPILER_ID:Clang>:SHELL:-Xclang -fno-pch-timestamp>")
  endif()
endfunction()
