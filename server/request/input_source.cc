// SPDX-License-Identifier: Apache-2.0

#include "server/request/input_source.h"

namespace attend {

bool InputSource::Awaits() const {
  if (shared_ != nullptr && shared_->after[0] != nullptr) return true;
  if (const UploadPart* const upload = part()) return upload->after != nullptr;
  const auto* const staged = std::get_if<StagedUpload>(&messages_);
  return staged != nullptr && staged->copy->device() >= 0;
}

void InputSource::ApplyTo(WorkItem& item) {
  if (shared_ != nullptr) {
    item.in_place = shared_->in_place;
    item.after = shared_->after;
  }
  if (cache_ != nullptr) {
    item.in_place.Add(cache_->arena().memory());
    item.append = append_;
  }
  if (const GatheredInput* const input = gathered()) {
    item.gathered = input->pieces;
  } else if (DeviceCopy* const whole = copy()) {
    whole->Apply(&item);
  } else if (UploadPart* const upload = part()) {
    item.parts = upload->parts;
    if (upload->copy != nullptr) upload->copy->Apply(&item, upload->after);
  }
}

}  // namespace attend
