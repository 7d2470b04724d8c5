// SPDX-License-Identifier: Apache-2.0
//
// A driver with one GPU, which programs linked to it find as libcuda.so.1. GPU memory is host
// memory. Work on its streams, which are arbitrary numbers, is done at once, or on release while
// they are held.

#pragma once

#include <cstddef>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace attend::client::test {

class FakeCuda {
 public:
  static FakeCuda& Get();

  std::string uuid = std::string(16, 'u');
  // A handle was created for memory or an event; an event was recorded, and reached.
  std::function<void(const std::string& handle, char* data, size_t bytes)> on_memory_handle;
  std::function<void(const std::string&handle)> on_event_handle, on_record, on_reached;

  void RefuseAllocations(bool refuse) { refuse_allocations_ = refuse; }
  bool refuses_allocations() const { return refuse_allocations_; }
  void Hold();
  void LetGo();
  bool IsIdle(void* stream);
  // "copy 4096 on 7", "wait on 7", "record on 7", since the last call.
  std::vector<std::string> TakeLog();
  int allocations() const { return allocations_; }  // all that were ever created

  void Enqueue(std::string what, void* stream, std::function<void()> work);
  void CountAllocation() { ++allocations_; }

 private:
  std::mutex mutex_;
  bool held_ = false, refuse_allocations_ = false;
  int allocations_ = 0;
  struct Waiting {
    void* stream;
    std::function<void()> work;
  };
  std::vector<Waiting> waiting_;
  std::vector<std::string> log_;
};

}  // namespace attend::client::test
