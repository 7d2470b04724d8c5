// SPDX-License-Identifier: Apache-2.0
//
// What every kind of call is to the rest of this room.

#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include "server/request/request.h"

namespace attend {

// A call as intake sees it. Reference-counted: gRPC may end a call while intake still looks at it.
class Call : public Responder {
 public:
  void Ref() { references_.fetch_add(1, std::memory_order_relaxed); }
  void Unref() {
    if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

  // Nobody waits for this call's answers any more. Once true, stays true.
  bool cancelled() const { return cancelled_.load(std::memory_order_seq_cst); }
  bool unwanted() const override { return cancelled(); }
  // The request is about to enter a queue.
  virtual void OnAdmitted(uint64_t id) = 0;

 protected:
  ~Call() override = default;
  void SetCancelled() { cancelled_.store(true, std::memory_order_seq_cst); }

 private:
  std::atomic<int> references_{1};
  std::atomic<bool> cancelled_{false};
};

// Keeps a call.
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
  // Takes over the reference that a new call is born with.
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
