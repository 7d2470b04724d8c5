// SPDX-License-Identifier: Apache-2.0
//
// The prefix of a message is scanned, validated and planned exactly like a complete message; any
// failure just means that nothing is placed. Fits then compares the complete message with the
// prediction, so a client gains nothing by lying in the prefix.

#include "server/wire/early_input.h"

#include <google/protobuf/arena.h>

#include <algorithm>

#include <utility>
#include <vector>

#include "server/wire/protobuf_wire.h"

namespace attend {
namespace {

// A tree may take this much, however short its message is.
constexpr int64_t kTreeBytesFree = 1 << 20;

// False if the message cannot be placed.
bool Plan(google::protobuf::Arena& arena, RequestMessage& message, Validated& validated,
          MemoryPlan& plan) {
  if (!ScanBeginning(message.slices, message.scan) || !ParseMessage(arena, message).ok() ||
      message.fields->sessions_size() > 0 ||
      !Validate(*message.fields, message.arrays(), validated).ok() ||
      !CheckSources(message, Transport::kInline, validated).ok()) {
    return false;
  }
  const Result<MemoryPlan> planned = PlanMemory(message, validated);
  if (planned.ok()) plan = *planned;
  return planned.ok();
}

// The expected raw entries, one after the other up to the end of the message; empty if they do not
// end there.
std::vector<MessagePlaces::Place> Entries(const MessageScan& scan, const Validated& validated,
                                          int64_t message_bytes) {
  std::vector<MessagePlaces::Place> entries;
  int64_t at = scan.raw[0].offset;
  for (int i = 0; i < kTensorsMax; ++i) {
    if (!validated.in_message(i)) continue;
    const int64_t bytes = validated.tensor_bytes[i];
    if (entries.empty() && bytes != scan.raw[0].bytes) return {};
    if (!entries.empty()) at += wire::PrefixBytes(wire::kRawTag, bytes);
    entries.push_back({at, bytes, nullptr});
    at += bytes;
  }
  if (at != message_bytes) entries.clear();
  return entries;
}

}  // namespace

EarlyInput::~EarlyInput() { Uncount(); }

void EarlyInput::Uncount() {
  if (sum_ != nullptr) sum_->fetch_sub(std::exchange(block_bytes_, 0), std::memory_order_relaxed);
}

bool EarlyInput::Fits(const MessageScan& scan, const MemoryPlan& plan,
                      const Validated& validated) const {
  if (taken() || block_.bytes() != plan.input_bytes || scan.raw_count != std::ssize(places)) {
    return false;
  }
  const char* const data = static_cast<const char*>(block_.data());
  for (int i = 0, raw = 0; i < kTensorsMax; ++i) {
    if (!validated.in_message(i)) continue;
    const MessageScan::Raw& entry = scan.raw[raw];
    const Place& place = places[raw++];
    const bool there = entry.file == nullptr && entry.offset == place.begin &&
                       entry.bytes == place.bytes && place.to == data + plan.tensors[i];
    if (!there) return false;
  }
  return true;
}

HostBlock EarlyInput::TakeBlock() {
  Uncount();
  return std::move(block_);
}

std::shared_ptr<EarlyInput> EarlyInputs::Make(int tenant, std::span<const MessagePiece> begun,
                                              int64_t bytes) const {
  std::vector<ByteSpan> slices;
  for (const MessagePiece& piece : begun) {
    slices.emplace_back(reinterpret_cast<const uint8_t*>(piece.bytes.data()), piece.bytes.size());
  }
  google::protobuf::Arena arena;
  RequestMessage message;
  message.slices = slices;
  Validated validated;
  MemoryPlan plan;
  if (!Plan(arena, message, validated, plan)) return nullptr;
  auto early = std::make_shared<EarlyInput>();
  early->places = Entries(message.scan, validated, bytes);
  if (early->places.empty() || plan.input_bytes == 0) return nullptr;
  // A tree is expanded for all queries and keys: memory that large is not taken before admission.
  if (validated.tree_bytes > std::max(bytes, kTreeBytesFree)) return nullptr;

  const int64_t block_bytes = HostPool::BlockBytes(plan.input_bytes);
  const int64_t sum = sum_->fetch_add(block_bytes, std::memory_order_relaxed) + block_bytes;
  early->block_bytes_ = block_bytes;
  early->sum_ = sum_;
  if (sum > bytes_max_) return nullptr;
  Result<HostBlock> block = pool_.Take(tenant, plan.input_bytes);
  if (!block.ok()) return nullptr;
  early->block_ = std::move(*block);
  auto place = early->places.begin();
  for (int i = 0; i < kTensorsMax; ++i) {
    if (!validated.in_message(i)) continue;
    (place++)->to = static_cast<char*>(early->block_.data()) + plan.tensors[i];
  }
  return early;
}

}  // namespace attend
