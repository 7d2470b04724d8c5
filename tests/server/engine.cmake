# SPDX-License-Identifier: Apache-2.0
# Tests of the server without its wire: pool, tenants, queue, batcher, scheduler, checker, engine.

attend_test(host_pool_test SOURCES host_pool_test.cc
            LIBRARIES attend_engine attend_test_problems LABELS unit)
attend_test(tenants_test SOURCES tenants_test.cc LIBRARIES attend_engine LABELS unit)
attend_test(fair_share_test SOURCES fair_share_test.cc LIBRARIES attend_engine LABELS unit)
attend_test(request_queue_test SOURCES request_queue_test.cc
            LIBRARIES attend_engine attend_test_problems LABELS unit)
attend_test(queue_order_test SOURCES queue_order_test.cc LIBRARIES attend_engine LABELS unit)
attend_test(batcher_test SOURCES batcher_test.cc LIBRARIES attend_engine LABELS unit)
attend_test(scheduler_test SOURCES scheduler_test.cc LIBRARIES attend_engine LABELS unit)
attend_test(simulation_test SOURCES simulation_test.cc simulation.cc simulation_checks.cc
            LIBRARIES attend_engine attend_test_problems LABELS unit)
foreach(name engine_test engine_check_test)
  attend_test(${name} SOURCES ${name}.cc fake_backend.cc
              LIBRARIES attend_engine attend_test_problems LABELS unit)
endforeach()
