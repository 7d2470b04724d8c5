// SPDX-License-Identifier: Apache-2.0

#include "server/app/h2_guard.h"

#include <span>
#include <string>
#include <utility>

#include "server/memory/memory_reserve.h"

namespace attend {

H2Guard::H2Guard(Parts parts, const Clock& clock) : parts_(std::move(parts)), clock_(clock) {
  parts_.use->messages->SetFirstWindow(parts_.stream_window_bytes);
}

Status H2Guard::OpenCall(int32_t id) {
  if (const char* const wrong = parts_.calls->Begin()) return ResourceExhausted(wrong);
  if (TryAllocating([&] { parts_.use->messages->Open(id); })) return Status();
  parts_.calls->End(1);
  return OutOfMemory();
}

void H2Guard::CloseCall(int32_t id) {
  parts_.use->messages->Close(id);
  parts_.calls->End(1);
}

void H2Guard::OnMessageBytes(int32_t id, std::string_view bytes) {
  const auto came = static_cast<int64_t>(bytes.size());
  position_ += came;
  parts_.use->data_bytes.fetch_add(came, std::memory_order_relaxed);
  const std::span<const uint8_t> data(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  parts_.use->messages->Add(id, data, clock_.Now(), position_);
}

void H2Guard::OnKept(int64_t bytes) {
  parts_.use->unread_bytes.fetch_add(bytes, std::memory_order_relaxed);
}

void H2Guard::OnGrant(int32_t id, int64_t bytes) { parts_.use->messages->Grant(id, bytes); }

}  // namespace attend
