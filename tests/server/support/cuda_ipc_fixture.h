// SPDX-License-Identifier: Apache-2.0
//
// A server whose devices import memory that clients lend: fakes, whose memory belongs to the test.

#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/server/support/shared_memory_fixture.h"

namespace attend {

class CudaIpcTest : public SharedMemoryTest {
 protected:
  ~CudaIpcTest() override { server_.reset(); }  // destroyed before the memory that it has imported

  void StartIpc(const std::function<void(Config&)>& change = {}, int devices = 1) {
    Start(
        [&](Config& config) {
          config.cuda_ipc = true;
          if (change) change(config);
        },
        devices);
  }

  // An allocation on a device that any client may lend.
  struct Allocation {
    std::string handle;
    char* data = nullptr;
    int64_t bytes = 0;
    int device = 0;
  };
  Allocation Allocate(int64_t bytes, int device = 0) {
    memory_.push_back(test::MakeBlock(bytes));
    Allocation made{"handle-" + std::to_string(memory_.size()),
                    reinterpret_cast<char*>(memory_.back().get()), bytes, device};
    std::memset(made.data, 0x5a, static_cast<size_t>(bytes));
    server_->backend(device).Lend(made.handle, {made.data, bytes});
    return made;
  }
  static v1::ImportCudaMemory ImportOf(const Allocation& of, uint64_t offset, uint64_t bytes) {
    v1::ImportCudaMemory lent;
    lent.set_device_uuid(test::TestServer::DeviceUuid(of.device));
    lent.set_memory_handle(of.handle);
    lent.set_offset(offset);
    lent.set_bytes(bytes);
    return lent;
  }
  // A whole allocation, or a part of it.
  std::unique_ptr<test::MappedRegion> Lend(test::RegionClient& client, const Allocation& of,
                                           int64_t offset = 0, const std::string& event = "") {
    v1::ImportCudaMemory lent =
        ImportOf(of, static_cast<uint64_t>(offset), static_cast<uint64_t>(of.bytes - offset));
    lent.set_event_handle(event);
    const v1::RegionReply reply = client.Import(lent);
    EXPECT_TRUE(reply.has_imported()) << reply.ShortDebugString();
    return std::make_unique<test::MappedRegion>(reply.imported().token(), of.data + offset,
                                                of.bytes - offset);
  }
  int64_t imported(int device = 0) { return server_->backend(device).imported(); }

 private:
  std::vector<test::Block> memory_;
};

}  // namespace attend
