// SPDX-License-Identifier: Apache-2.0
//
// A session: the KV cache of one sequence on one device. It has layers, each with its own shape and
// length, because a model appends to one layer after another. Their pages are in a PageTree.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/contract/dtype.h"
#include "kernels/util/clock.h"
#include "server/limits/tenant_limits.h"
#include "server/sessions/page_tree.h"

namespace attend {

// "length is 7, must be in [0, 5]"
std::string OutOfBounds(const std::string& field, int64_t value, int64_t low, int64_t high);

struct LayerShape {
  DType dtype = DType::kFloat16;  // of K and V
  int64_t heads_kv = 0;           // Hkv
  int64_t dim = 0;                // D
  int64_t dim_v = 0;              // Dv

  friend bool operator==(const LayerShape&, const LayerShape&) = default;
};

// The layout of a page: K as [Hkv, page_rows, D], then V as [Hkv, page_rows, Dv], both at multiples
// of kPageUnitBytes. No page is smaller than kPageBytesMin, which bounds the number of pages of a
// device whatever the shapes.
inline constexpr int64_t kPageBytesMin = 4096;
struct PageLayout {
  int64_t page_rows = 0;
  int64_t k_bytes = 0;  // rounded up; V begins here
  int64_t page_bytes = 0;
};
PageLayout LayoutOf(const LayerShape& shape, int64_t page_rows);

struct Layer {
  LayerShape shape;
  PageLayout layout;
  int64_t length = 0;  // tokens
  // An append or a truncation is in progress: no other may begin.
  bool changing = false;
  // The last append, so that it can be retried; empty: none.
  std::string append_id = {};
  int64_t append_begin = 0;
  // Eviction removed the tokens from here on; -1: none, or they were appended again.
  int64_t evicted_from = -1;
};

struct Session {
  std::string id;  // kTokenBytes random bytes
  int tenant = 0;
  int device = 0;
  Duration lease{};     // the session ends this long after its last use
  bool pinned = false;  // never evicted while its lease lasts
  TimePoint last_used{};
  TimePoint look_again{};  // when to check whether the lease has ended
  int64_t in_use = 0;      // requests that read or change it
  std::vector<Layer> layers;
  // The last KeepDraft (Cut::draft), so that it can be repeated; 0: something came after it.
  uint64_t draft = 0;
  PageTree::Branch* leaf = nullptr;  // its last branch; null: the session was freed
  CountHold place = {};              // counts against its tenant's limit until it is freed

  // The length of its shortest layer.
  int64_t length() const;
  int64_t longest() const;  // the length of its longest layer
};

// Table memory of a session without its pages: includes its leaf and one inner branch.
int64_t FixedBytes(int64_t layers);

// The parameters of a new session.
struct SessionSpec {
  int device = 0;
  std::vector<LayerShape> layers;
  Duration lease{};  // zero: the default
  bool pinned = false;
};

// A description of a session.
struct SessionInfo {
  std::string id;
  int tenant = 0;
  int device = 0;
  int64_t length = 0;  // of the shortest layer
  std::vector<LayerShape> layers = {};
  std::vector<int64_t> layer_lengths = {};
  Duration lease_left{};
  bool pinned = false;
  int64_t bytes = 0;         // of its pages
  int64_t shared_bytes = 0;  // of pages shared with other sessions
  bool lost = false;         // its device is lost: it can only be freed
};

}  // namespace attend
