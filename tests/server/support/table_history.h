// SPDX-License-Identifier: Apache-2.0
//
// A random history of a table of sessions, beside a model that keeps each layer's tokens in a
// vector. Pages that become free are poisoned, and every row that a hold shows must be the model's.
// Memory may run out in the middle of any operation: that is then refused, and has changed nothing.

#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "server/sessions/session_table.h"
#include "tests/kernels/support/counted_new.h"
#include "tests/kernels/support/manual_clock.h"
#include "tests/server/support/test_arena.h"

namespace attend::test {

// Has sometimes no memory for a copy.
class ShortArena final : public DeviceArena {
 public:
  explicit ShortArena(int64_t bytes) : arena_(bytes) {}
  HostSpan memory() const override { return arena_.memory(); }
  bool on_host() const override { return true; }
  Status Copy(std::span<const HostPiece> pieces) override {
    return short_of_memory() ? ResourceExhausted("no memory to copy") : arena_.Copy(pieces);
  }
  std::function<bool()> short_of_memory;

 private:
  test::TestArena arena_;
};

class TableHistory {
 public:
  // `failing`: of each call for which there is little memory, this allocation fails; 0: there is
  // always enough.
  explicit TableHistory(uint64_t seed, int64_t failing = 0) : random_(seed), failing_(failing) {
    arena_.short_of_memory = [this] { return IsShort(); };
    Poison(static_cast<char*>(arena_.memory().data), kBytes);
    const SessionDevice device{&arena_, Poison};
    SessionOptions options;
    options.page_rows = kRows;
    options.slab_bytes = kSlabBytes;
    options.sessions_max = 40;
    options.tenant_weights = {3, 1};
    table_ = std::make_unique<SessionTable>(
        options, clock_, [this]() -> Result<std::string> { return std::to_string(++ids_); },
        std::vector{device});
  }

  void Step() {
    switch (Range(0, 11)) {
      case 0:
        return Create();
      case 1:
        return Fork();
      case 2:
        return Truncate();
      case 3:
        return Free();
      case 4:
        clock_.Advance(std::chrono::seconds(Range(0, 8)));
        return;
      case 5:
        return EndRead();
      case 6:
        return Guess();
      default:
        return Use();
    }
  }

  void Check() const {
    ASSERT_TRUE(table_->Consistent());
    for (const Read& read : reads_) ExpectTokens(*read.held.hold, 0, read.tokens);
  }

  void End() {
    while (!reads_.empty()) EndRead();
    for (auto& [id, session] : model_) {
      // Those whose leases are over are gone.
      const Status status = table_->Free(session.tenant, id);
      ASSERT_TRUE(status.ok() || Over(id)) << status.ToString();
    }
    ASSERT_TRUE(table_->Consistent());
    EXPECT_EQ(table_->stats().sessions, 0) << "one that its client was not told of";
    EXPECT_EQ(table_->memory(0).used_bytes, 0);
    EXPECT_EQ(table_->memory(0).free_bytes, table_->memory(0).total_bytes);
  }

  int64_t evictions() const { return table_->stats().evictions_own; }
  int64_t evictions_others() const { return table_->stats().evictions_others; }
  int64_t expired() const { return table_->stats().expired; }
  int64_t refused = 0, repeated = 0, shared_cuts = 0, exhausted = 0, failures = 0;

 private:
  static constexpr int64_t kRows = 16;
  static constexpr int64_t kSlabBytes = 16 * 1024;
  static constexpr int kTenants = 2;

  // Every element of a token's rows of K and V is its own number.
  using Tokens = std::vector<uint16_t>;
  struct ModelSession {
    int tenant = 0;
    int64_t lease_s = 0;
    TimePoint last_used{};
    bool pinned = false;
    std::vector<LayerShape> shapes;
    std::vector<Tokens> layers;
  };

  bool IsShort() { return failing_ > 0 && Range(0, 2) == 0; }
  // For a call that may be refused for want of memory.
  template <class Call>
  auto Try(const Call& call) -> decltype(call()) {
    if (!IsShort()) return call();
    try {
      const HeapFault fault(failing_);
      return call();
    } catch (const std::bad_alloc&) {
      ++failures;
      return ResourceExhausted("bad_alloc");
    }
  }
  // For one that takes none.
  template <class Call>
  void Must(const Call& call) {
    std::optional<HeapFault> fault;
    if (IsShort()) fault.emplace(failing_);
    EXPECT_NO_THROW(call());
  }

  static constexpr int64_t kBytes = 12 * kSlabBytes + kPageUnitBytes;
  // A hold, and the table of its pages, which outlives it.
  struct Held {
    std::vector<PageNumber> table;
    std::unique_ptr<CacheHold> hold;
  };
  struct Read {
    std::string id;
    Held held;
    Tokens tokens;
  };

  static void Poison(char* data, int64_t bytes) {
    std::memset(data, 0xff, static_cast<size_t>(bytes));
  }
  int64_t Range(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }
  // A lease does not end while a request uses the session.
  bool Over(const std::string& id) const {
    const ModelSession& session = model_.at(id);
    return clock_.Now() - session.last_used >= std::chrono::seconds(session.lease_s) &&
           std::none_of(reads_.begin(), reads_.end(), [&](const Read& r) { return r.id == id; });
  }
  std::map<std::string, ModelSession>::iterator Any() {
    auto it = model_.begin();
    std::advance(it, Range(0, std::ssize(model_) - 1));
    return it;
  }
  // What a call about a session may say besides OK: it was evicted or its lease is over.
  void Sync(const std::string& id) {
    ModelSession& session = model_.at(id);
    if (Over(id)) {
      EXPECT_EQ(table_->Get(session.tenant, id).status().code(), Code::kNotFound);
      model_.erase(id);
      return;
    }
    const Result<SessionInfo> info = table_->Get(session.tenant, id);
    ASSERT_TRUE(info.ok()) << info.status().ToString();
    session.last_used = clock_.Now();
    for (size_t n = 0; n < session.layers.size(); ++n) {
      const auto length = static_cast<size_t>(info->layer_lengths[n]);
      ASSERT_LE(length, session.layers[n].size());
      if (length == session.layers[n].size()) continue;
      EXPECT_FALSE(session.pinned) << "what is pinned is not evicted";
      EXPECT_EQ(length % kRows, 0u) << "whole pages are evicted";
      session.layers[n].resize(length);
    }
  }

  void Create() {
    ModelSession session;
    session.tenant = static_cast<int>(Range(0, kTenants - 1));
    session.lease_s = Range(1, 60);
    session.pinned = Range(0, 9) == 0;
    const int64_t layers = Range(1, 3);
    for (int64_t n = 0; n < layers; ++n) {
      session.shapes.push_back({DType::kFloat16, Range(1, 3), 8 * Range(1, 4), 8 * Range(1, 4)});
    }
    session.layers.resize(static_cast<size_t>(layers));
    const Result<SessionInfo> made = Try([&] {
      return table_->Create(
          session.tenant,
          {0, session.shapes, std::chrono::seconds(session.lease_s), session.pinned});
    });
    if (!made.ok()) {
      EXPECT_EQ(made.status().code(), Code::kResourceExhausted);
      return;
    }
    session.last_used = clock_.Now();
    model_[made->id] = session;
  }

  void Fork() {
    if (model_.empty()) return;
    const auto origin = Any();
    const std::string id = origin->first;
    Sync(id);
    if (!model_.contains(id)) return;
    ModelSession copy = model_.at(id);
    size_t whole = copy.layers[0].size();
    for (const Tokens& tokens : copy.layers) whole = std::min(whole, tokens.size());
    const int64_t length = Range(0, static_cast<int64_t>(whole) + 1);
    const Result<SessionInfo> fork = Try([&] { return table_->Fork(copy.tenant, id, length); });
    if (length > static_cast<int64_t>(whole)) {
      EXPECT_FALSE(fork.ok());
      EXPECT_TRUE(failing_ > 0 || fork.status().code() == Code::kOutOfRange);
      return;
    }
    if (!fork.ok()) {
      EXPECT_EQ(fork.status().code(), Code::kResourceExhausted);
      ++exhausted;
      return;
    }
    for (Tokens& tokens : copy.layers) tokens.resize(static_cast<size_t>(length));
    model_[fork->id] = copy;
  }

  void Truncate() {
    if (model_.empty()) return;
    const std::string id = Any()->first;
    Sync(id);
    if (!model_.contains(id)) return;
    ModelSession& session = model_.at(id);
    size_t longest = 0;
    for (const Tokens& tokens : session.layers) longest = std::max(longest, tokens.size());
    const int64_t length = Range(0, static_cast<int64_t>(longest));
    const Result<SessionInfo> cut =
        Try([&] { return table_->Truncate(session.tenant, id, length); });
    if (!cut.ok()) {
      EXPECT_EQ(cut.status().code(), Code::kResourceExhausted) << cut.status().ToString();
      ++exhausted;
      return;
    }
    if (cut->shared_bytes > 0) ++shared_cuts;
    for (Tokens& tokens : session.layers) {
      tokens.resize(std::min(tokens.size(), static_cast<size_t>(length)));
    }
  }

  void Free() {
    if (model_.empty()) return;
    const auto session = Any();
    const bool over = Over(session->first);
    const Status status = Try([&] { return table_->Free(session->second.tenant, session->first); });
    EXPECT_EQ(status.ok(), !over);
    model_.erase(session);
  }

  void EndRead() {
    if (reads_.empty()) return;
    const auto read = std::next(reads_.begin(), Range(0, std::ssize(reads_) - 1));
    if (const auto used = model_.find(read->id); used != model_.end()) {
      used->second.last_used = clock_.Now();
    }
    Must([&] { reads_.erase(read); });
  }

  // Ids that are nobody's, and those of the other tenant, get the same words.
  void Guess() {
    const Status unknown = table_->Get(0, "guessed").status();
    EXPECT_EQ(unknown.code(), Code::kNotFound);
    if (model_.empty()) return;
    const auto session = Any();
    const Status other = table_->Get(1 - session->second.tenant, session->first).status();
    EXPECT_EQ(other.ToString(), unknown.ToString());
  }

  // Looked at, and its pages taken. What a hold shows before says nothing of pages.
  Result<Held> Hold(int tenant, const CacheUse& use, int64_t rows) {
    Result<std::unique_ptr<CacheHold>> hold = Try([&] {
      return table_->Hold(tenant, {&use, 1}, rows);
    });
    if (!hold.ok()) return hold.status();
    const int64_t pages = ((*hold)->length_max() + kRows - 1) / kRows;
    Held held{std::vector<PageNumber>(static_cast<size_t>(pages) + 1, -1), std::move(*hold)};
    ATTEND_RETURN_IF_ERROR(
        Try([&] { return held.hold->Reserve(held.table.data(), std::ssize(held.table)); }));
    EXPECT_EQ(held.table.back(), 0);
    return held;
  }

  void Use() {
    if (model_.empty()) return;
    const std::string id = Any()->first;
    Sync(id);
    if (!model_.contains(id)) return;
    ModelSession& session = model_.at(id);
    const int64_t layer = Range(0, std::ssize(session.layers) - 1);
    Tokens& tokens = session.layers[layer];
    const int64_t rows = Range(0, 2) == 0 ? 0 : Range(1, 70);
    const auto length = static_cast<int64_t>(tokens.size());
    CacheUse use{id, layer, length, rows > 0 ? "append" + std::to_string(++appends_) : ""};
    if (Range(0, 9) == 0) {
      use.length += Range(1, 3);
      const Status wrong = Hold(session.tenant, use, rows).status();
      EXPECT_TRUE(wrong.code() == Code::kFailedPrecondition || wrong.code() == Code::kOutOfRange ||
                  (failing_ > 0 && wrong.code() == Code::kResourceExhausted));
      ++refused;
      return;
    }
    Result<Held> held = Hold(session.tenant, use, rows);
    if (!held.ok()) {
      ASSERT_EQ(held.status().code(), Code::kResourceExhausted) << held.status().ToString();
      ++exhausted;
      return;
    }
    CacheHold& hold = *held->hold;
    ASSERT_EQ(hold.append_rows(), rows);
    ExpectTokens(hold, rows, tokens);
    Tokens longer = tokens;
    for (int64_t n = 0; n < rows; ++n) longer.push_back(static_cast<uint16_t>(++token_ & 0x7bff));
    Write(hold, longer);
    if (rows > 0 && Range(0, 4) == 0) return;  // given up: nothing was appended
    if (rows > 0) Must([&] { hold.Commit(); });
    tokens = longer;
    if (rows > 0 && failing_ == 0 && Range(0, 3) == 0) AskAgain(session.tenant, use, rows, tokens);
    // What was appended may still be read: by the answer's check.
    if (Range(0, 1) == 0 && reads_.size() < 6) reads_.push_back({id, *std::move(held), tokens});
  }

  void AskAgain(int tenant, const CacheUse& use, int64_t rows, const Tokens& tokens) {
    const Result<Held> again = Hold(tenant, use, rows);
    ASSERT_TRUE(again.ok()) << again.status().ToString();
    EXPECT_EQ(again->hold->append_rows(), 0);
    ExpectTokens(*again->hold, 0, tokens);
    CacheUse other = use;
    other.append_id = "other";
    EXPECT_EQ(Hold(tenant, other, rows).status().code(), Code::kFailedPrecondition);
    ++repeated;
  }

  template <class Visit>
  static void ForEachElement(const CacheHold& hold, int64_t token, Visit visit) {
    const LayerShape& shape = hold.shape();
    const PageNumber number = hold.sequences()[0].pages[token / kRows];
    char* const page = hold.base() + int64_t{number} * kPageUnitBytes;
    for (const auto& [at, dim] :
         {std::pair{int64_t{0}, shape.dim}, std::pair{hold.layout().k_bytes, shape.dim_v}}) {
      for (int64_t h = 0; h < shape.heads_kv; ++h) {
        auto* const row =
            reinterpret_cast<uint16_t*>(page + at) + (h * kRows + token % kRows) * dim;
        for (int64_t d = 0; d < dim; ++d) visit(row[d]);
      }
    }
  }
  static void Write(const CacheHold& hold, const Tokens& tokens) {
    const auto before = std::ssize(tokens) - hold.append_rows();
    for (int64_t n = before; n < std::ssize(tokens); ++n) {
      ForEachElement(hold, n, [&](uint16_t& element) { element = tokens[n]; });
    }
  }
  static void ExpectTokens(const CacheHold& hold, int64_t new_rows, const Tokens& tokens) {
    ASSERT_EQ(hold.sequences()[0].length, std::ssize(tokens) + new_rows);
    int64_t wrong = 0;
    for (int64_t n = 0; n < std::ssize(tokens); ++n) {
      ForEachElement(hold, n, [&](uint16_t& element) { wrong += element != tokens[n]; });
    }
    EXPECT_EQ(wrong, 0);
  }

  std::mt19937_64 random_;
  ManualClock clock_;
  const int64_t failing_;
  ShortArena arena_{kBytes};
  std::unique_ptr<SessionTable> table_;
  std::map<std::string, ModelSession> model_;
  std::list<Read> reads_;
  int64_t ids_ = 0, appends_ = 0;
  uint32_t token_ = 0;
};

}  // namespace attend::test
