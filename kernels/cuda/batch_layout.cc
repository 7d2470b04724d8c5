// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/batch_layout.h"

#include <algorithm>
#include <string>
#include <vector>

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

// Moves pointers from one span to another; remembers the first that lay outside.
class Rebaser {
 public:
  Rebaser(const HostSpan& from, void* to) : from_(from), to_(static_cast<char*>(to)) {}

  template <class T>
  void Move(const char* name, T** pointer) {
    if (*pointer == nullptr) return;
    const uintptr_t address = reinterpret_cast<uintptr_t>(*pointer);
    const uintptr_t begin = reinterpret_cast<uintptr_t>(from_.data);
    // One past the end is where an empty tensor may lie.
    if (address < begin || address - begin > static_cast<uintptr_t>(from_.bytes)) {
      if (outside_ == nullptr) outside_ = name;
      return;
    }
    *pointer = reinterpret_cast<T*>(to_ + (address - begin));
  }

  Status status(const char* span) const {
    if (outside_ == nullptr) return Status();
    return InvalidArgument(std::string(outside_) + " does not begin inside the item's " + span +
                           " span of " + std::to_string(from_.bytes) + " bytes");
  }

 private:
  HostSpan from_;
  char* to_;
  const char* outside_ = nullptr;
};

}  // namespace

Result<BatchLayout> LayOut(std::span<const WorkItem> items, int64_t workspace_bytes_max) {
  BatchLayout layout;
  Cursor cursor;
  std::vector<LaunchItem> launches;
  for (const WorkItem& item : items) {
    if (item.input.bytes < 0 || item.output.bytes < 0 || item.selection.workspace_bytes < 0) {
      return InvalidArgument("a span or workspace of " +
                             std::to_string(std::min({item.input.bytes, item.output.bytes,
                                                      item.selection.workspace_bytes})) +
                             " bytes, must be at least 0");
    }
    if (item.selection.workspace_bytes > workspace_bytes_max) {
      return ResourceExhausted("kernel workspace is " +
                               std::to_string(item.selection.workspace_bytes) +
                               " bytes, the limit is " + std::to_string(workspace_bytes_max));
    }
    launches.push_back(ToLaunch(item));
  }
  const Result<int64_t> workspace_bytes = BatchWorkspaceBytes(launches);
  if (!workspace_bytes.ok()) return workspace_bytes.status();
  layout.workspace_bytes = *workspace_bytes;
  layout.workspace = cursor.Take(nullptr, layout.workspace_bytes);
  for (const WorkItem& item : items) {
    ItemLayout place;
    place.input = cursor.Take(item.input.data, item.input.bytes);
    place.output = cursor.Take(item.output.data, item.output.bytes);
    layout.items.push_back(place);
  }
  layout.bytes = cursor.end();
  if (cursor.overflow()) return InvalidArgument("bytes of the batch overflow 64 bits");
  return layout;
}

LaunchItem ToLaunch(const WorkItem& item) {
  return {item.selection.kernel, item.attention, kDefaultConfig};
}

Result<Attention> Rebase(const WorkItem& item, void* input, void* output) {
  Attention a = item.attention;
  Rebaser in(item.input, input);
  in.Move("q", &a.q.data);
  in.Move("k", &a.k.data);
  in.Move("v", &a.v.data);
  in.Move("bias", &a.bias.data);
  in.Move("alibi_slopes", &a.alibi_slopes);
  in.Move("sinks", &a.sinks);
  in.Move("q_lengths", &a.q_lengths);
  in.Move("kv_lengths", &a.kv_lengths);
  in.Move("q_offsets", &a.q_offsets);
  in.Move("kv_offsets", &a.kv_offsets);
  Rebaser out(item.output, output);
  out.Move("o", &a.o.data);
  out.Move("lse", &a.lse);
  ATTEND_RETURN_IF_ERROR(in.status("input"));
  ATTEND_RETURN_IF_ERROR(out.status("output"));
  return a;
}

bool OutputIsDense(const WorkItem& item) {
  const Problem& p = item.attention.problem;
  int64_t bytes = ElementsO(p) * DTypeBytes(p.dtype);
  if (p.return_lse) bytes += ElementsLse(p) * static_cast<int64_t>(sizeof(float));
  return bytes == item.output.bytes;
}

}  // namespace attend::cuda
