// SPDX-License-Identifier: Apache-2.0
//
// The parts of a server that calls use, around an engine on devices that the test controls.

#pragma once

#include <spdlog/sinks/ostream_sink.h>

#include <memory>
#include <sstream>

#include "server/rpc/call_context.h"
#include "server/rpc/chunked_transfer.h"
#include "server/util/random_token.h"
#include "tests/server/support/engine_fixture.h"

namespace attend::test {

class ContextTest : public EngineTest {
 protected:
  Engine& Started() {
    Start();
    return *engine_;
  }

  std::ostringstream log_;
  Logger logger_{Logger::Options(), std::make_shared<spdlog::sinks::ostream_sink_mt>(log_)};
  TenantLimits limits_{{TenantBounds()}, clock_};
  WorkerThreads workers_{"test", 1};
  CallQueue queue_{workers_, {1}, clock_};
  ChunkedRegistry chunked_{ChunkedOptions(), clock_, RandomToken};
  RequestReader reader_{Started(), workers_, clock_,  RequestReader::Limits{.tenant_weights = {1}},
                        limits_,   nullptr,  nullptr, nullptr};
  ServiceContext context_{*engine_, reader_, metrics_, workers_, queue_, chunked_,
                          clock_,   logger_, limits_,  64,       {},     nullptr,
                          nullptr,  nullptr, nullptr,  {}};
};

}  // namespace attend::test
