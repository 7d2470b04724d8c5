// SPDX-License-Identifier: Apache-2.0
//
// The table's expected answers and state.

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <span>
#include <utility>

#include "tests/server/support/table_history.h"

namespace attend::test {
namespace {

// Visits the token's rows of K and V in the n-th sequence, head by head.
template <class Visit>
void ForEachRow(const CacheHold& hold, size_t n, int64_t token, Visit visit) {
  const LayerShape& shape = hold.shape();
  const int64_t rows = hold.layout().page_rows;
  const PageNumber number = hold.sequences()[n].pages[token / rows];
  char* const page = hold.base() + int64_t{number} * kPageUnitBytes;
  for (const auto& [at, dim] :
       {std::pair{int64_t{0}, shape.dim}, std::pair{hold.layout().k_bytes, shape.dim_v}}) {
    for (int64_t h = 0; h < shape.heads_kv; ++h) {
      auto* const row = reinterpret_cast<uint16_t*>(page + at) + (h * rows + token % rows) * dim;
      visit(std::span(row, static_cast<size_t>(dim)));
    }
  }
}

int64_t PagesOf(int64_t tokens, int64_t rows) { return (tokens + rows - 1) / rows; }

}  // namespace

bool TableHistory::InUse(const std::string& id) const {
  const auto uses = [&](const Open& open) {
    return std::any_of(open.request.uses.begin(), open.request.uses.end(),
                       [&](const CacheUse& use) { return use.session == id; });
  };
  return id == truncating_ || std::any_of(open_.begin(), open_.end(), uses);
}

bool TableHistory::Over(const std::string& id) const {
  const ModelSession& session = sessions_.at(id);
  return clock_.Now() - session.last_used >= session.lease && !InUse(id);
}

bool TableHistory::Changing(const std::string& id, int64_t layer) const {
  const auto appends = [&](const Open& open) {
    return open.state == Open::State::kReserved && open.hold->append_rows() > 0 &&
           std::any_of(open.request.uses.begin(), open.request.uses.end(),
                       [&](const CacheUse& u) { return u.session == id && u.layer == layer; });
  };
  return id == truncating_ || std::any_of(open_.begin(), open_.end(), appends);
}

void TableHistory::ExpectCode(const Status& status, Code code) const {
  if (shortage_ && status.code() == Code::kResourceExhausted) return;
  EXPECT_EQ(status.code(), code) << status.ToString();
}

Code TableHistory::Judge(const Request& request, const CacheHold* hold, int64_t& there) const {
  for (const CacheUse& use : request.uses) {
    const auto session = sessions_.find(use.session);
    if (session == sessions_.end()) return Code::kNotFound;
    if (hold == nullptr && lost_ && session->second.device == 1) return Code::kUnavailable;
    const ModelLayer& layer = session->second.layers[use.layer];
    const bool made = request.rows > 0 && !use.append_id.empty() &&
                      use.append_id == layer.append_id && use.length == layer.append_begin &&
                      layer.length() - layer.append_begin == request.rows;
    there += made ? 1 : 0;
    if (!made && use.length != layer.length()) {
      // The part that it relies on, or appends again, ends after the last remaining token.
      const bool evicted = layer.evicted && use.length + request.rows > layer.length();
      return evicted ? Code::kOutOfRange : Code::kFailedPrecondition;
    }
    if (!made && request.rows > 0 && Changing(use.session, use.layer)) return Code::kUnavailable;
    if (hold != nullptr && made != (hold->append_rows() < request.rows)) return Code::kUnavailable;
  }
  const bool some = there > 0 && there < std::ssize(request.uses);
  return some ? Code::kFailedPrecondition : Code::kOk;
}

bool TableHistory::Fits(const Request& request, int64_t rows) const {
  int64_t fresh = 0, longest = 0, page_bytes = 0;
  for (const CacheUse& use : request.uses) {
    const ModelLayer& layer = sessions_.at(use.session).layers[use.layer];
    const int64_t pages = PagesOf(layer.length() + rows, kRows);
    fresh += pages - PagesOf(layer.length(), kRows);
    longest = std::max(longest, pages);
    page_bytes = ChargeOf(LayoutOf(layer.shape, kRows).page_bytes);
  }
  const int device = sessions_.at(request.uses[0].session).device;
  return rows == 0 || std::max(fresh, longest) <= MostBytes(device, request.tenant) / page_bytes;
}

int64_t TableHistory::FreshBytes(const Open& open, size_t n) {
  const int64_t length = std::ssize(open.tokens[n]);
  const int64_t before = length - open.hold->append_rows();
  return (PagesOf(length, kRows) - PagesOf(before, kRows)) *
         ChargeOf(open.hold->layout().page_bytes);
}

int64_t TableHistory::OwnBytes(int device, int tenant) const {
  const int64_t bytes = table_->memory(device).total_bytes;
  return DivideByWeight(bytes, table_->options().tenant_weights).own[tenant];
}

int64_t TableHistory::MostBytes(int device, int tenant) const {
  const int64_t bytes = table_->memory(device).total_bytes;
  return OwnBytes(device, tenant) + DivideByWeight(bytes, table_->options().tenant_weights).common;
}

bool TableHistory::Alike(int device, int64_t page_bytes) const {
  bool alike = !copying_;
  for (const auto& [id, session] : sessions_) {
    for (const ModelLayer& layer : session.layers) {
      alike &= session.device != device || layer.length() == 0 ||
               LayoutOf(layer.shape, kRows).page_bytes == page_bytes;
    }
  }
  for (const Open& open : open_) {
    alike &= open.hold->device() != device ||
             (open.alike && open.hold->layout().page_bytes == page_bytes);
  }
  return alike;
}

// Pages of another size may occupy slabs.
void TableHistory::ExpectShort(const Open& open, const CacheRefusal& refusal) {
  const int device = open.hold->device(), tenant = open.request.tenant;
  const int64_t page_bytes = open.hold->layout().page_bytes;
  const PageTree::Stats memory = table_->memory(device);
  int64_t needed = 0;
  for (size_t n = 0; n < open.tokens.size(); ++n) needed += FreshBytes(open, n);
  EXPECT_GT(refusal.missing_bytes, 0);
  EXPECT_LE(refusal.missing_bytes, needed);
  if (!Alike(device, page_bytes)) return;
  ++counts_["exhausted by pages alike"];
  Ledger ledger(memory.total_bytes, table_->options().tenant_weights);
  const std::vector<int64_t> held = table_->tenant_bytes(device);
  for (int n = 0; n < kTenants; ++n) ledger.Add(n, held[n]);
  const int64_t pages = memory.total_bytes / kSlabBytes * (kSlabBytes / page_bytes);
  int64_t least = std::min(ledger.Room(tenant), pages * ChargeOf(page_bytes) - memory.used_bytes);
  for (const SessionInfo& info : table_->List(tenant, "", INT64_MAX).sessions) {
    if (info.device != device || info.pinned || InUse(info.id)) continue;
    least += info.bytes - info.shared_bytes;
  }
  EXPECT_GT(needed, least) << "it could have had them";
}

void TableHistory::ReadAll() {
  for (auto& [id, session] : sessions_) {
    if (lost_ && session.device == 1) continue;
    for (int64_t n = 0; n < std::ssize(session.layers); ++n) {
      const Tokens& tokens = session.layers[n].tokens;
      Open open{{session.tenant, {{id, n, std::ssize(tokens), ""}}, 0}, {tokens}};
      Result<std::unique_ptr<CacheHold>> hold = table_->Hold(session.tenant, open.request.uses, 0);
      ASSERT_TRUE(hold.ok()) << hold.status().ToString();
      open.hold = *std::move(hold);
      open.table.resize(tokens.size() / kRows + 1);
      ASSERT_TRUE(open.hold->Reserve(open.table.data(), std::ssize(open.table)).ok());
      open.state = Open::State::kReserved;
      ExpectTokens(open, 0, 1);
      session.last_used = clock_.Now();
    }
  }
}

void TableHistory::Settle() {
  std::vector<SessionInfo> listed;
  std::set<std::string> seen;
  for (int tenant = 0; tenant < kTenants; ++tenant) {
    SessionTable::Listed list = table_->List(tenant, "", INT64_MAX);
    ASSERT_FALSE(list.more);
    for (SessionInfo& info : list.sessions) {
      ASSERT_TRUE(sessions_.contains(info.id)) << info.id;
      ASSERT_EQ(sessions_.at(info.id).tenant, tenant);
      EXPECT_FALSE(Over(info.id));
      TakeEvictions(info.id, info);
      seen.insert(info.id);
      listed.push_back(std::move(info));
    }
  }
  for (auto it = sessions_.begin(); it != sessions_.end();) {
    const auto session = it++;
    if (seen.contains(session->first)) continue;
    if (Over(session->first)) {
      EXPECT_FALSE(InUse(session->first)) << "what is in use does not expire";
      ++expired_;
    } else {
      ADD_FAILURE() << "it has ended before its lease";
    }
    sessions_.erase(session);
  }
  const SessionTable::Stats stats = table_->stats();
  EXPECT_EQ(stats.sessions, std::ssize(sessions_));
  EXPECT_EQ(stats.created, created_);
  EXPECT_EQ(stats.expired, expired_);
  EXPECT_EQ(stats.appended_tokens, appended_);
  EXPECT_TRUE(table_->Consistent());
  ExpectSums(listed);
  constexpr int64_t kSample = 7;
  ++settled_;
  for (const Open& open : open_) ExpectTokens(open, settled_ % kSample, kSample);
}

void TableHistory::TakeEvictions(const std::string& id, const SessionInfo& info) {
  ModelSession& session = sessions_.at(id);
  ASSERT_EQ(std::ssize(info.layer_lengths), std::ssize(session.layers));
  for (size_t n = 0; n < session.layers.size(); ++n) {
    ModelLayer& layer = session.layers[n];
    const int64_t length = info.layer_lengths[n];
    ASSERT_LE(length, layer.length());
    if (length == layer.length()) continue;
    EXPECT_FALSE(session.pinned) << "what is pinned is not evicted";
    EXPECT_FALSE(InUse(id)) << "what is in use is not evicted";
    EXPECT_EQ(length % kRows, 0) << "whole pages are evicted";
    layer.tokens.resize(static_cast<size_t>(length));
    layer.append_id.clear();
    layer.evicted = true;
  }
}

// If only sessions refer to pages, each page in use belongs to one session alone, or is shared by
// several.
void TableHistory::ExpectSums(const std::vector<SessionInfo>& listed) const {
  for (int device = 0; device < kDevices; ++device) {
    const PageTree::Stats memory = table_->memory(device);
    int64_t alone = 0, shared = 0;
    for (const SessionInfo& info : listed) {
      if (info.device != device) continue;
      alone += info.bytes - info.shared_bytes;
      shared += info.shared_bytes;
    }
    const int64_t used_alone = memory.used_bytes - memory.shared_bytes;
    EXPECT_LE(alone, used_alone);
    if (copying_ || !open_.empty() || shortage_) continue;
    EXPECT_EQ(alone, used_alone);
    EXPECT_GE(shared, 2 * memory.shared_bytes);
  }
}

void TableHistory::Write(const Open& open) {
  for (size_t s = 0; s < open.tokens.size(); ++s) {
    const Tokens& tokens = open.tokens[s];
    for (auto n = std::ssize(tokens) - open.hold->append_rows(); n < std::ssize(tokens); ++n) {
      ForEachRow(*open.hold, s, n,
                 [&](std::span<uint16_t> row) { std::fill(row.begin(), row.end(), tokens[n]); });
    }
  }
}

void TableHistory::ExpectTokens(const Open& open, int64_t first, int64_t step) {
  for (size_t s = 0; s < open.tokens.size(); ++s) {
    const Tokens& tokens = open.tokens[s];
    ASSERT_EQ(open.hold->sequences()[s].length, std::ssize(tokens));
    if (open.state == Open::State::kLooked) continue;  // it shows no pages yet
    int64_t wrong = 0;
    for (int64_t n = first; n < std::ssize(tokens); n += step) {
      ForEachRow(*open.hold, s, n, [&](std::span<const uint16_t> row) {
        wrong += std::ssize(row) - std::count(row.begin(), row.end(), tokens[n]);
      });
    }
    EXPECT_EQ(wrong, 0);
  }
}

}  // namespace attend::test
