// SPDX-License-Identifier: Apache-2.0

#include "client/workload.h"

#include <algorithm>

namespace attend::client {
namespace {

Result<WorkItem> MakeItem(const CallSpec& spec, uint64_t seed, const LoadOptions& options) {
  Result<AttentionCall> call = MakeRandomCall(spec, seed);
  if (!call.ok()) return call.status();
  WorkItem item;
  item.call = std::move(*call);
  const Result<Attention> attention = Describe(item.call, nullptr, nullptr);
  if (!attention.ok()) return attention.status();
  item.flops = Flops(*attention);
  for (const bool checked : {false, true}) {
    item.call.check = checked;
    Result<EncodedCall> encoded =
        EncodeCall(item.call, options.stream ? CallTransport::kInline : options.transport,
                   options.client.chunked_bytes_min);
    if (!encoded.ok()) return encoded.status();
    (checked ? item.encoded_checked : item.encoded) =
        std::make_shared<const EncodedCall>(std::move(*encoded));
  }
  item.call.check = false;
  return item;
}

}  // namespace

Result<Workload> Workload::Make(const LoadOptions& options) {
  Workload workload;
  workload.options_ = options;
  double weight = 0;
  uint64_t seed = options.seed;
  for (const CallSpec& spec : options.mix) {
    std::vector<WorkItem>& items = workload.items_.emplace_back();
    for (int64_t i = 0; i < options.pool; ++i) {
      Result<WorkItem> item = MakeItem(spec, SplitMix64(&seed), options);
      if (!item.ok()) {
        return InvalidArgument("shape \"" + spec.text + "\": " + item.status().message());
      }
      items.push_back(std::move(*item));
    }
    weight += spec.weight;
    workload.cumulative_weight_.push_back(weight);
  }
  return workload;
}

Workload::Draw Workload::DrawRequest(uint64_t n) const {
  uint64_t mixed = options_.seed ^ (n * 0xd1342543de82ef95u);
  Random random(SplitMix64(&mixed));
  const double at = random.Uniform() * cumulative_weight_.back();
  const size_t shape = static_cast<size_t>(
      std::upper_bound(cumulative_weight_.begin(), cumulative_weight_.end(), at) -
      cumulative_weight_.begin());
  const std::vector<WorkItem>& items = items_[std::min(shape, items_.size() - 1)];
  Draw draw;
  draw.item = &items[static_cast<size_t>(random.Below(static_cast<int64_t>(items.size())))];
  draw.seed = random.Bits();
  draw.verify = random.Uniform() < options_.verify_share;
  draw.check = random.Uniform() < options_.check_share;
  draw.deadline = options_.deadline_ms > 0 && random.Uniform() < options_.deadline_share;
  const bool cancel = random.Uniform() < options_.cancel_share;
  const double when = random.Uniform() * options_.cancel_after_ms;
  draw.cancel_after_ms = cancel ? when : -1;
  return draw;
}

}  // namespace attend::client
