# SPDX-License-Identifier: Apache-2.0
# Tests of the server without its wire: pool, tenants, queue, batcher, scheduler, checker, engine.

attend_test(host_pool_test SOURCES host_pool_test.cc
            LIBRARIES attend_engine attend_test_problems LABELS unit)
attend_test(region_registry_test SOURCES region_registry_test.cc
            LIBRARIES attend_engine attend_test_problems LABELS unit)
attend_test(tenants_test SOURCES tenants_test.cc LIBRARIES attend_engine LABELS unit)
attend_test(fair_share_test SOURCES fair_share_test.cc LIBRARIES attend_engine LABELS unit)
attend_test(request_queue_test SOURCES request_queue_test.cc
            LIBRARIES attend_engine attend_test_problems LABELS unit)
attend_test(queue_order_test SOURCES queue_order_test.cc LIBRARIES attend_engine LABELS unit)
attend_test(check_queue_test SOURCES check_queue_test.cc
            LIBRARIES attend_engine LABELS unit)
attend_test(batcher_test SOURCES batcher_test.cc LIBRARIES attend_engine LABELS unit)
attend_test(scheduler_test SOURCES scheduler_test.cc LIBRARIES attend_engine LABELS unit)
attend_test(simulation_test SOURCES simulation_test.cc simulation.cc simulation_checks.cc
            LIBRARIES attend_engine attend_test_problems LABELS unit COST 100)
attend_test(arrived_pieces_test SOURCES arrived_pieces_test.cc
            LIBRARIES attend_engine attend_test_problems LABELS unit)
attend_test(router_test SOURCES router_test.cc LIBRARIES attend_engine LABELS unit)

add_library(attend_test_backend STATIC fake_backend.cc fake_backend_controls.cc fake_loans.cc
            fake_staging.cc span_copies.cc)
target_link_libraries(attend_test_backend PUBLIC attend_engine attend_test_problems)
foreach(name engine_test engine_check_test engine_stop_test split_plan_test
             split_keys_test split_join_test split_test devices_test callers_run_test staging_test
             upload_plan_test upload_run_test upload_turns_test)
  attend_test(${name} SOURCES ${name}.cc LIBRARIES attend_test_backend LABELS unit)
endforeach()
attend_test(engine_memory_test SOURCES engine_memory_test.cc ../kernels/counted_new.cc
            LIBRARIES attend_test_backend LABELS unit)

# On a GPU.
if(ATTEND_WITH_CUDA)
  attend_test(cuda_staging_test SOURCES cuda_staging_test.cc ../kernels/cuda_main.cc
              LIBRARIES attend_engine attend_test_problems LABELS gpu)
endif()
