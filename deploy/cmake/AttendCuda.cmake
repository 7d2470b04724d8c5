# SPDX-License-Identifier: Apache-2.0
# The language CUDA and the settings of every .cu file, for the folders that have some: a language
# is known to the folder that enables it, and to those below.
#
# Machine code for Ampere (runs on Ada too) and Hopper, PTX for what comes later.

if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES "80-real;90" CACHE STRING "CUDA architectures to compile for")
endif()
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.1)
  message(FATAL_ERROR "CUDA is ${CMAKE_CUDA_COMPILER_VERSION}, must be 12.1 or later: "
                      "earlier kernels have at most 4096 bytes of parameters")
endif()
if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  # CMake 3.25 does not know that nvcc has had C++20 since 12.0.
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
# In projects that require CMake 3.25, its first versions mark a library as deprecated without
# checking that the toolkit has it. CUDA 13 does not.
set(attend_cmake_minimum ${CMAKE_MINIMUM_REQUIRED_VERSION})
set(CMAKE_MINIMUM_REQUIRED_VERSION 3.24)
find_package(CUDAToolkit REQUIRED)
set(CMAKE_MINIMUM_REQUIRED_VERSION ${attend_cmake_minimum})

# Compressed machine code, a quarter of the size; the driver unpacks it.
set(attend_cuda_compress)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
  set(attend_cuda_compress --compress-mode=size)
endif()

# A register spill in a kernel fails the build. Line tables, by which a profiler shows source lines,
# are half of a binary's size: only builds for debugging have them
# (-DCMAKE_BUILD_TYPE=RelWithDebInfo).
set(attend_cuda_options
  --expt-relaxed-constexpr
  $<$<NOT:$<CONFIG:Release>>:-lineinfo>
  ${attend_cuda_compress}
  -Werror=all-warnings
  "SHELL:-Xcompiler -Wall,-Wextra,-Wno-sign-compare"
  "SHELL:-Xptxas -warn-spills,-Werror"
)

# Compiles a target's .cu files with these settings. SM90A: for Hopper's own instructions, which
# exist for sm_90a only; such code is never launched elsewhere.
function(attend_cuda_target name)
  cmake_parse_arguments(ARG "SM90A" "" "" ${ARGN})
  target_compile_options(${name} PRIVATE
                         "$<$<COMPILE_LANGUAGE:CUDA>:${attend_cuda_options}>")
  set_target_properties(${name} PROPERTIES CUDA_RUNTIME_LIBRARY Static)
  if(ARG_SM90A)
    set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES OFF)
    target_compile_options(${name} PRIVATE
      "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-gencode arch=compute_90a,code=sm_90a>")
  endif()
endfunction()
