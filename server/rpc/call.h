// SPDX-License-Identifier: Apache-2.0
//
// Common parts of the calls within server/rpc.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "server/request/request.h"
#include "server/transport/server_call.h"

namespace attend {

// A call as RequestReader sees it, which may still use it when the transport has ended it.
class Call : public Responder {
 public:
  // The call's responses are no longer wanted. Once true, stays true.
  bool cancelled() const { return cancelled_.load(std::memory_order_seq_cst); }
  bool unwanted() const override { return cancelled(); }
  // The request is about to be queued.
  virtual void OnQueueing(uint64_t id) = 0;

 protected:
  void SetCancelled() { cancelled_.store(true, std::memory_order_seq_cst); }

 private:
  std::atomic<bool> cancelled_{false};
};

// A handler that lives until OnDone, and while it is referred to.
class SharedHandler : public CallHandler, public std::enable_shared_from_this<SharedHandler> {
 public:
  virtual ~SharedHandler() = default;
  // Makes the transport an owner of a new handler.
  template <class T>
  static T* Own(const std::shared_ptr<T>& made) {
    made->self_ = made;
    return made.get();
  }
  void OnDone() override { self_.reset(); }

 protected:
  template <class T>
  std::shared_ptr<T> Ref(T* self) {
    return {shared_from_this(), self};
  }

 private:
  std::shared_ptr<SharedHandler> self_;
};

}  // namespace attend
