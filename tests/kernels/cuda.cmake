# SPDX-License-Identifier: Apache-2.0
# Tests of the CUDA kernels and backend. Those labelled gpu exit with 77 where there is no GPU;
# cuda_layout_test runs anywhere.

if(ATTEND_WITH_CUDA)
  add_library(attend_test_cuda STATIC cuda_run.cc)
  target_link_libraries(attend_test_cuda PUBLIC attend_cuda attend_test_problems)

  attend_test(cuda_layout_test SOURCES cuda_layout_test.cc
              LIBRARIES attend_cuda attend_test_problems LABELS unit)
  # cuda_main.cc among the sources: it has the main() that looks for a GPU first.
  attend_test(cuda_kernels_test SOURCES cuda_kernels_test.cc cuda_main.cc
              LIBRARIES attend_test_cuda LABELS gpu TIMEOUT 600)
  attend_test(cuda_backend_test SOURCES cuda_backend_test.cc cuda_main.cc
              LIBRARIES attend_test_cuda LABELS gpu)
  attend_test(cuda_lost_test SOURCES cuda_lost_test.cc cuda_main.cc
              LIBRARIES attend_test_cuda LABELS gpu)
  attend_test(cuda_c_test SOURCES cuda_c_test.cc cuda_main.cc
              LIBRARIES attend_test_cuda attend_kernels_c LABELS gpu)
  foreach(name cuda_layout_test cuda_kernels_test cuda_backend_test cuda_lost_test cuda_c_test)
    target_link_options(${name} PRIVATE -Wl,--as-needed)
  endforeach()
endif()
