// SPDX-License-Identifier: Apache-2.0
//
// The interface of every kind of call within server/rpc.

#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include "server/request/request.h"

namespace attend {

// A call as RequestReader sees it. Reference-counted, because the transport may end a call while
// RequestReader is still using it.
class Call : public Responder {
 public:
  void Ref() { references_.fetch_add(1, std::memory_order_relaxed); }
  void Unref() {
    if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

  // The call's responses are no longer wanted. Once true, stays true.
  bool cancelled() const { return cancelled_.load(std::memory_order_seq_cst); }
  bool unwanted() const override { return cancelled(); }
  // The request is about to be queued.
  virtual void OnQueueing(uint64_t id) = 0;

 protected:
  ~Call() override = default;
  void SetCancelled() { cancelled_.store(true, std::memory_order_seq_cst); }

 private:
  std::atomic<int> references_{1};
  std::atomic<bool> cancelled_{false};
};

// A counted reference to a call.
template <class T>
class CallRef {
 public:
  CallRef() = default;
  explicit CallRef(T* call) : call_(call) {
    if (call_ != nullptr) call_->Ref();
  }
  CallRef(const CallRef& other) : CallRef(other.call_) {}
  CallRef(CallRef&& other) noexcept : call_(std::exchange(other.call_, nullptr)) {}
  CallRef& operator=(CallRef other) noexcept {
    std::swap(call_, other.call_);
    return *this;
  }
  ~CallRef() {
    if (call_ != nullptr) call_->Unref();
  }
  // Takes over an existing reference, such as that of a new call.
  static CallRef Adopt(T* call) {
    CallRef ref;
    ref.call_ = call;
    return ref;
  }

  T* get() const { return call_; }
  T* operator->() const { return call_; }
  explicit operator bool() const { return call_ != nullptr; }

 private:
  T* call_ = nullptr;
};

}  // namespace attend
