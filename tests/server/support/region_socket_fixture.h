// SPDX-License-Identifier: Apache-2.0
//
// The socket of regions, in a folder of the test's own.

#pragma once

#include <gtest/gtest.h>
#include <spdlog/sinks/null_sink.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>

#include "server/regions/region_socket.h"
#include "tests/server/support/await.h"
#include "tests/server/support/fake_backend.h"

namespace attend::test {

class RegionSocketFixture : public ::testing::Test {
 protected:
  RegionSocketFixture() {
    std::string pattern = std::filesystem::temp_directory_path() / "attend-socket-XXXXXX";
    folder_ = mkdtemp(pattern.data());
    options_.path = folder_ / "shm.sock";
  }
  ~RegionSocketFixture() override {
    socket_.reset();
    std::filesystem::remove_all(folder_);
  }

  Status Start() {
    Result<std::unique_ptr<RegionSocket>> socket =
        RegionSocket::Start(options_, registry_, logger_, clock_);
    if (!socket.ok()) return socket.status();
    socket_ = std::move(*socket);
    return Status();
  }
  void WaitForClients(int64_t clients) {
    Await("there are " + std::to_string(clients) + " clients",
          [&] { return registry_.stats().clients == clients; });
  }
  // Waits until all pending closes are done and clients hold this many bytes.
  void WaitUntilHeld(int64_t bytes) {
    Await("clients hold " + std::to_string(bytes) + " bytes", [&] {
      const RegionRegistry::Stats stats = registry_.stats();
      return stats.changing_bytes == 0 && stats.bytes == bytes;
    });
  }
  void WaitUntilEmpty() {
    WaitForClients(0);
    Await("no region is left", [&] {
      const RegionRegistry::Stats stats = registry_.stats();
      return stats.bytes + stats.changing_bytes == 0;
    });
  }

  std::filesystem::path folder_;
  FakeBackend backend_;
  MemfdMemory memory_{backend_.host_allocator()};
  const SteadyClock clock_;
  // As many tenants as any test of the socket needs.
  RegionRegistry registry_{{{1, 1}, 1 << 20, 1 << 19, 4}, memory_, clock_, RandomToken};
  Logger logger_{{}, std::make_shared<spdlog::sinks::null_sink_mt>()};
  RegionSocket::Options options_{.path = {}, .tenant_weights = {1}};
  std::unique_ptr<RegionSocket> socket_;
};

}  // namespace attend::test
