// SPDX-License-Identifier: Apache-2.0
//
// Calls of the C interface with tensors in GPU memory, over a fake driver that is also the server's
// device.

#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tests/client/c/c_calls.h"
#include "tests/client/support/fake_cuda.h"
#include "tests/server/support/test_server.h"

namespace attend::client::c::test {

using attend::client::test::FakeCuda;
using attend::test::TestServer;

inline void* const kStream = reinterpret_cast<void*>(7);

inline Case OnDevice(int64_t rows = 256) {
  Case c(4, rows, 64);
  for (attend_client_tensor* tensor : {&c.params.q, &c.params.k, &c.params.v}) tensor->memory = 1;
  c.params.stream = kStream;
  return c;
}

inline std::vector<float> CopyOf(Call& call, const attend_client_tensor& tensor) {
  size_t count = 1;
  for (int n = 0; n < tensor.dims; ++n) count *= static_cast<size_t>(tensor.shape[n]);
  std::vector<float> copy(count);
  EXPECT_EQ(attend_client_copy(call.get(), &tensor, copy.data(), 0, kStream), ATTEND_CLIENT_OK)
      << attend_client_last_error();
  return copy;
}

// O and LSE, returned in this memory.
inline std::vector<float> MustCall(attend_client* client, const attend_client_params& params,
                                   const std::string& transport, int32_t memory) {
  Call call(Start(client, params));
  const attend_client_answer answer = call.Answer();
  EXPECT_EQ(answer.code, ATTEND_CLIENT_OK) << answer.message;
  EXPECT_EQ(answer.transport, transport);
  EXPECT_EQ(answer.o.memory, memory);
  EXPECT_EQ(answer.lse.memory, memory);
  std::vector<float> all = CopyOf(call, answer.o);
  const std::vector<float> lse = CopyOf(call, answer.lse);
  all.insert(all.end(), lse.begin(), lse.end());
  return all;
}

class DeviceCallTest : public ::testing::Test {
 protected:
  DeviceCallTest() {
    std::string pattern = fs::temp_directory_path() / "attend-device-call-XXXXXX";
    folder_ = mkdtemp(pattern.data());
    server_ = MakeServer("shm.sock");
    FakeCuda& driver = FakeCuda::Get();
    driver.uuid = TestServer::DeviceUuid(0);
    driver.on_memory_handle = [this](const std::string& handle, char* data, size_t bytes) {
      server_->backend().Lend(handle, {reinterpret_cast<char*>(data), static_cast<int64_t>(bytes)});
    };
    driver.on_record = [this](const std::string& handle) { server_->backend().LendEvent(handle); };
    driver.on_reached = [this](const std::string& handle) { server_->backend().Reach(handle); };
    driver.on_event_handle = [this](const std::string& handle) {
      server_->backend().LendEvent(handle);
      server_->backend().Reach(handle);  // nothing has been recorded
    };
    client_ = Connect("");
  }
  ~DeviceCallTest() override {
    attend_client_close(client_);
    server_.reset();
    FakeCuda::Get().on_memory_handle = {};
    FakeCuda::Get().on_event_handle = FakeCuda::Get().on_record = FakeCuda::Get().on_reached = {};
    FakeCuda::Get().RefuseAllocations(false);
    fs::remove_all(folder_);
  }
  std::unique_ptr<TestServer> MakeServer(const std::string& socket) {
    return std::make_unique<TestServer>([&](Config& config) {
      config.shared_memory = config.cuda_ipc = true;
      config.shared_memory_socket = folder_ / socket;
    });
  }
  attend_client* Connect(const std::string& socket) {
    attend_client_options options = {};
    options.struct_bytes = sizeof(options);
    options.server = server_->address().c_str();
    if (!socket.empty()) options.shared_memory_socket = socket.c_str();
    attend_client* client = nullptr;
    EXPECT_EQ(attend_client_open(&options, &client), ATTEND_CLIENT_OK);
    return client;
  }

  fs::path folder_;
  std::unique_ptr<TestServer> server_;
  attend_client* client_ = nullptr;
};

}  // namespace attend::client::c::test
