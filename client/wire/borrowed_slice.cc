// SPDX-License-Identifier: Apache-2.0

#include "client/wire/borrowed_slice.h"

#include <cassert>

namespace attend::client {
namespace {

thread_local ReleaseGate* innermost = nullptr;

}  // namespace

ReleasedMemory::~ReleasedMemory() {
  while (first_ != nullptr) delete std::exchange(first_, first_->next);
}

void ReleasedMemory::Add(Borrowed* borrowed) {
  borrowed->next = first_;
  first_ = borrowed;
}

ReleaseGate::ReleaseGate(PassOn pass_on)
    : outer_(std::exchange(innermost, this)), pass_on_(std::move(pass_on)) {}

ReleaseGate::~ReleaseGate() {
  if (!open_) (void)End();
}

ReleasedMemory ReleaseGate::End() {
  assert(!open_ && innermost == this && "gates end in the reverse order");
  open_ = true;
  innermost = outer_;
  return std::move(kept_);
}

void ReleaseGate::Release(Borrowed* borrowed) {
  ReleaseGate* const gate = innermost;
  if (gate == nullptr) {
    delete borrowed;
    return;
  }
  gate->kept_.Add(borrowed);
  if (gate->pass_on_ != nullptr) gate->pass_on_(std::move(gate->kept_));
}

grpc::Slice BorrowedSlice(const TensorRef& tensor, std::shared_ptr<const void> keep_alive) {
  auto* const borrowed = new Borrowed{tensor.owner, std::move(keep_alive)};
  return grpc::Slice(
      const_cast<void*>(tensor.data), static_cast<size_t>(tensor.bytes),
      [](void* user_data) { ReleaseGate::Release(static_cast<Borrowed*>(user_data)); }, borrowed);
}

}  // namespace attend::client
