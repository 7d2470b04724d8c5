// SPDX-License-Identifier: Apache-2.0
//
// Dimensions are sorted by stride and merged where they are contiguous, which leaves a run width
// and at most three dimensions with gaps. The one with the most elements becomes the rows of a 2D
// copy; the copy is repeated over the others.

#include "kernels/cuda/lane/byte_boxes.h"

#include <algorithm>

namespace attend::cuda {
namespace {

// Merges adjacent runs: grows `width`, and returns the remaining dimensions, which have gaps, by
// stride. False if runs overlap.
bool Merge(const Extents& extents, int64_t* width, std::vector<Extent>* rest) {
  Extents sorted = extents;
  std::sort(sorted.begin(), sorted.end(),
            [](const Extent& a, const Extent& b) { return a.stride < b.stride; });
  int64_t end = *width;  // end of the range that the dimensions so far cover
  for (const Extent& extent : sorted) {
    if (extent.stride < 0) return false;
    if (extent.count == 1 || extent.stride == 0) continue;
    if (extent.stride < end) return false;
    if (rest->empty() && extent.stride == *width) {
      *width *= extent.count;
    } else if (!rest->empty() && extent.stride == rest->back().count * rest->back().stride) {
      rest->back().count *= extent.count;
    } else {
      rest->push_back(extent);
    }
    end += (extent.count - 1) * extent.stride;
  }
  return true;
}

// One box, and the dimensions over which it repeats.
struct Plan {
  ByteBox box;
  std::array<Extent, 3> repeated = {Extent{1, 0}, Extent{1, 0}, Extent{1, 0}};
};

bool MakePlan(int64_t run, const Extents& extents, Plan* plan) {
  std::vector<Extent> rest;
  plan->box.width = run;
  if (!Merge(extents, &plan->box.width, &rest)) return false;
  // As rows, take the dimension that saves most boxes.
  auto rows = rest.end();
  for (auto each = rest.begin(); each != rest.end(); ++each) {
    if (each->stride > kPitchMax) continue;
    if (rows == rest.end() || each->count > rows->count) rows = each;
  }
  if (rows != rest.end()) {
    plan->box.rows = rows->count;
    plan->box.pitch = rows->stride;
    rest.erase(rows);
  }
  std::copy(rest.begin(), rest.end(), plan->repeated.begin());
  return true;
}

bool IsEmpty(int64_t run, const Extents& extents) {
  return run == 0 || std::any_of(extents.begin(), extents.end(),
                                 [](const Extent& extent) { return extent.count == 0; });
}

}  // namespace

bool AppendBoxes(int64_t run, const Extents& extents, std::vector<ByteBox>* boxes) {
  if (IsEmpty(run, extents)) return true;
  Plan plan;
  if (!MakePlan(run, extents, &plan)) return false;
  const auto& [x, y, z] = plan.repeated;
  for (int64_t a = 0; a < x.count; ++a) {
    for (int64_t b = 0; b < y.count; ++b) {
      for (int64_t c = 0; c < z.count; ++c) {
        plan.box.offset = a * x.stride + b * y.stride + c * z.stride;
        boxes->push_back(plan.box);
      }
    }
  }
  return true;
}

int64_t CountBoxes(int64_t run, const Extents& extents) {
  if (IsEmpty(run, extents)) return 0;
  Plan plan;
  if (!MakePlan(run, extents, &plan)) return -1;
  return plan.repeated[0].count * plan.repeated[1].count * plan.repeated[2].count;
}

int64_t SpannedBytes(int64_t run, const Extents& extents) {
  int64_t bytes = run;
  for (const Extent& extent : extents) {
    if (extent.count == 0) return 0;
    bytes += (extent.count - 1) * extent.stride;
  }
  return bytes;
}

}  // namespace attend::cuda
