// SPDX-License-Identifier: Apache-2.0
//
// The steps. What is expected after each is in interleaved_history_checks.cc.

#include "tests/server/support/interleaved_history.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace attend::test {
namespace {

constexpr size_t kOpenMax = 6;
constexpr size_t kRequestsKept = 4;
// A device's memory has fewer.
constexpr int64_t kTooManyRows = 1000;

void Poison(char* data, int64_t bytes) { std::memset(data, 0xff, static_cast<size_t>(bytes)); }

}  // namespace

int64_t InterleavedHistory::ModelSession::length() const {
  int64_t length = INT64_MAX;
  for (const ModelLayer& layer : layers) length = std::min(length, layer.length());
  return length;
}

int64_t InterleavedHistory::ModelSession::longest() const {
  int64_t length = 0;
  for (const ModelLayer& layer : layers) length = std::max(length, layer.length());
  return length;
}

InterleavedHistory::InterleavedHistory(Choose choose) : choose_(std::move(choose)) {
  std::vector<SessionDevice> devices;
  for (auto& arena : arenas_) {
    // Where pages are not the host's, a cut copies whole ones.
    arena = std::make_unique<test::TestArena>(kBytes, devices.empty());
    arena->on_copy = [this] { Meanwhile(); };
    Poison(static_cast<char*>(arena->memory().data), kBytes);
    devices.push_back({arena.get(), Poison});
  }
  SessionOptions options;
  options.page_rows = kRows;
  options.slab_bytes = kSlabBytes;
  options.sessions_max = 16;
  options.tenant_weights = {3, 1};
  table_ = std::make_unique<SessionTable>(
      options, clock_, [this]() -> Result<std::string> { return std::to_string(++ids_); }, devices);
}

void InterleavedHistory::Step() {
  switch (Range(0, 15)) {
    case 0:
    case 1:
      Create();
      break;
    case 2:
      Fork();
      break;
    case 3:
      Truncate();
      break;
    case 4:
      Free();
      break;
    case 5:
      Advance();
      break;
    case 6:
      KeepAlive();
      break;
    case 7:
      Guess();
      break;
    case 8:
      if (Range(0, 63) == 63) LoseDevice();
      break;
    case 9:
    case 10:
    case 11:
      if (!open_.empty()) GoOn(std::next(open_.begin(), Range(0, std::ssize(open_) - 1)));
      break;
    default:
      Begin();
  }
  Settle();
}

void InterleavedHistory::End() {
  while (!open_.empty()) Close(open_.begin());
  ReadAll();
  for (const auto& [id, session] : sessions_) {
    EXPECT_TRUE(table_->Free(session.tenant, id).ok());
  }
  sessions_.clear();
  Settle();
  for (int device = 0; device < kDevices; ++device) {
    EXPECT_EQ(table_->memory(device).used_bytes, 0);
    EXPECT_EQ(table_->memory(device).free_bytes, table_->memory(device).total_bytes);
  }
}

InterleavedHistory::Counts InterleavedHistory::counts() const {
  Counts counts = counts_;
  const SessionTable::Stats stats = table_->stats();
  counts["expired"] = stats.expired;
  counts["displaced"] = stats.displaced;
  counts["evictions"] = stats.evictions_own;
  counts["evictions of others"] = stats.evictions_others;
  return counts;
}

InterleavedHistory::Sessions::iterator InterleavedHistory::Any() {
  return std::next(sessions_.begin(), Range(0, std::ssize(sessions_) - 1));
}

void InterleavedHistory::Touch(const std::string& id) {
  const auto session = sessions_.find(id);
  if (session != sessions_.end()) session->second.last_used = clock_.Now();
}

void InterleavedHistory::Meanwhile() {
  if (copying_) return;
  copying_ = true;
  Settle();  // others may have given way for the copies
  for (int64_t steps = Range(0, 3); steps > 0; --steps) Step();
  copying_ = false;
}

void InterleavedHistory::Create() {
  ModelSession session;
  session.tenant = static_cast<int>(Range(0, kTenants - 1));
  session.device = static_cast<int>(Range(0, 3) == 3);
  session.lease = std::chrono::seconds(Range(1, 60));
  session.pinned = Range(0, 9) == 9;
  SessionSpec spec{session.device, {}, session.lease, session.pinned};
  for (int64_t layers = Range(1, 3); layers > 0; --layers) {
    spec.layers.push_back({DType::kFloat16, Range(1, 3), 8 * Range(1, 4), 8 * Range(1, 2)});
    session.layers.push_back({spec.layers.back()});
  }
  const Result<SessionInfo> made = table_->Create(session.tenant, spec);
  if (lost_ && session.device == 1) {
    EXPECT_EQ(made.status().code(), Code::kUnavailable) << made.status().ToString();
    return;
  }
  if (!made.ok()) {
    EXPECT_EQ(made.status().code(), Code::kResourceExhausted) << made.status().ToString();
    return;
  }
  session.last_used = clock_.Now();
  ++created_;
  sessions_[made->id] = std::move(session);
}

void InterleavedHistory::Fork() {
  if (sessions_.empty()) return;
  const auto [id, origin] = *Any();
  const int64_t whole = origin.length();
  const int64_t length = Range(0, whole + 1);
  const bool lost = lost_ && origin.device == 1;
  if (!lost) Touch(id);
  const Result<SessionInfo> fork = table_->Fork(origin.tenant, id, length);
  if (lost) {
    EXPECT_EQ(fork.status().code(), Code::kUnavailable) << fork.status().ToString();
    return;
  }
  if (length > whole) {
    EXPECT_EQ(fork.status().code(), Code::kOutOfRange) << fork.status().ToString();
    return;
  }
  if (!fork.ok()) {
    EXPECT_EQ(fork.status().code(), Code::kResourceExhausted) << fork.status().ToString();
    ++counts_["exhausted"];
    return;
  }
  ModelSession copy = origin;
  copy.last_used = clock_.Now();
  for (ModelLayer& layer : copy.layers) {
    layer.tokens.resize(static_cast<size_t>(length));
    layer.append_id.clear();
  }
  ++created_;
  sessions_[fork->id] = std::move(copy);
}

void InterleavedHistory::Truncate() {
  if (sessions_.empty()) return;
  const auto [id, before] = *Any();
  const int64_t longest = before.longest();
  const int64_t length = Range(0, longest + 1);
  bool changing = false;
  for (int64_t n = 0; n < std::ssize(before.layers); ++n) changing |= Changing(id, n);
  const bool lost = lost_ && before.device == 1;
  if (!lost) Touch(id);
  std::string outer = std::exchange(truncating_, changing || lost ? truncating_ : id);
  const Result<SessionInfo> cut = table_->Truncate(before.tenant, id, length);
  truncating_ = std::move(outer);
  const auto now = sessions_.find(id);
  if (!cut.ok()) {
    const Code code = lost                     ? Code::kUnavailable
                      : length > longest       ? Code::kOutOfRange
                      : changing               ? Code::kUnavailable
                      : now == sessions_.end() ? Code::kNotFound
                                               : Code::kResourceExhausted;
    EXPECT_EQ(cut.status().code(), code) << cut.status().ToString();
    if (code == Code::kResourceExhausted) ++counts_["exhausted"];
    return;
  }
  ASSERT_TRUE(!lost && length <= longest && !changing && now != sessions_.end());
  if (cut->shared_bytes > 0) ++counts_["shared cuts"];
  Touch(id);
  for (ModelLayer& layer : now->second.layers) {
    if (length >= layer.length()) continue;
    layer.tokens.resize(static_cast<size_t>(length));
    layer.append_id.clear();
  }
}

void InterleavedHistory::Free() {
  if (sessions_.empty()) return;
  const auto session = Any();
  if (InUse(session->first)) ++counts_["freed in use"];
  EXPECT_TRUE(table_->Free(session->second.tenant, session->first).ok());
  sessions_.erase(session);
}

void InterleavedHistory::Advance() {
  clock_.Advance(std::chrono::seconds(Range(0, 8)));
  KeepAlive();  // the first to see what is over
}

void InterleavedHistory::KeepAlive() {
  if (sessions_.empty()) return;
  const auto& [id, session] = *Any();
  const Status status = table_->KeepAlive(session.tenant, id).status();
  const Code code = Over(id)                       ? Code::kNotFound
                    : lost_ && session.device == 1 ? Code::kUnavailable
                                                   : Code::kOk;
  EXPECT_EQ(status.code(), code) << status.ToString();
  if (code == Code::kOk) Touch(id);
}

// Ids that are nobody's, and those of the other tenant, get the same words.
void InterleavedHistory::Guess() {
  const Status unknown = table_->Get(0, "guessed").status();
  EXPECT_EQ(unknown.code(), Code::kNotFound);
  if (sessions_.empty()) return;
  const auto session = Any();
  const Status other = table_->Get(1 - session->second.tenant, session->first).status();
  EXPECT_EQ(other.ToString(), unknown.ToString());
}

void InterleavedHistory::LoseDevice() {
  lost_ = true;
  table_->LoseDevice(1);
}

// New, of sessions that are alike, or an old one.
InterleavedHistory::Request InterleavedHistory::MakeRequest() {
  if (!requests_.empty() && Range(0, 3) == 3) {
    return requests_[Range(0, std::ssize(requests_) - 1)];
  }
  const auto first = Any();
  const ModelSession& session = first->second;
  const int64_t layer = Range(0, std::ssize(session.layers) - 1);
  std::vector<CacheUse> uses;
  const auto add = [&](const std::string& id, int64_t n) {
    uses.push_back({id, n, sessions_.at(id).layers[n].length(), ""});
  };
  add(first->first, layer);
  for (const auto& [id, other] : sessions_) {
    if (id == first->first || other.tenant != session.tenant || other.device != session.device) {
      continue;
    }
    for (int64_t n = 0; n < std::ssize(other.layers); ++n) {
      if (other.layers[n].shape != session.layers[layer].shape || Range(0, 3) == 3) continue;
      add(id, n);
      break;
    }
  }
  const int64_t kind = Range(0, 15);
  const int64_t rows = kind < 5 ? 0 : kind == 15 ? kTooManyRows : Range(1, 70);
  if (kind == 4) uses.back().length += Range(1, 3);
  for (CacheUse& use : uses) {
    if (rows > 0 && kind != 5) use.append_id = "append " + std::to_string(token_);
  }
  return {session.tenant, std::move(uses), rows};
}

void InterleavedHistory::Begin() {
  if (sessions_.empty() || open_.size() == kOpenMax) return;
  Request request = MakeRequest();
  if (requests_.size() == kRequestsKept) requests_.erase(requests_.begin());
  requests_.push_back(request);
  int64_t there = 0;
  Code code = Judge(request, nullptr, there);
  const int64_t rows = there > 0 ? 0 : request.rows;
  if (code == Code::kOk && !Fits(request, rows)) code = Code::kInvalidArgument;
  Result<std::unique_ptr<CacheHold>> hold =
      table_->Hold(request.tenant, request.uses, request.rows);
  // Which leases a refused request has renewed nobody says, so all of them are.
  for (const CacheUse& use : request.uses) {
    if (table_->Get(request.tenant, use.session).ok()) Touch(use.session);
  }
  if (!hold.ok()) {
    const bool evicted = hold.status().code() == Code::kOutOfRange;
    EXPECT_EQ(evicted ? Code::kFailedPrecondition : hold.status().code(), code)
        << hold.status().ToString();
    ++counts_["refused"];
    return;
  }
  ASSERT_EQ(code, Code::kOk);
  ASSERT_EQ((*hold)->append_rows(), rows);
  if (rows < request.rows) ++counts_["repeated"];
  Open open{std::move(request), {}};
  for (const CacheUse& use : open.request.uses) {
    Tokens& tokens = open.tokens.emplace_back(sessions_.at(use.session).layers[use.layer].tokens);
    for (int64_t n = 0; n < rows; ++n) tokens.push_back(static_cast<uint16_t>(++token_ & 0x7bff));
  }
  open.hold = *std::move(hold);
  open_.push_back(std::move(open));
  for (int64_t steps = Range(0, 3); steps > 0; --steps) {
    if (!open_.empty()) GoOn(std::prev(open_.end()));
  }
}

void InterleavedHistory::GoOn(OpenRef open) {
  switch (open->state) {
    case Open::State::kLooked:
      return Reserve(open);
    case Open::State::kReserved:
      if (open->hold->append_rows() == 0) return Close(open);
      if (Range(0, 4) == 4) {
        ++counts_["given up"];
        return Close(open);
      }
      return Commit(*open);
    case Open::State::kCommitted:  // what was appended may still be read: by the answer's check
      return Close(open);
  }
}

void InterleavedHistory::Reserve(OpenRef open) {
  CacheHold& hold = *open->hold;
  const int64_t stride = (hold.length_max() + kRows - 1) / kRows + 1;
  open->table.assign(static_cast<size_t>(stride * std::ssize(open->tokens)), -1);
  int64_t there = 0;
  const Code code = Judge(open->request, &hold, there);
  const Status status = hold.Reserve(open->table.data(), stride);
  if (code == Code::kOk && status.code() == Code::kResourceExhausted) {
    EXPECT_GT(hold.append_rows(), 0) << status.ToString();
    ++counts_["exhausted"];
    return Close(open);
  }
  const bool evicted = status.code() == Code::kOutOfRange;
  EXPECT_EQ(evicted ? Code::kFailedPrecondition : status.code(), code) << status.ToString();
  if (!status.ok()) {
    ++counts_["refused late"];
    return Close(open);
  }
  open->state = Open::State::kReserved;
  // Its tokens may be others than when it was looked at: lengths are all that was compared.
  for (size_t n = 0; n < open->tokens.size(); ++n) {
    const CacheUse& use = open->request.uses[n];
    const Tokens& now = sessions_.at(use.session).layers[use.layer].tokens;
    std::copy(now.begin(), now.end(), open->tokens[n].begin());
  }
  for (size_t n = 1; n <= open->tokens.size(); ++n) {
    EXPECT_EQ(open->table[n * static_cast<size_t>(stride) - 1], 0);
  }
  Write(*open);
}

void InterleavedHistory::Commit(Open& open) {
  open.hold->Commit();
  open.state = Open::State::kCommitted;
  for (size_t n = 0; n < open.tokens.size(); ++n) {
    const CacheUse& use = open.request.uses[n];
    const auto session = sessions_.find(use.session);
    if (session == sessions_.end()) continue;
    ModelLayer& layer = session->second.layers[use.layer];
    layer.append_begin = layer.length();
    layer.append_id = use.append_id;
    layer.tokens = open.tokens[n];
    appended_[open.request.tenant] += open.request.rows;
  }
}

void InterleavedHistory::Close(OpenRef open) {
  ExpectTokens(*open, 0, 1);
  for (const CacheUse& use : open->request.uses) Touch(use.session);
  open_.erase(open);
}

}  // namespace attend::test
