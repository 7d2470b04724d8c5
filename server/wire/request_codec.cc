// SPDX-License-Identifier: Apache-2.0

#include "server/wire/request_codec.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "server/memory/range_allocator.h"
#include "server/wire/session_uses.h"
#include "server/wire/shared_tensors.h"

namespace attend {
namespace {

// Appends a part at the next aligned offset. False on overflow.
bool Append(int64_t bytes, int64_t& total, int64_t& offset) {
  int64_t begin;
  if (__builtin_add_overflow(total, kTensorAlignBytes - 1, &begin)) return false;
  begin -= begin % kTensorAlignBytes;
  offset = begin;
  return !__builtin_add_overflow(begin, bytes, &total);
}

// Fields 2 to 15 of Placement are reserved for places that later servers may support.
Status CheckPlacement(Output output, const v1::Placement& placement, bool wanted, bool chunked,
                      bool& shared) {
  shared = false;
  if (&placement == &v1::Placement::default_instance()) return Status();  // unset, the usual case
  const std::string name = PlacementName(output);
  const auto& unknown = v1::Placement::GetReflection()->GetUnknownFields(placement);
  for (int i = 0; i < unknown.field_count(); ++i) {
    const int number = unknown.field(i).number();
    if (number < 2 || number > 15) continue;
    return Unimplemented(name + " is field " + std::to_string(number) +
                         ", but this server supports only shared_memory");
  }
  const bool set = placement.place_case() == v1::Placement::kSharedMemory;
  if (set && chunked) return InvalidArgument(name + " is set, must be unset in AttendChunked");
  if (set && !wanted) {
    return InvalidArgument(name + " is set, but " + kOutputNames[static_cast<size_t>(output)] +
                           " is not requested");
  }
  shared = set;
  return Status();
}

int64_t PlanOf(const MemoryPlan& plan, ArrayField field) {
  return plan.arrays[static_cast<size_t>(field)];
}

// Writes the entries to their place in the block and returns it; null if there are none.
template <class T>
const T* PlaceArray(const WireArrays& arrays, ArrayField field, char* block,
                    const MemoryPlan& plan) {
  if (arrays.size(field) == 0) return nullptr;
  T* const out = reinterpret_cast<T*>(block + PlanOf(plan, field));
  arrays.ForEach<T>(field, [out](int64_t i, T value) {
    out[i] = value;
    return true;
  });
  return out;
}

}  // namespace

Status ParseMessage(google::protobuf::Arena& arena, RequestMessage& message) {
  auto* fields = google::protobuf::Arena::CreateMessage<v1::AttendRequest>(&arena);
  message.fields = fields;
  const MessageScan& scan = message.scan;
  if (fields->ParseFromArray(scan.header.data(), static_cast<int>(scan.header_bytes))) {
    return Status();
  }
  return InvalidArgument("the message is not an AttendRequest: its fields cannot be parsed");
}

Status CheckSources(const RequestMessage& message, Transport transport, Validated& validated) {
  const v1::AttendRequest& request = *message.fields;
  const bool chunked = transport == Transport::kChunked;
  for (int i = 0; i < kTensorsMax; ++i) {
    if (!validated.in_message(i)) continue;
    const auto source = InputOf(request, i).source_case();
    validated.shared[i] = source == v1::Tensor::kSharedMemory;
    const bool is_chunked = source == v1::Tensor::kChunked;
    if (is_chunked == chunked) continue;
    return InvalidArgument(std::string(kInputNames[i]) + ".source is " +
                           (is_chunked ? "chunked, which only AttendChunked takes"
                                       : "not chunked, which AttendChunked requires"));
  }
  if (chunked && message.scan.raw_count > 0) {
    return InvalidArgument("raw has " + std::to_string(message.scan.raw_count) +
                           " entries, must have none in AttendChunked");
  }
  for (int i = 0; i < kOutputsMax; ++i) {
    const auto output = static_cast<Output>(i);
    ATTEND_RETURN_IF_ERROR(CheckPlacement(output, PlacementOf(request, output), validated.wanted[i],
                                          chunked, validated.output_shared[i]));
  }
  return Status();
}

Status CheckRaw(const RequestMessage& message, const Validated& validated) {
  int64_t expected = 0;
  for (int i = 0; i < kTensorsMax; ++i) expected += validated.in_message(i) ? 1 : 0;
  if (message.scan.raw_count != expected) {
    std::string names;
    for (int i = 0; i < kTensorsMax; ++i) {
      if (!validated.in_message(i)) continue;
      names += std::string(names.empty() ? ", one for each of " : ", ") + kInputNames[i];
    }
    return InvalidArgument("raw has " + std::to_string(message.scan.raw_count) +
                           " entries, must have " + std::to_string(expected) + names);
  }
  for (int i = 0, raw = 0; i < kTensorsMax; ++i) {
    if (!validated.in_message(i)) continue;
    const int64_t bytes = message.scan.raw[raw].bytes;
    if (bytes != validated.tensor_bytes[i]) {
      return InvalidArgument("raw[" + std::to_string(raw) + "] has " + std::to_string(bytes) +
                             " bytes, must have " + std::to_string(validated.tensor_bytes[i]) +
                             ", the bytes of " + kInputNames[i]);
    }
    ++raw;
  }
  return Status();
}

// Page table entries per sequence.
int64_t PageStride(const CacheHold& cache) {
  return (cache.length_max() + cache.layout().page_rows - 1) / cache.layout().page_rows;
}

Result<MemoryPlan> PlanMemory(const RequestMessage& message, const Validated& validated,
                              const CacheHold* cache) {
  MemoryPlan plan;
  bool fits = true;
  for (int i = 0; i < kTensorsMax; ++i) {
    if (!validated.in_message(i)) continue;
    fits &= Append(validated.tensor_bytes[i], plan.input_bytes, plan.tensors[i]);
  }
  for (int i = 0; i < kArrayFields; ++i) {
    const int64_t entries = message.scan.arrays[i].entries;
    if (entries == 0) continue;
    fits &= Append(entries * ArrayEntryBytes(i), plan.input_bytes, plan.arrays[i]);
  }
  fits &= Append(validated.tree_bytes, plan.input_bytes, plan.tree_bias);
  if (cache != nullptr) {
    const auto sequences = std::ssize(cache->sequences());
    fits &= Append(sequences * static_cast<int64_t>(sizeof(int64_t)), plan.input_bytes,
                   plan.cache_lengths);
    fits &= Append(sequences * PageStride(*cache) * static_cast<int64_t>(sizeof(PageNumber)),
                   plan.input_bytes, plan.cache_pages);
  }
  for (int i = 0; i < kOutputsMax; ++i) {
    if (!validated.wanted[i] || validated.output_shared[i]) continue;
    const int64_t bytes = OutputBytes(validated.attention, static_cast<Output>(i));
    fits &= Append(bytes, plan.output_bytes, plan.outputs[i]);
  }
  if (!fits) return InvalidArgument("the tensors' bytes together overflow 64 bits");
  return plan;
}

Status PlanLseForCheck(Validated& validated, MemoryPlan& plan, Request& request) {
  Problem& p = validated.attention.problem;
  if (p.return_lse) return Status();  // part of a backward pass
  p.return_lse = request.lse_for_check = true;
  if (Append(BytesLse(p), plan.output_bytes, plan.outputs[static_cast<size_t>(Output::kLse)])) {
    return Status();
  }
  return InvalidArgument("the tensors' bytes together overflow 64 bits");
}

PageNumber* PageTableOf(const MemoryPlan& plan, Request& request) {
  return reinterpret_cast<PageNumber*>(static_cast<char*>(request.input.data()) + plan.cache_pages);
}

// K and V become the sessions' pages; the request's own k and v become the source of the new rows.
void PlaceCache(const CacheHold& cache, const MemoryPlan& plan, Request& request) {
  Attention& a = request.attention;
  request.source.SetAppend({cache.append_rows(), a.k, a.v});
  char* const input = static_cast<char*>(request.input.data());
  auto* const lengths = reinterpret_cast<int64_t*>(input + plan.cache_lengths);
  for (int64_t b = 0; b < std::ssize(cache.sequences()); ++b) {
    lengths[b] = cache.sequences()[b].length;
  }
  a.kv_lengths = lengths;
  a.kv_pages = {PageTableOf(plan, request), PageStride(cache)};
  const LayerShape& shape = cache.shape();
  const int64_t rows = cache.layout().page_rows;
  const int64_t page = kPageUnitBytes / DTypeBytes(shape.dtype);
  a.k = {cache.base(), page, rows * shape.dim, shape.dim};
  a.v = {cache.base() + cache.layout().k_bytes, page, rows * shape.dim_v, shape.dim_v};
}

Status ReservePages(const MemoryPlan& plan, Request& request) {
  CacheHold* const cache = request.source.cache();
  if (cache == nullptr) return Status();
  return cache->Reserve(PageTableOf(plan, request), PageStride(*cache), &request.refusal);
}

void PlaceArrays(const RequestMessage& message, const Validated& validated, const MemoryPlan& plan,
                 Request& request) {
  request.layout = validated.layout;
  request.attention = validated.attention;
  Attention& a = request.attention;
  char* const input = static_cast<char*>(request.input.data());
  char* const output = static_cast<char*>(request.output.data());
  request.input_spans = {{input, request.input.bytes()}};
  request.output_spans = {{output, request.output.bytes()}};
  const SharedTensors* const shared = request.source.shared();
  if (shared != nullptr) AddSharedSpans(*shared, request);
  const auto place = [](char* block, int64_t offset, const RegionPlace* region) -> char* {
    if (region != nullptr && region->region != nullptr) return region->data();
    return block == nullptr ? nullptr : block + offset;
  };
  const auto tensor = [&](int i) -> const void* {
    return place(input, plan.tensors[i], shared == nullptr ? nullptr : &shared->inputs[i]);
  };
  a.q.data = tensor(0);
  a.k.data = tensor(1);
  a.v.data = tensor(2);
  if (a.problem.has_bias) {
    // An empty bias begins where the block does, within the memory that a device copies.
    const int64_t written = validated.tree_bytes > 0 ? plan.tree_bias : 0;
    a.bias.data = validated.tree.tokens > 0 ? place(input, written, nullptr) : tensor(3);
  }
  if (input != nullptr) {
    const WireArrays arrays = message.arrays();
    a.q_lengths = PlaceArray<int64_t>(arrays, ArrayField::kQLengths, input, plan);
    a.kv_lengths = PlaceArray<int64_t>(arrays, ArrayField::kKvLengths, input, plan);
    a.q_offsets = PlaceArray<int64_t>(arrays, ArrayField::kCuQ, input, plan);
    a.kv_offsets = PlaceArray<int64_t>(arrays, ArrayField::kCuKv, input, plan);
    a.alibi_slopes = PlaceArray<float>(arrays, ArrayField::kAlibiSlopes, input, plan);
    a.sinks = PlaceArray<float>(arrays, ArrayField::kSinks, input, plan);
    request.tree = validated.tree;
    request.tree_bytes = validated.tree_bytes;
    request.tree.lengths = PlaceArray<int64_t>(arrays, ArrayField::kTreeLengths, input, plan);
    if (validated.tree.tokens > 0) {
      char* const bits = input + PlanOf(plan, ArrayField::kTree);
      arrays.ReadBytes(ArrayField::kTree, bits);
      request.tree.bits = reinterpret_cast<const uint8_t*>(bits);
    }
  }
  if (request.source.cache() != nullptr) PlaceCache(*request.source.cache(), plan, request);
  const auto answer = [&](Output name) -> void* {
    const auto i = static_cast<size_t>(name);
    const bool for_check = name == Output::kLse && request.lse_for_check;
    if (!validated.wanted[i] && !for_check) return nullptr;
    return place(output, plan.outputs[i], shared == nullptr ? nullptr : &shared->outputs[i]);
  };
  if (!validated.gradients) {
    a.o.data = answer(Output::kO);
    a.lse = static_cast<float*>(answer(Output::kLse));
    return;
  }
  // The forward pass's results are only read.
  a.o.data = const_cast<void*>(tensor(kInputO));
  a.lse = static_cast<float*>(const_cast<void*>(tensor(kInputLse)));
  Gradients g = *validated.gradients;
  g.d_o.data = tensor(kInputDO);
  if (validated.present[kInputDLse]) g.d_lse = static_cast<const float*>(tensor(kInputDLse));
  g.d_q.data = answer(Output::kDQ);
  g.d_k.data = answer(Output::kDK);
  g.d_v.data = answer(Output::kDV);
  g.d_bias.data = answer(Output::kDBias);
  g.d_sinks = static_cast<float*>(answer(Output::kDSinks));
  request.backward = {g, validated.wanted, validated.bias_shape};
}

void WriteTreeBias(Request& request) {
  if (std::exchange(request.tree_bytes, 0) == 0) return;
  void* const bias = const_cast<void*>(request.attention.bias.data);
  WriteTree(request.tree, request.attention, static_cast<uint8_t*>(bias));
}

}  // namespace attend
