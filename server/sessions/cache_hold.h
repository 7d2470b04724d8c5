// SPDX-License-Identifier: Apache-2.0
//
// A request's lease on the sessions it reads or appends to. A hold is made by SessionTable::Hold,
// which takes no memory, but renews the leases; once the request has been admitted, Reserve takes
// the pages of what is appended. From then on the pages stay as they are until End: what is
// truncated or freed until then stays where the request reads it, and nothing of it is evicted.
// Rows that are appended count only once the hold is committed, those of all sequences at once.
//
//   held --1--> reserved --2--> committed
//     |             |               |
//     +------3------+-------3-------+--> ended
//
//   1  Reserve, if OK: the hold has its pages and reads each layer. If it appends, no other append
//      and no truncation may begin.
//   2  Commit: the new rows are the sessions', and others may append. Those of a session that was
//      freed since go with the hold.
//   3  End: the hold no longer uses the sessions. Pages whose rows were not committed go at once.
//
// Used by one thread at a time.

#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/util/status.h"
#include "server/sessions/session.h"

namespace attend {

class SessionTable;

// The session and layer that one sequence of a request uses.
struct CacheUse {
  std::string session;
  int64_t layer = 0;
  int64_t length = 0;     // that the client believes the layer has
  std::string append_id;  // chosen by the client; empty: an append cannot be asked for again
};

// A refusal's details for programs.
struct CacheRefusal {
  std::vector<int64_t> lengths =
      {};                     // of all sequences' layers, if one was wrong; -1: no such layer
  int64_t missing_bytes = 0;  // if there was no memory for the pages
};

// The table's record of a hold, which the table alone changes, under its lock. Once the hold has
// been made, its shape, its sequences' lengths and the rows it appends stay as they are.
struct HeldCaches {
  struct Sequence {
    std::span<const PageNumber> pages;  // from Reserve on
    int64_t length = 0;                 // with what is appended
  };

  // The pages of the n-th sequence, with what is appended.
  int64_t PagesOf(size_t n) const {
    return (sequences[n].length + layout.page_rows - 1) / layout.page_rows;
  }
  // From Reserve on: those of the n-th sequence that are not the session's, as nothing of what is
  // appended has been committed.
  std::span<const PageNumber> OwnPages(size_t n) const {
    return sequences[n].pages.subspan(own[n]);
  }

  int device = 0;
  DeviceArena* arena = nullptr;
  LayerShape shape;
  PageLayout layout;
  std::vector<Sequence> sequences = {};
  int64_t new_rows = 0;  // that the request brought
  int64_t append_rows = 0;
  bool committed = false;
  std::vector<CacheUse> uses = {};
  std::vector<std::shared_ptr<Session>> sessions = {};  // in use
  // From Reserve on: the leaves of these, which are pinned; and the first page of each sequence
  // that is the hold's own, not the session's.
  std::vector<PageTree::Branch*> leaves = {};
  std::vector<size_t> own = {};
};

// Ends without appending anything unless it was committed. The table must outlive it.
class CacheHold {
 public:
  using Sequence = HeldCaches::Sequence;

  // Made by SessionTable::Hold. `held` need not be filled yet.
  CacheHold(SessionTable& table, std::unique_ptr<HeldCaches> held)
      : table_(table), held_(std::move(held)) {}
  ~CacheHold();
  CacheHold(const CacheHold&) = delete;
  CacheHold& operator=(const CacheHold&) = delete;

  int device() const { return held_->device; }
  // Where the pages are: page n begins at base() + n * kPageUnitBytes.
  DeviceArena& arena() const { return *held_->arena; }
  char* base() const { return static_cast<char*>(arena().memory().data); }
  const LayerShape& shape() const { return held_->shape; }
  const PageLayout& layout() const { return held_->layout; }
  const std::vector<Sequence>& sequences() const { return held_->sequences; }
  // New rows at the end of every sequence that the request has to write; 0 if it brought none, or
  // if an earlier request with the same append id has written them.
  int64_t append_rows() const { return held_->append_rows; }
  // The length of the longest sequence.
  int64_t length_max() const;

  // Takes pages for the new rows, and writes all sequences' page numbers to the caller's table,
  // `stride` entries for each (the rest of them 0), which must outlive the hold: so long tables
  // count towards the request's memory. Once, before Commit. Returns the same errors as Hold, as
  // the sessions may have changed since; RESOURCE_EXHAUSTED: there is no memory for the pages.
  Status Reserve(PageNumber* table, int64_t stride, CacheRefusal* refusal = nullptr);
  // The rows have been written: from now on they are the sessions'. Once, before End.
  void Commit();
  // The pages are not read any more. What the hold says stays. Also when it is destroyed.
  void End();

 private:
  SessionTable& table_;
  const std::unique_ptr<HeldCaches> held_;
  bool ended_ = false;
};

}  // namespace attend
