// SPDX-License-Identifier: Apache-2.0
//
// A request's lease on the sessions it reads or appends to. SessionTable::Hold makes it: that takes
// no memory, but renews the leases. Once the request has been admitted, Reserve takes pages for the
// appended rows. From then on the pages do not change until End: pages that are truncated or freed
// stay where the request reads them, and none is evicted. Appended rows count only once the hold is
// committed, those of all sequences at once.
//
//   held --1--> reserved --2--> committed
//     |             |               |
//     +------3------+-------3-------+--> ended
//
// 1  Reserve returned OK: the hold has its pages and reads each layer. If it appends, no other
//    append or truncation of these layers may begin.
// 2  Commit: the new rows belong to the sessions, and other appends may begin. Rows of a session
//    that was freed in between are released with the hold.
// 3  End: the hold no longer uses the sessions. Pages of uncommitted rows are freed at once.
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
  int64_t length = 0;     // the length the client believes the layer has
  std::string append_id;  // chosen by the client; empty: the append cannot be retried
};

// Machine-readable details of a refusal.
struct CacheRefusal {
  std::vector<int64_t> lengths =
      {};                     // of all sequences' layers, if one was wrong; -1: no such layer
  int64_t missing_bytes = 0;  // bytes missing, if there was no memory for the pages
};

// The table's record of a hold. Only the table changes it, under its lock. The shape, the
// sequences' lengths and the appended rows are fixed once the hold has been made.
struct HeldCaches {
  struct Sequence {
    std::span<const PageNumber> pages;  // set by Reserve
    int64_t length = 0;                 // includes the appended rows
  };

  // The pages of the n-th sequence, including those of appended rows.
  int64_t PagesOf(size_t n) const {
    return (sequences[n].length + layout.page_rows - 1) / layout.page_rows;
  }
  // After Reserve: the pages of the n-th sequence that belong to the hold, not to the session,
  // because their rows are not committed.
  std::span<const PageNumber> OwnPages(size_t n) const {
    return sequences[n].pages.subspan(own[n]);
  }

  int device = 0;
  DeviceArena* arena = nullptr;
  LayerShape shape;
  PageLayout layout;
  std::vector<Sequence> sequences = {};
  int64_t new_rows = 0;  // rows the request brought
  int64_t append_rows = 0;
  bool committed = false;
  std::vector<CacheUse> uses = {};
  std::vector<std::shared_ptr<Session>> sessions = {};  // counted in Session::in_use
  // Set by Reserve: the pinned leaves, and the index of each sequence's first page that belongs to
  // the hold rather than to the session.
  std::vector<PageTree::Branch*> leaves = {};
  std::vector<size_t> own = {};
};

// Appends nothing unless it was committed. The table must outlive it.
class CacheHold {
 public:
  using Sequence = HeldCaches::Sequence;

  // Made by SessionTable::Hold. `held` may be filled later.
  CacheHold(SessionTable& table, std::unique_ptr<HeldCaches> held)
      : table_(table), held_(std::move(held)) {}
  ~CacheHold();
  CacheHold(const CacheHold&) = delete;
  CacheHold& operator=(const CacheHold&) = delete;

  int device() const { return held_->device; }
  // Base address of the pages: page n begins at base() + n * kPageUnitBytes.
  DeviceArena& arena() const { return *held_->arena; }
  char* base() const { return static_cast<char*>(arena().memory().data); }
  const LayerShape& shape() const { return held_->shape; }
  const PageLayout& layout() const { return held_->layout; }
  const std::vector<Sequence>& sequences() const { return held_->sequences; }
  // New rows at the end of every sequence that the request has to write; 0 if it brought none, or
  // if an earlier request with the same append id has already written them.
  int64_t append_rows() const { return held_->append_rows; }
  // The length of the longest sequence.
  int64_t length_max() const;

  // Takes pages for the new rows, and writes the page numbers of all sequences to the caller's
  // table, `stride` entries each, unused ones 0. The table must outlive the hold; it is the
  // caller's so that long tables count towards the request's memory. Call once, before Commit.
  // Fails like Hold, because the sessions may have changed in between; RESOURCE_EXHAUSTED: no
  // memory for the pages.
  Status Reserve(PageNumber* table, int64_t stride, CacheRefusal* refusal = nullptr);
  // The rows have been written: they belong to the sessions from now on. Call once, before End.
  void Commit();
  // The pages are no longer read. The accessors stay valid. Also called by the destructor.
  void End();

 private:
  SessionTable& table_;
  const std::unique_ptr<HeldCaches> held_;
  bool ended_ = false;
};

}  // namespace attend
