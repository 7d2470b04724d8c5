// SPDX-License-Identifier: Apache-2.0

#include "client/call/retry_policy.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string_view>

namespace attend::client {

Pushback ParsePushback(std::optional<std::string_view> value) {
  if (!value) return {};
  int64_t ms = -1;
  const auto [end, error] = std::from_chars(value->data(), value->data() + value->size(), ms);
  if (error != std::errc() || end != value->data() + value->size() || ms < 0) {
    return {Pushback::Kind::kNever, {}};
  }
  const int64_t most_ms = std::chrono::milliseconds(kPushbackMax).count();
  return {Pushback::Kind::kWait, std::chrono::milliseconds(std::min(ms, most_ms))};
}

std::optional<std::chrono::nanoseconds> RetryState::AfterFailure(
    Code code, const Pushback& pushback, std::optional<std::chrono::nanoseconds> time_left) {
  assert(code != Code::kOk && failures_ < policy_.attempts_max &&
         "a success, or after the last attempt");
  ++failures_;
  if (code != Code::kResourceExhausted && code != Code::kUnavailable) return std::nullopt;
  if (code == Code::kResourceExhausted && pushback.kind == Pushback::Kind::kNone) {
    return std::nullopt;
  }
  if (failures_ >= policy_.attempts_max || pushback.kind == Pushback::Kind::kNever) {
    return std::nullopt;
  }
  const double uniform = random_.Uniform();
  double wait_ns = 0;
  if (pushback.kind == Pushback::Kind::kWait) {
    backoffs_ = 0;
    wait_ns = static_cast<double>(pushback.wait.count()) * (1.0 + policy_.jitter * uniform);
  } else {
    const double ceiling = static_cast<double>(policy_.backoff_max.count());
    const double grown = static_cast<double>(policy_.backoff_initial.count()) *
                         std::pow(policy_.backoff_multiplier, backoffs_++);
    wait_ns = std::min(ceiling, grown) * (1.0 + policy_.jitter * (2.0 * uniform - 1.0));
  }
  const std::chrono::nanoseconds wait(static_cast<int64_t>(wait_ns));
  if (time_left && wait >= *time_left) return std::nullopt;
  return wait;
}

}  // namespace attend::client
