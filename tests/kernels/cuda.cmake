# SPDX-License-Identifier: Apache-2.0
# Tests of the CUDA kernels and backend. Those labelled gpu exit with 77 where there is no GPU;
# cuda_layout_test, cuda_c_args_test, compiler_report and kernels_size run anywhere.

if(ATTEND_WITH_CUDA)
  include(AttendCuda)
  add_library(attend_test_cuda STATIC c_params.cc cuda_run.cc lane_harness.cc)
  target_link_libraries(attend_test_cuda PUBLIC attend_cuda attend_test_problems)

  attend_test(cuda_layout_test
              SOURCES cuda_layout_test.cc cuda_scattered_test.cc cuda_cut_test.cc
                      cuda_part_copies_test.cc tile_order_test.cc
              LIBRARIES attend_cuda attend_test_problems LABELS unit)
  attend_test(cuda_c_args_test SOURCES cuda_c_args_test.cc
              LIBRARIES attend_kernels_c attend_options LABELS unit)
  # cuda_main.cc among the sources: it has the main() that looks for a GPU first.
  # One binary: each that holds the kernels is large.
  attend_test(cuda_kernels_test
              SOURCES cuda_kernels_test.cc cuda_small_test.cc cuda_ragged_test.cc cuda_grid_test.cc
                      cuda_bits_test.cc cuda_far_test.cc cuda_patterns_test.cc planted_faults.cc
                      cuda_main.cc
              LIBRARIES attend_test_cuda LABELS gpu TIMEOUT 600)
  attend_test(cuda_backend_test SOURCES cuda_backend_test.cc cuda_main.cc
              LIBRARIES attend_test_cuda LABELS gpu)
  attend_test(cuda_lane_test
              SOURCES cuda_lane_test.cc cuda_copy_test.cc cuda_in_place_test.cc cuda_main.cc
              LIBRARIES attend_test_cuda LABELS gpu TIMEOUT 300)
  attend_test(cuda_lost_part_test SOURCES cuda_lost_part_test.cc cuda_main.cc
              LIBRARIES attend_test_cuda LABELS gpu)
  attend_test(cuda_lost_test SOURCES cuda_lost_test.cc cuda_main.cc
              LIBRARIES attend_test_cuda LABELS gpu)
  attend_test(cuda_c_test SOURCES cuda_c_test.cc cuda_main.cc
              LIBRARIES attend_test_cuda attend_kernels_c LABELS gpu)
  # The wrappers of single instructions.
  attend_test(cuda_mma_test SOURCES cuda_mma_test.cu cuda_main.cc
              LIBRARIES attend_test_cuda LABELS gpu)
  attend_test(cuda_hopper_test
              SOURCES cuda_hopper_test.cu cuda_launches_test.cu cuda_registers_test.cu
                      cuda_wgmma_test.cu cuda_main.cc
              LIBRARIES attend_test_cuda LABELS gpu)
  if(ATTEND_TESTS)
    foreach(name cuda_layout_test cuda_kernels_test cuda_backend_test cuda_lane_test cuda_lost_test
                 cuda_lost_part_test cuda_c_test cuda_c_args_test cuda_mma_test cuda_hopper_test)
      target_link_options(${name} PRIVATE -Wl,--as-needed)
    endforeach()
    attend_cuda_target(cuda_mma_test)
    attend_cuda_target(cuda_hopper_test SM90A)

    # What the compiler says of the Hopper kernels; fp16's are bf16's but for one word.
    find_package(Python3 REQUIRED COMPONENTS Interpreter)
    add_test(NAME compiler_report
             COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/compiler_report.py
                     --nvcc ${CMAKE_CUDA_COMPILER}
                     --commands ${CMAKE_BINARY_DIR}/compile_commands.json)
    set_tests_properties(compiler_report PROPERTIES LABELS unit TIMEOUT 300)
    # All kernels, for every GPU, in less than 60 MiB.
    add_test(NAME kernels_size
             COMMAND sh -c "size=$(stat -c %s $<TARGET_FILE:attend_kernels_c>) && echo $size bytes \
                            && test $size -le $((60 << 20))" VERBATIM)
    set_tests_properties(kernels_size PROPERTIES LABELS unit)
  endif()
endif()
