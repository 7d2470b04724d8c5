// SPDX-License-Identifier: Apache-2.0
//
// A random history of a session table, and a model that keeps each layer's tokens in a vector.
// Requests are executed step by step, so that several are in progress at once, and steps can happen
// while a fork or truncation copies its pages. Freed memory is poisoned. After each step the table
// must list exactly the model's sessions, each open request must find its rows unchanged, and the
// pools' sums must match the holders of their pages. A tenant is never refused its own part,
// nothing in use is evicted, and another tenant loses only pages beyond its part. Memory may run
// out in the middle of any operation: the operation is refused and changes nothing.

#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "server/sessions/session_table.h"
#include "tests/kernels/support/manual_clock.h"
#include "tests/server/support/test_arena.h"

namespace attend::test {

class TableHistory {
 public:
  // The next choice, from `low` to `high`.
  using Choose = std::function<int64_t(int64_t low, int64_t high)>;
  // Called before an operation: an allocation may fail while its result lives. Null: memory does
  // not run out.
  using Shortage = std::function<std::shared_ptr<void>()>;
  explicit TableHistory(Choose choose, Shortage shortage = {});

  // Expectations are GoogleTest's.
  void Step();
  // Ends all requests, reads all remaining sessions and frees them.
  void End();

  // Number of events by name.
  using Counts = std::map<std::string, int64_t>;
  Counts counts() const;

 private:
  static constexpr int kTenants = 2, kDevices = 2;
  static constexpr int64_t kRows = 16;
  static constexpr int64_t kSlabBytes = 16 * 1024;
  static constexpr int64_t kBytes = 6 * kSlabBytes + kPageUnitBytes;
  // A page's fraction of a slab, including the slab's unused rest.
  static int64_t ChargeOf(int64_t page_bytes) { return kSlabBytes / (kSlabBytes / page_bytes); }

  // Every element of a token's rows of K and V is the same number, unique to the token.
  using Tokens = std::vector<uint16_t>;
  struct ModelLayer {
    LayerShape shape;
    Tokens tokens = {};
    std::string append_id = {};  // of the last append
    int64_t append_begin = 0;
    bool evicted = false;  // it has lost tokens, with no append or cut since

    int64_t length() const { return std::ssize(tokens); }
  };
  struct Draft {
    int64_t length = 0;
    std::vector<int64_t> kept = {};

    friend bool operator==(const Draft&, const Draft&) = default;
  };
  struct ModelSession {
    int tenant = 0;
    int device = 0;
    Duration lease{};
    TimePoint last_used{};
    bool pinned = false;
    std::vector<ModelLayer> layers = {};
    // The last KeepDraft that moved tokens, if nothing came after it; else `kept` is empty.
    Draft draft = {};

    int64_t length() const;  // of the shortest layer
    int64_t longest() const;
  };
  using Sessions = std::map<std::string, ModelSession>;
  struct Request {
    int tenant = 0;
    std::vector<CacheUse> uses = {};
    int64_t rows = 0;
  };
  // A request in progress.
  struct Open {
    enum class State { kLooked, kReserved, kCommitted };
    Request request;
    std::vector<Tokens> tokens;  // of each sequence, including the append
    State state = State::kLooked;
    std::vector<PageNumber> table = {};  // outlives the hold
    std::unique_ptr<CacheHold> hold = {};
    // all layers of its sessions, which may share its pages, have the same page size
    bool alike = true;
  };
  using OpenRef = std::list<Open>::iterator;

  int64_t Range(int64_t low, int64_t high) { return choose_(low, high); }
  std::shared_ptr<void> BeginShortage() const { return shortage_ ? shortage_() : nullptr; }
  // For a call that may be refused for lack of memory.
  template <class Call>
  auto Try(const Call& call) -> decltype(call()) {
    try {
      short_ = BeginShortage();
      auto result = call();
      short_ = nullptr;
      return result;
    } catch (const std::bad_alloc&) {
      short_ = nullptr;
      ++counts_["failed allocations"];
      return ResourceExhausted("bad_alloc");
    }
  }
  // For a call that allocates nothing.
  template <class Call>
  void Must(const Call& call) {
    short_ = BeginShortage();
    EXPECT_NO_THROW(call());
    short_ = nullptr;
  }
  // The expected code, or lack of memory.
  void ExpectCode(const Status& status, Code code) const;
  Sessions::iterator Any();
  bool InUse(const std::string& id) const;
  // A lease does not end while a request uses the session.
  bool Over(const std::string& id) const;
  // Whether an append or a truncation is in progress.
  bool Changing(const std::string& id, int64_t layer) const;
  void Touch(const std::string& id);
  // For a refused call: whether it has renewed the lease is unspecified.
  void Renew(int tenant, const std::string& id);

  // Steps.
  void Create();
  void Fork();
  // A truncation, or one that keeps some tokens of a draft.
  void Truncate();
  void Free();
  void Advance();
  void KeepAlive();
  void Guess();
  void LoseDevice();
  void Begin();
  void GoOn(OpenRef open);

  Draft DrawDraft(const ModelSession& session);
  // The answer of a session that no append changes.
  static Code JudgeDraft(const ModelSession& session, const Draft& draft);
  static void Keep(const Draft& draft, ModelSession& session);

  // While pages are copied.
  void Meanwhile();
  Request MakeRequest();
  // The table's expected answer to a request at its hold (`hold` is null) or its reservation, if
  // there is room. `there`: how many of its appends have been made.
  Code Judge(const Request& request, const CacheHold* hold, int64_t& there) const;
  bool Fits(const Request& request, int64_t rows) const;
  // The pages that the request's append takes for its n-th sequence.
  static int64_t FreshBytes(const Open& open, size_t n);
  // The tenant's own part of the memory for sessions, and the most it can have.
  int64_t OwnBytes(int device, int tenant) const;
  int64_t MostBytes(int device, int tenant) const;
  // Whether all existing pages have this size.
  bool Alike(int device, int64_t page_bytes) const;
  // Whether a refusal of pages is right: even all evictable pages would not have sufficed.
  void ExpectShort(const Open& open, const CacheRefusal& refusal);
  void Reserve(OpenRef open);
  // The hold has its pages, for the tokens that its sessions have now.
  void TakeTokens(Open& open);
  // Reserve was refused. Except for lack of memory, `code` was expected.
  void CloseRefused(OpenRef open, const Status& status, Code code, const CacheRefusal& refusal);
  // Records the tokens that others have lost to that tenant.
  void NoteEvicted(int tenant, int device);
  void Commit(Open& open);
  void Close(OpenRef open);
  void ReadAll();

  // Compares the table with the model.
  void Settle();
  void TakeEvictions(const std::string& id, const SessionInfo& info);
  void ExpectSums(const std::vector<SessionInfo>& listed) const;
  static void Write(const Open& open);
  // Checks one of this many tokens.
  static void ExpectTokens(const Open& open, int64_t first, int64_t step);

  const Choose choose_;
  const Shortage shortage_;
  // Nothing is freed and no lease ends, so that memory is always short.
  const bool crowded_;
  std::shared_ptr<void> short_;
  ManualClock clock_;
  std::array<std::unique_ptr<TestArena>, kDevices> arenas_;
  std::unique_ptr<SessionTable> table_;
  Sessions sessions_;
  std::list<Open> open_;
  std::vector<Request> requests_;  // the last ones, which may be retried
  std::string truncating_;         // the session of a truncation that copies
  int tenant_ = 0, device_ = 0;    // the request whose cut copies
  bool copying_ = false;
  bool lost_ = false;  // device 1 is
  int64_t ids_ = 0, settled_ = 0;
  int64_t created_ = 0, expired_ = 0;
  int64_t evicted_ = 0;                                             // for another tenant
  std::vector<int64_t> appended_ = std::vector<int64_t>(kTenants);  // tokens, by tenant
  uint32_t token_ = 0;
  Counts counts_;
};

}  // namespace attend::test
