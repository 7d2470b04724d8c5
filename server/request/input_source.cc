// SPDX-License-Identifier: Apache-2.0

#include "server/request/input_source.h"

#include <cassert>

namespace attend {

void InputSource::Stage(std::unique_ptr<DeviceCopy> copy) {
  assert(copy != nullptr);
  assert(gathered() == nullptr && shared() == nullptr && "the copy would not have all that came");
  inputs_ = std::move(copy);
}

void InputSource::SetAppend(const KeyAppend& append) {
  assert(cache() != nullptr && "there are no sessions to append to");
  keys_->append = append;
}

const GatheredInput* InputSource::gathered() const {
  const auto* const placed = std::get_if<PlacedInputs>(&inputs_);
  return placed != nullptr && placed->gathered ? &*placed->gathered : nullptr;
}

const SharedTensors* InputSource::shared() const {
  const auto* const placed = std::get_if<PlacedInputs>(&inputs_);
  return placed == nullptr ? nullptr : placed->shared.get();
}

CacheHold* InputSource::cache() const { return keys_ ? keys_->hold.get() : nullptr; }

DeviceCopy* InputSource::copy() const {
  const auto* const copy = std::get_if<std::unique_ptr<DeviceCopy>>(&inputs_);
  return copy == nullptr ? nullptr : copy->get();
}

int InputSource::pinned_device() const {
  if (cache() != nullptr) return cache()->device();
  return CanBeChecked() ? kAnyDevice : shared()->device;
}

bool InputSource::Awaits() const {
  if (copy() != nullptr) return copy()->device() >= 0;
  return shared() != nullptr && shared()->after[0] != nullptr;
}

void InputSource::ApplyTo(WorkItem& item) {
  if (const SharedTensors* const regions = shared()) {
    item.in_place = regions->in_place;
    item.after = regions->after;
  }
  if (keys_) {
    item.in_place.Add(keys_->hold->arena().memory());
    item.append = keys_->append;
  }
  if (const GatheredInput* const pieces = gathered()) item.gathered = pieces->pieces;
  if (copy() != nullptr) copy()->Apply(&item);
}

}  // namespace attend
