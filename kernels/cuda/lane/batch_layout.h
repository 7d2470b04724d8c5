// SPDX-License-Identifier: Apache-2.0
//
// Where the items of a batch lie in a lane's device memory, and the same attention with its
// pointers moved there. Pure arithmetic on addresses: nothing is dereferenced, no GPU is needed.

#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/contract/attention_slice.h"
#include "kernels/contract/backend.h"
#include "kernels/cuda/launch/launch.h"

namespace attend::cuda {

inline constexpr int64_t kLayoutAlignment = 256;
inline constexpr int kPoison = 0xff;  // of outputs: NaN in every dtype

// How each item of a batch is cut (cut_plan.h): its parts, or none.
using BatchCuts = std::vector<std::vector<AttentionSlice>>;

// Offsets in bytes from the lane's memory, which is aligned to kLayoutAlignment; of each of the
// item's spans, in their order.
struct ItemLayout {
  std::array<int64_t, SpanList::kMax> inputs{};
  std::array<int64_t, SpanList::kMax> outputs{};
};
struct BatchLayout {
  std::vector<ItemLayout> items;
  int64_t list_bytes = 0;  // ListBytesMax of all launches
  int64_t workspace = 0;   // always first, as it begins with the tile queue, which must stay zero
  int64_t workspace_bytes = 0;
  int64_t bytes = 0;  // of everything
};

// Whether an item's memory in place can be used so: spans of no negative size, lengths and offsets
// on the host, tensors that the selected kernel can address. INVALID_ARGUMENT says what is not.
// Before anything that reads the item's lengths.
Status CheckInPlace(const WorkItem& item);

// Every span that is moved keeps its address modulo kLayoutAlignment, so that whatever is aligned
// on the host is aligned on the device. Inputs come first, then outputs, each in the order of the
// items. The workspace is LaunchBatch's, for all items that are not cut together and for each part
// of `cuts` (one list for each item; none: nothing is cut) by itself. RESOURCE_EXHAUSTED if a
// kernel wants more than `workspace_bytes_max`, INVALID_ARGUMENT for negative sizes or a total that
// overflows 64 bits.
Result<BatchLayout> LayOut(std::span<const WorkItem> items, int64_t workspace_bytes_max,
                           const BatchCuts& cuts = {});

// How an item is started, its memory still where the item has it.
LaunchItem ToLaunch(const WorkItem& item);

// The same as addresses, which need not lie in one piece of memory.
struct ItemPlace {
  std::array<char*, SpanList::kMax> inputs{};
  std::array<char*, SpanList::kMax> outputs{};
};
ItemPlace PlaceIn(void* memory, const WorkItem& item, const ItemLayout& layout);

// That the item's scattered pieces fill places inside its input spans as WorkItem has it.
Status CheckScattered(const WorkItem& item);

// One copy to the device. `mapped`: known to be page-locked.
struct InputCopy {
  char* to = nullptr;
  const char* from = nullptr;
  int64_t bytes = 0;
  bool mapped = false;
};
// Adds what brings the item's inputs to their places: its spans, or the scattered pieces and what
// of the spans they leave.
void AddInputCopies(const WorkItem& item, const ItemPlace& place, std::vector<InputCopy>* copies);

// `item`'s attention with every pointer moved from its span to that span's place; those in place
// stay as they are. INVALID_ARGUMENT names a tensor that does not begin inside one of its spans.
Result<Attention> Rebase(const WorkItem& item, const ItemPlace& place);

// Whether kernels overwrite every byte of the output spans: then nothing of what lay there before
// can come back with the answer. Outputs in place have no spans and bring nothing back.
bool OutputIsDense(const WorkItem& item);

}  // namespace attend::cuda
