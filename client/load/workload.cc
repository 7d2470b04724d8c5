// SPDX-License-Identifier: Apache-2.0

#include "client/load/workload.h"

#include <algorithm>

#include "client/call/shared_call.h"
#include "client/forward_pass.h"
#include "kernels/contract/gradients.h"

namespace attend::client {
namespace {

Result<WorkItem> MakeItem(const CallSpec& spec, uint64_t seed) {
  Result<AttentionCall> call = MakeRandomCall(spec, seed);
  if (!call.ok()) return call.status();
  WorkItem item;
  item.call = std::move(*call);
  const Result<Attention> attention = Describe(item.call, nullptr, nullptr);
  if (!attention.ok()) return attention.status();
  item.flops = item.call.backward ? BackwardFlops(*attention) : Flops(*attention);
  return item;
}

// Adds the forward pass's results to gradient calls, one after another.
Status AddForwardPasses(const LoadOptions& options, std::vector<WorkItem>& items) {
  const Result<std::unique_ptr<Client>> client = Client::Make(options.client);
  if (!client.ok()) return client.status();
  CallOptions call_options;
  call_options.tenant = options.tenant;
  for (WorkItem& item : items) {
    ATTEND_RETURN_IF_ERROR(AddForwardPass(**client, call_options, &item.call));
  }
  return Status();
}

Status EncodeItem(const LoadOptions& options, WorkItem& item) {
  for (const bool checked : {false, true}) {
    item.call.check = checked;
    Result<EncodedCall> encoded =
        EncodeCall(item.call, options.stream ? CallTransport::kInline : options.transport,
                   {options.client.chunked_bytes_min, options.client.message_bytes_max});
    if (!encoded.ok()) return encoded.status();
    (checked ? item.encoded_checked : item.encoded) =
        std::make_shared<const EncodedCall>(std::move(*encoded));
  }
  item.call.check = false;
  return Status();
}

}  // namespace

Result<Workload> Workload::Make(const LoadOptions& options) {
  Workload workload;
  workload.options_ = options;
  int64_t bytes_left = options.input_bytes_max;
  for (const CallSpec& spec : options.mix) {
    const Status fits = TakeInputBytes(spec, options.pool, &bytes_left);
    if (!fits.ok()) {
      return InvalidArgument("shape \"" + spec.text + "\": " + fits.message() + "; see --pool");
    }
  }
  double weight = 0;
  uint64_t seed = options.seed;
  for (const CallSpec& spec : options.mix) {
    std::vector<WorkItem>& items = workload.items_.emplace_back();
    for (int64_t i = 0; i < options.pool; ++i) {
      Result<WorkItem> item = MakeItem(spec, SplitMix64(&seed));
      if (!item.ok()) {
        return InvalidArgument("shape \"" + spec.text + "\": " + item.status().message());
      }
      items.push_back(std::move(*item));
    }
    if (spec.backward) ATTEND_RETURN_IF_ERROR(AddForwardPasses(options, items));
    weight += spec.weight;
    workload.cumulative_weight_.push_back(weight);
  }
  if (!options.shared_memory_socket.path.empty()) {
    ATTEND_RETURN_IF_ERROR(workload.Share(options.shared_memory_socket));
  }
  for (size_t shape = 0; shape < workload.items_.size(); ++shape) {
    for (WorkItem& item : workload.items_[shape]) {
      const Status encoded = EncodeItem(options, item);
      if (encoded.ok()) continue;
      return InvalidArgument("shape \"" + options.mix[shape].text + "\": " + encoded.message());
    }
  }
  return workload;
}

Result<std::shared_ptr<SharedRegion>> Workload::MakeRegion(int64_t bytes) const {
  if (!options_.device_memory) return memory_->Create(bytes);
  Result<std::shared_ptr<DeviceMemory>> device = options_.device_memory(bytes);
  if (!device.ok()) return device.status();
  return memory_->Lend(std::move(*device));
}

Status Workload::Share(const SharedSocket& socket) {
  Result<std::shared_ptr<SharedMemory>> memory =
      SharedMemory::Connect(socket, {options_.client.token, options_.tenant});
  if (!memory.ok()) return memory.status();
  memory_ = std::move(*memory);
  int64_t bytes = 0;
  for (const std::vector<WorkItem>& items : items_) {
    for (const WorkItem& item : items) {
      bytes += SharedInputBytes(item.call);
      output_bytes_ = std::max(output_bytes_, SharedOutputBytes(item.call));
    }
  }
  Result<std::shared_ptr<SharedRegion>> region = MakeRegion(std::max<int64_t>(1, bytes));
  if (!region.ok()) return region.status();
  SharedPlace next{std::move(*region), 0};
  for (std::vector<WorkItem>& items : items_) {
    for (WorkItem& item : items) {
      const int64_t taken = SharedInputBytes(item.call);
      ATTEND_RETURN_IF_ERROR(ShareInputs(next, &item.call));
      next.offset += taken;
    }
  }
  return Status();
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
