// SPDX-License-Identifier: Apache-2.0
//
// Each span gets an offset congruent to its host address modulo kLayoutAlignment, so a pointer
// moves by adding its distance from the span's start, and alignment is kept (Cursor, Rebaser).
// Sizes are overflow-checked; one sticky flag replaces a check per span.

#include "kernels/cuda/lane/batch_layout.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/contract/gradient_terms.h"
#include "kernels/cuda/launch/repack.h"

namespace attend::cuda {
namespace {

// Hands out offsets; remembers that one overflowed.
class Cursor {
 public:
  // The next offset that is congruent to `address` modulo the alignment.
  int64_t Take(const void* address, int64_t bytes) {
    const int64_t residue = static_cast<int64_t>(reinterpret_cast<uintptr_t>(address) %
                                                 static_cast<uintptr_t>(kLayoutAlignment));
    int64_t begin = 0;
    if (__builtin_add_overflow(end_, kLayoutAlignment - 1, &begin)) overflow_ = true;
    begin = begin / kLayoutAlignment * kLayoutAlignment + residue;
    if (__builtin_add_overflow(begin, bytes, &end_)) overflow_ = true;
    return begin;
  }

  int64_t end() const { return end_; }
  bool overflow() const { return overflow_; }

 private:
  int64_t end_ = 0;
  bool overflow_ = false;
};

// Moves pointers from their spans to the spans' places, unless they are in place. Remembers the
// first pointer that is in no span.
class Rebaser {
 public:
  Rebaser(const SpanList& spans, const std::array<char*, SpanList::kMax>& places,
          const SpanList& in_place)
      : spans_(spans), places_(places), in_place_(in_place) {}

  template <class T>
  void Move(const char* name, T** pointer) {
    if (*pointer == nullptr || in_place_.Contains(*pointer, 1)) return;
    const uintptr_t address = reinterpret_cast<uintptr_t>(*pointer);
    char* at_end = nullptr;  // one past a span, where an empty tensor may be
    for (int n = 0; n < spans_.size(); ++n) {
      const uintptr_t begin = reinterpret_cast<uintptr_t>(spans_[n].data);
      const uintptr_t bytes = static_cast<uintptr_t>(spans_[n].bytes);
      if (address < begin || address - begin > bytes) continue;
      char* const moved = places_[n] + (address - begin);
      if (address - begin < bytes) {
        *pointer = reinterpret_cast<T*>(moved);
        return;
      }
      at_end = moved;
    }
    const bool empty = at_end == nullptr && in_place_.Contains(*pointer, 0);
    if (at_end == nullptr && !empty && outside_ == nullptr) outside_ = name;
    if (at_end != nullptr) *pointer = reinterpret_cast<T*>(at_end);
  }

  Status status(const char* kind) const {
    if (outside_ == nullptr) return Status();
    return InvalidArgument(std::string(outside_) + " does not begin inside one of the item's " +
                           std::to_string(spans_.size()) + " " + kind + " spans");
  }

 private:
  const SpanList& spans_;
  const std::array<char*, SpanList::kMax>& places_;
  const SpanList& in_place_;
  const char* outside_ = nullptr;
};

Status CheckSizes(const WorkItem& item, int64_t workspace_bytes_max) {
  int64_t least = item.selection.workspace_bytes;
  for (const HostSpan& span : item.inputs) least = std::min(least, span.bytes);
  for (const HostSpan& span : item.outputs) least = std::min(least, span.bytes);
  if (least < 0) {
    return InvalidArgument("a span or workspace of " + std::to_string(least) +
                           " bytes, must be at least 0");
  }
  if (item.selection.workspace_bytes > workspace_bytes_max) {
    return ResourceExhausted("kernel workspace is " +
                             std::to_string(item.selection.workspace_bytes) +
                             " bytes, the limit is " + std::to_string(workspace_bytes_max));
  }
  return Status();
}

// Adds the requirements of a batch's launches.
Status AddWorkspace(std::span<const LaunchItem> launches, BatchLayout* layout) {
  const Result<int64_t> bytes = BatchWorkspaceBytes(launches);
  if (!bytes.ok()) return bytes.status();
  layout->workspace_bytes = std::max(layout->workspace_bytes, *bytes);
  if (__builtin_add_overflow(layout->list_bytes, ListBytesMax(launches), &layout->list_bytes)) {
    return InvalidArgument("bytes of the batch's lists overflow 64 bits");
  }
  return Status();
}

Status SizeWorkspace(std::span<const WorkItem> items, int64_t workspace_bytes_max,
                     const BatchCuts& cuts, BatchLayout* layout) {
  std::vector<LaunchItem> together;
  std::vector<BackwardItem> backward;
  for (size_t n = 0; n < items.size(); ++n) {
    if (items[n].gradients) {
      backward.push_back(ToBackward(items[n]));
      continue;
    }
    LaunchItem launch = ToLaunch(items[n]);
    if (cuts.empty() || cuts[n].empty()) {
      together.push_back(launch);
      continue;
    }
    for (const AttentionSlice& slice : cuts[n]) {
      const Result<Attention> part = TakeSlice(items[n].attention, slice);
      if (!part.ok()) return part.status();
      launch.attention = *part;
      ATTEND_RETURN_IF_ERROR(AddWorkspace({&launch, 1}, layout));
    }
  }
  int64_t largest = 0;
  for (const BackwardItem& item : backward) {
    const Result<int64_t> bytes = BackwardWorkspaceBytes({&item, 1});
    if (!bytes.ok()) return bytes.status();
    largest = std::max(largest, *bytes);
  }
  if (!backward.empty()) {
    const Result<int64_t> together = BackwardWorkspaceBytes(backward);
    if (!together.ok()) return together.status();
    // Follows the part that forward launches find and leave zeroed.
    const int64_t bytes = std::max(largest, std::min(*together, workspace_bytes_max));
    layout->workspace_bytes = std::max(layout->workspace_bytes, kTileQueueBytes + bytes);
  }
  return AddWorkspace(together, layout);
}

}  // namespace

Status CheckInPlace(const WorkItem& item) {
  for (const HostSpan& span : item.in_place) {
    if (span.bytes < 0) {
      return InvalidArgument("a span in place has " + std::to_string(span.bytes) +
                             " bytes, must have at least 0");
    }
  }
  const Attention& a = item.attention;
  const std::pair<const char*, const int64_t*> arrays[] = {{"q_lengths", a.q_lengths},
                                                           {"kv_lengths", a.kv_lengths},
                                                           {"q_offsets", a.q_offsets},
                                                           {"kv_offsets", a.kv_offsets}};
  for (const auto& [name, data] : arrays) {
    if (data != nullptr && item.in_place.Contains(data, 1)) {
      return InvalidArgument(std::string(name) +
                             " is in memory in place, must be in an input span on the host");
    }
  }
  const KernelId kernel = item.selection.kernel;
  if (item.in_place.size() == 0 ||
      (kernel != KernelId::kCudaFlashSm90 && kernel != KernelId::kCudaDecodeSm80 &&
       kernel != KernelId::kCudaDecodeSm90)) {
    return Status();
  }
  // Moved tensors keep their address modulo kLayoutAlignment.
  const MemoryTraits traits =
      item.gradients ? MemoryTraits{.not_tma = WhyNotTma(a, *item.gradients)} : TraitsOf(a);
  const std::string_view why_not = traits.not_tma;
  const bool copied =
      traits.repack_bytes > 0 && item.selection.workspace_bytes >= traits.repack_bytes;
  if (why_not.empty() || copied) return Status();
  return InvalidArgument(
      std::string(KernelName(kernel)) +
      " was selected for memory that it cannot address: " + std::string(why_not));
}

Status CheckGathered(const WorkItem& item) {
  uintptr_t end = 0;  // end of the pieces so far
  for (size_t n = 0; n < item.gathered.size(); ++n) {
    const HostPiece& piece = item.gathered[n];
    const auto begin = reinterpret_cast<uintptr_t>(piece.to);
    const char* fault = nullptr;
    if (piece.bytes < 0) fault = "must have at least 0";
    if (piece.from == nullptr) fault = "has no address";
    if (begin < end) fault = "begins before the end of the piece before it";
    if (fault == nullptr && !item.inputs.Contains(piece.to, piece.bytes)) {
      fault = "is not inside any input span";
    }
    if (fault != nullptr) {
      return InvalidArgument("gathered piece " + std::to_string(n) + " of " +
                             std::to_string(piece.bytes) + " bytes " + fault);
    }
    end = begin + static_cast<uintptr_t>(piece.bytes);
  }
  return Status();
}

void AddInputCopies(const WorkItem& item, const ItemPlace& place, std::vector<InputCopy>* copies) {
  for (int i = 0; i < item.inputs.size(); ++i) {
    const auto* const begin = static_cast<const char*>(item.inputs[i].data);
    int64_t done = 0;
    for (const HostPiece& piece : item.gathered) {
      if (!SpanList{item.inputs[i]}.Contains(piece.to, piece.bytes) || piece.bytes == 0) continue;
      const int64_t at = static_cast<const char*>(piece.to) - begin;
      if (at > done) copies->push_back({place.inputs[i] + done, begin + done, at - done});
      copies->push_back(
          {place.inputs[i] + at, static_cast<const char*>(piece.from), piece.bytes, true});
      done = at + piece.bytes;
    }
    const int64_t left = item.inputs[i].bytes - done;
    if (left > 0) copies->push_back({place.inputs[i] + done, begin + done, left});
  }
}

Result<BatchLayout> LayOut(std::span<const WorkItem> items, int64_t workspace_bytes_max,
                           const BatchCuts& cuts) {
  BatchLayout layout;
  Cursor cursor;
  for (const WorkItem& item : items) {
    ATTEND_RETURN_IF_ERROR(CheckSizes(item, workspace_bytes_max));
  }
  ATTEND_RETURN_IF_ERROR(SizeWorkspace(items, workspace_bytes_max, cuts, &layout));
  layout.workspace = cursor.Take(nullptr, layout.workspace_bytes);
  layout.items.resize(items.size());
  for (size_t n = 0; n < items.size(); ++n) {
    const SpanList& spans = items[n].inputs;
    for (int i = 0; i < spans.size(); ++i) {
      layout.items[n].inputs[i] = cursor.Take(spans[i].data, spans[i].bytes);
    }
  }
  for (size_t n = 0; n < items.size(); ++n) {
    const SpanList& spans = items[n].outputs;
    for (int i = 0; i < spans.size(); ++i) {
      layout.items[n].outputs[i] = cursor.Take(spans[i].data, spans[i].bytes);
    }
  }
  layout.bytes = cursor.end();
  if (cursor.overflow()) return InvalidArgument("bytes of the batch overflow 64 bits");
  return layout;
}

LaunchItem ToLaunch(const WorkItem& item) {
  return {item.selection.kernel, item.attention, kDefaultConfig};
}

BackwardItem ToBackward(const WorkItem& item) {
  const Result<int64_t> most = TurnWorkspaceBytes(item.attention.problem);
  const bool room = most.ok() && item.selection.workspace_bytes >= *most;
  return {item.selection.kernel, item.attention, *item.gradients, room};
}

ItemPlace PlaceIn(void* memory, const WorkItem& item, const ItemLayout& layout) {
  char* const base = static_cast<char*>(memory);
  ItemPlace place;
  for (int n = 0; n < item.inputs.size(); ++n) place.inputs[n] = base + layout.inputs[n];
  for (int n = 0; n < item.outputs.size(); ++n) place.outputs[n] = base + layout.outputs[n];
  return place;
}

Result<Attention> Rebase(const WorkItem& item, const ItemPlace& place) {
  Attention a = item.attention;
  Rebaser in(item.inputs, place.inputs, item.in_place);
  in.Move("q", &a.q.data);
  in.Move("k", &a.k.data);
  in.Move("v", &a.v.data);
  in.Move("bias", &a.bias.data);
  in.Move("alibi_slopes", &a.alibi_slopes);
  in.Move("sinks", &a.sinks);
  in.Move("kv_pages", &a.kv_pages.pages);
  const SpanList nowhere;
  Rebaser host(item.inputs, place.inputs, nowhere);
  host.Move("q_lengths", &a.q_lengths);
  host.Move("kv_lengths", &a.kv_lengths);
  host.Move("q_offsets", &a.q_offsets);
  host.Move("kv_offsets", &a.kv_offsets);
  Rebaser out(item.outputs, place.outputs, item.in_place);
  Rebaser& answer = item.gradients ? in : out;  // the forward pass's result
  answer.Move("o", &a.o.data);
  answer.Move("lse", &a.lse);
  ATTEND_RETURN_IF_ERROR(in.status("input"));
  ATTEND_RETURN_IF_ERROR(host.status("input"));
  ATTEND_RETURN_IF_ERROR(out.status("output"));
  return a;
}

Result<Gradients> RebaseGradients(const WorkItem& item, const ItemPlace& place) {
  Gradients g = *item.gradients;
  Rebaser in(item.inputs, place.inputs, item.in_place);
  in.Move("d_o", &g.d_o.data);
  in.Move("d_lse", &g.d_lse);
  Rebaser out(item.outputs, place.outputs, item.in_place);
  out.Move("d_q", &g.d_q.data);
  out.Move("d_k", &g.d_k.data);
  out.Move("d_v", &g.d_v.data);
  out.Move("d_bias", &g.d_bias.data);
  out.Move("d_sinks", &g.d_sinks);
  ATTEND_RETURN_IF_ERROR(in.status("input"));
  ATTEND_RETURN_IF_ERROR(out.status("output"));
  return g;
}

Result<KeyAppend> RebaseAppend(const WorkItem& item, const ItemPlace& place) {
  KeyAppend append = item.append;
  Rebaser in(item.inputs, place.inputs, item.in_place);
  in.Move("k to be appended", &append.k.data);
  in.Move("v to be appended", &append.v.data);
  ATTEND_RETURN_IF_ERROR(in.status("input"));
  return append;
}

bool OutputIsDense(const WorkItem& item) {
  const Attention& a = item.attention;
  const Problem& p = a.problem;
  if (item.gradients) return false;
  const auto moved = [&](const void* data) { return !item.in_place.Contains(data, 1); };
  int64_t bytes = moved(a.o.data) ? BytesO(p) : 0;
  if (moved(a.lse)) bytes += BytesLse(p);
  return bytes == item.outputs.bytes();
}

}  // namespace attend::cuda
