// SPDX-License-Identifier: Apache-2.0
//
// A whole server in this process: fake devices, real sockets on free ports, its log in memory.

#pragma once

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "attend/v1/attention.grpc.pb.h"
#include "server/app/config.h"
#include "server/app/server.h"
#include "tests/server/support/fake_backend.h"

namespace attend::test {

class TestServer {
 public:
  // kFarSessions: memory for sessions is reported as not the host's.
  enum class Devices { kPlain, kStaging, kGathering, kFarSessions };
  // `change` edits the settings before the server starts.
  explicit TestServer(const std::function<void(Config&)>& change = {}, int devices = 1,
                      Devices kind = Devices::kPlain,
                      std::shared_ptr<const Clock> clock = std::make_shared<SteadyClock>());
  ~TestServer();  // opens the devices' gates first

  // The UUID of the i-th device, if CUDA IPC is enabled.
  static std::string DeviceUuid(int i);

  Server& server() { return *server_; }
  test::FakeBackend& backend(int i = 0) { return *backends_[i]; }
  const std::string& address() const { return server_->addresses().front(); }
  std::string log() const;  // so far
  // One scrape over HTTP, of a server with metrics_listen set.
  std::string Metrics() const;
  // The sample with this name and labels, as written in the exposition; -1 if there is none.
  double Metric(const std::string& sample) const;
  // Waits until exactly this many requests are in the devices' queues. An accepted request counts
  // as in flight before it is in a queue.
  void WaitForQueued(int64_t requests) const;

  // A separate connection, so that tests do not share one.
  std::shared_ptr<grpc::Channel> Connect() const;
  std::unique_ptr<v1::AttentionService::Stub> Stub() const;

 private:
  struct Log;
  std::unique_ptr<Log> log_;
  std::vector<test::FakeBackend*> backends_;
  std::unique_ptr<Server> server_;
};

// One Attend call with these bytes as its message, valid or not.
grpc::Status SendBytes(const std::shared_ptr<grpc::Channel>& channel, const std::string& bytes,
                       v1::AttendResponse* response);

// The response to an HTTP GET of http://`address``path`; empty if it fails.
std::string HttpGet(const std::string& address, const std::string& path);

}  // namespace attend::test
