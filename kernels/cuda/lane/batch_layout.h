// SPDX-License-Identifier: Apache-2.0
//
// Where the items of a batch are in a lane's device memory, and the same attention with its
// pointers moved there. Pure arithmetic on addresses: nothing is dereferenced, and no GPU is
// needed.

#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/contract/attention_slice.h"
#include "kernels/contract/backend.h"
#include "kernels/cuda/backward/backward.h"
#include "kernels/cuda/launch/launch.h"

namespace attend::cuda {

inline constexpr int64_t kLayoutAlignment = 256;
inline constexpr int kPoison = 0xff;  // fills outputs: NaN in every dtype

// How each item of a batch is cut (cut_plan.h): its parts, or none.
using BatchCuts = std::vector<std::vector<AttentionSlice>>;

// Byte offsets of each of the item's spans, in order, from the start of the lane's memory, which is
// aligned to kLayoutAlignment.
struct ItemLayout {
  std::array<int64_t, SpanList::kMax> inputs{};
  std::array<int64_t, SpanList::kMax> outputs{};
};
struct BatchLayout {
  std::vector<ItemLayout> items;
  int64_t list_bytes = 0;  // ListBytesMax of all launches
  int64_t workspace = 0;   // always first: it begins with the tile queue, which must stay zero
  int64_t workspace_bytes = 0;
  int64_t bytes = 0;  // of everything
};

// Checks that an item's memory can be used in place: no span has a negative size, lengths and
// offsets are on the host, and the selected kernel can address the tensors. INVALID_ARGUMENT says
// what is wrong. Call before anything that reads the item's lengths.
Status CheckInPlace(const WorkItem& item);

// Every span that is moved keeps its address modulo kLayoutAlignment, so that what is aligned on
// the host is aligned on the device. Inputs come first, then outputs, each in the order of the
// items. The workspace is LaunchBatch's: enough for all uncut items together, and for each part of
// `cuts` by itself (one list per item; empty if nothing is cut). Items with gradients have at least
// what LaunchBackward needs for the largest, and what it wants for all up to `workspace_bytes_max`.
// RESOURCE_EXHAUSTED if a kernel needs more than `workspace_bytes_max`. INVALID_ARGUMENT for
// negative sizes or a total that overflows 64 bits.
Result<BatchLayout> LayOut(std::span<const WorkItem> items, int64_t workspace_bytes_max,
                           const BatchCuts& cuts = {});

// The launch of an item, with the item's own pointers.
LaunchItem ToLaunch(const WorkItem& item);
// The same for an item with gradients.
BackwardItem ToBackward(const WorkItem& item);

// An item's spans as addresses, which need not be contiguous.
struct ItemPlace {
  std::array<char*, SpanList::kMax> inputs{};
  std::array<char*, SpanList::kMax> outputs{};
};
ItemPlace PlaceIn(void* memory, const WorkItem& item, const ItemLayout& layout);

// Checks that the item's gathered pieces are inside its input spans, as WorkItem requires.
Status CheckGathered(const WorkItem& item);

// One copy to the device. `mapped`: known to be page-locked.
struct InputCopy {
  char* to = nullptr;
  const char* from = nullptr;
  int64_t bytes = 0;
  bool mapped = false;
};
// Adds the copies that bring the item's inputs to their places: its spans, or the gathered pieces
// and the rest of the spans.
void AddInputCopies(const WorkItem& item, const ItemPlace& place, std::vector<InputCopy>* copies);

// `item`'s attention with every pointer moved from its span to that span's place. Pointers to
// memory in place stay as they are. INVALID_ARGUMENT names a tensor that does not begin inside one
// of its spans.
Result<Attention> Rebase(const WorkItem& item, const ItemPlace& place);

// Likewise the gradients of an item that has them.
Result<Gradients> RebaseGradients(const WorkItem& item, const ItemPlace& place);

// Likewise the rows that the item appends.
Result<KeyAppend> RebaseAppend(const WorkItem& item, const ItemPlace& place);

// Whether kernels overwrite every byte of the output spans, so that no earlier contents can come
// back with the answer. Outputs in place have no spans and bring nothing back.
bool OutputIsDense(const WorkItem& item);

}  // namespace attend::cuda
