// SPDX-License-Identifier: Apache-2.0

#include "server/app/h2_guard.h"

namespace attend {

Status H2Guard::OpenCall() {
  const char* const wrong = parts_.calls->Begin();
  return wrong == nullptr ? Status() : ResourceExhausted(wrong);
}

void H2Guard::OnMessageBytes(int64_t bytes) {
  parts_.use->data_bytes.fetch_add(bytes, std::memory_order_relaxed);
  parts_.memory->CountRead(bytes);
}

void H2Guard::OnKept(int64_t bytes) {
  parts_.use->held_bytes.fetch_add(bytes, std::memory_order_relaxed);
}

void H2Guard::OnEnd(const Status& why) {
  if (std::exchange(ended_, true)) return;
  parts_.open->Close();
  parts_.on_end(why);
  parts_.use->End();
}

}  // namespace attend
