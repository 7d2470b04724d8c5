// SPDX-License-Identifier: Apache-2.0

#include "server/request/input_source.h"

#include <cassert>

namespace attend {

bool InputSource::InBlockOnly() const {
  const auto* const placed = std::get_if<PlacedInputs>(&inputs_);
  return placed != nullptr && !placed->gathered && placed->shared == nullptr && !placed->keys;
}

void InputSource::Stage(std::unique_ptr<DeviceCopy> copy) {
  assert(copy != nullptr);
  assert(InBlockOnly() && "the copy would not have all inputs");
  inputs_ = StagedUpload{std::move(copy), {}};
}

void InputSource::SetPart(UploadPart part) {
  assert(InBlockOnly() && "a part has inputs of its own");
  inputs_ = std::move(part);
}

void InputSource::SetAppend(const KeyAppend& append) {
  assert(cache() != nullptr && "there are no sessions to append to");
  placed().keys->append = append;
}

const GatheredInput* InputSource::gathered() const {
  const auto* const placed = std::get_if<PlacedInputs>(&inputs_);
  return placed != nullptr && placed->gathered ? &*placed->gathered : nullptr;
}

const SharedTensors* InputSource::shared() const {
  const auto* const placed = std::get_if<PlacedInputs>(&inputs_);
  return placed == nullptr ? nullptr : placed->shared.get();
}

CacheHold* InputSource::cache() const {
  const auto* const placed = std::get_if<PlacedInputs>(&inputs_);
  return placed != nullptr && placed->keys ? placed->keys->hold.get() : nullptr;
}

int InputSource::pinned_device() const {
  if (cache() != nullptr) return cache()->device();
  return CanBeChecked() ? kAnyDevice : shared()->device;
}

bool InputSource::Awaits() const {
  if (const UploadPart* const upload = part()) return upload->after != nullptr;
  if (const auto* const staged = std::get_if<StagedUpload>(&inputs_)) {
    return staged->copy->device() >= 0;
  }
  return shared() != nullptr && shared()->after[0] != nullptr;
}

void InputSource::ApplyTo(WorkItem& item) {
  if (DeviceCopy* const whole = copy()) return whole->Apply(&item);
  if (UploadPart* const upload = part()) {
    item.parts = upload->parts;
    if (upload->copy != nullptr) upload->copy->Apply(&item, upload->after);
    return;
  }
  const PlacedInputs& inputs = placed();
  if (inputs.shared != nullptr) {
    item.in_place = inputs.shared->in_place;
    item.after = inputs.shared->after;
  }
  if (inputs.keys) {
    item.in_place.Add(inputs.keys->hold->arena().memory());
    item.append = inputs.keys->append;
  }
  if (inputs.gathered) item.gathered = inputs.gathered->pieces;
}

}  // namespace attend
