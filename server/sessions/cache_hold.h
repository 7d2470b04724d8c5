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

// Ends without appending anything unless it was committed. The table must outlive it.
class CacheHold {
 public:
  struct Sequence {
    std::span<const PageNumber> pages;  // from Reserve on
    int64_t length = 0;                 // with what is appended
  };

  ~CacheHold();
  CacheHold(const CacheHold&) = delete;
  CacheHold& operator=(const CacheHold&) = delete;

  int device() const { return device_; }
  // Where the pages are: page n begins at base() + n * kPageUnitBytes.
  DeviceArena& arena() const { return *arena_; }
  char* base() const { return static_cast<char*>(arena_->memory().data); }
  const LayerShape& shape() const { return shape_; }
  const PageLayout& layout() const { return layout_; }
  const std::vector<Sequence>& sequences() const { return sequences_; }
  // New rows at the end of every sequence that the request has to write; 0 if it brought none, or
  // if an earlier request with the same append id has written them.
  int64_t append_rows() const { return append_rows_; }
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
  friend class SessionTable;
  explicit CacheHold(SessionTable& table) : table_(table) {}
  // The pages of the n-th sequence, with what is appended.
  int64_t PagesOf(size_t n) const {
    return (sequences_[n].length + layout_.page_rows - 1) / layout_.page_rows;
  }
  // From Reserve on: those of the n-th sequence that are not the session's, as nothing of what is
  // appended has been committed.
  std::span<const PageNumber> OwnPages(size_t n) const {
    return sequences_[n].pages.subspan(own_[n]);
  }

  SessionTable& table_;
  int device_ = 0;
  DeviceArena* arena_ = nullptr;
  LayerShape shape_;
  PageLayout layout_;
  std::vector<Sequence> sequences_;
  int64_t new_rows_ = 0;  // that the request brought
  int64_t append_rows_ = 0;
  bool committed_ = false;
  bool ended_ = false;
  std::vector<CacheUse> uses_;
  std::vector<std::shared_ptr<Session>> sessions_;
  // From Reserve on: the leaves of these, which are pinned; and the first page of each sequence
  // that is the hold's own, not the session's.
  std::vector<PageTree::Branch*> leaves_;
  std::vector<size_t> own_;
};

}  // namespace attend
