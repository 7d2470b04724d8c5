// SPDX-License-Identifier: Apache-2.0
//
// The steps of sessions. For those of requests see table_history_requests.cc, for the expectations
// after each step table_history_checks.cc.

#include "tests/server/support/table_history.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

namespace attend::test {
namespace {

void Poison(char* data, int64_t bytes) { std::memset(data, 0xff, static_cast<size_t>(bytes)); }

}  // namespace

int64_t TableHistory::ModelSession::length() const {
  int64_t length = INT64_MAX;
  for (const ModelLayer& layer : layers) length = std::min(length, layer.length());
  return length;
}

int64_t TableHistory::ModelSession::longest() const {
  int64_t length = 0;
  for (const ModelLayer& layer : layers) length = std::max(length, layer.length());
  return length;
}

TableHistory::TableHistory(Choose choose, Shortage shortage)
    : choose_(std::move(choose)), shortage_(std::move(shortage)), crowded_(Range(0, 1) == 1) {
  std::vector<SessionDevice> devices;
  for (auto& arena : arenas_) {
    // On devices whose pages are not the host's, a cut copies whole pages.
    arena = std::make_unique<TestArena>(kBytes, devices.empty());
    arena->on_copy = [this] { Meanwhile(); };
    Poison(static_cast<char*>(arena->memory().data), kBytes);
    devices.push_back({arena.get(), Poison});
  }
  SessionOptions options{.tenant_weights = {3, 1}};
  options.page_rows = kRows;
  options.slab_bytes = kSlabBytes;
  options.sessions_max = 16;
  table_ = std::make_unique<SessionTable>(
      options, clock_, [this]() -> Result<std::string> { return std::to_string(++ids_); }, devices);
}

void TableHistory::Step() {
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
      crowded_ ? Begin() : Free();
      break;
    case 5:
      crowded_ ? Begin() : Advance();
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

void TableHistory::End() {
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

TableHistory::Counts TableHistory::counts() const {
  Counts counts = counts_;
  const SessionTable::Stats stats = table_->stats();
  counts["expired"] = stats.expired;
  counts["evictions"] = stats.evictions_own;
  counts["evictions of others"] = stats.evictions_others;
  return counts;
}

TableHistory::Sessions::iterator TableHistory::Any() {
  return std::next(sessions_.begin(), Range(0, std::ssize(sessions_) - 1));
}

void TableHistory::Touch(const std::string& id) {
  const auto session = sessions_.find(id);
  if (session != sessions_.end()) session->second.last_used = clock_.Now();
}

void TableHistory::Renew(int tenant, const std::string& id) {
  if (table_->Get(tenant, id).ok()) Touch(id);
}

void TableHistory::Meanwhile() {
  short_ = nullptr;
  if (!copying_) {
    copying_ = true;
    NoteEvicted(tenant_, device_);
    Settle();
    for (int64_t steps = Range(0, 3); steps > 0; --steps) Step();
    copying_ = false;
  }
  if (BeginShortage() != nullptr) throw std::bad_alloc();
}

void TableHistory::Create() {
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
  const Result<SessionInfo> made = Try([&] { return table_->Create(session.tenant, spec); });
  if (lost_ && session.device == 1) return ExpectCode(made.status(), Code::kUnavailable);
  if (!made.ok()) {
    const TenantParts parts =
        DivideByWeight(table_->options().sessions_max, table_->options().tenant_weights);
    const int64_t count = table_->tenant_sessions()[session.tenant];
    EXPECT_TRUE(shortage_ || count >= parts.own[session.tenant]) << "its own part is free for it";
    ++counts_["sessions refused"];
    return ExpectCode(made.status(), Code::kResourceExhausted);
  }
  session.last_used = clock_.Now();
  ++created_;
  sessions_[made->id] = std::move(session);
}

void TableHistory::Fork() {
  if (sessions_.empty()) return;
  const auto found = Any();
  const std::string id = found->first;
  const ModelSession origin = found->second;
  const int64_t whole = origin.length();
  const int64_t length = Range(0, whole + 1);
  const bool lost = lost_ && origin.device == 1;
  if (!lost) Touch(id);
  const auto outer =
      std::pair(std::exchange(tenant_, origin.tenant), std::exchange(device_, origin.device));
  const Result<SessionInfo> fork = Try([&] { return table_->Fork(origin.tenant, id, length); });
  std::tie(tenant_, device_) = outer;
  NoteEvicted(origin.tenant, origin.device);
  if (shortage_ && !fork.ok()) Renew(origin.tenant, id);
  if (lost) return ExpectCode(fork.status(), Code::kUnavailable);
  if (length > whole) return ExpectCode(fork.status(), Code::kOutOfRange);
  if (!fork.ok()) {
    ++counts_["exhausted"];
    return ExpectCode(fork.status(), Code::kResourceExhausted);
  }
  ModelSession copy = origin;
  copy.last_used = clock_.Now();
  for (ModelLayer& layer : copy.layers) {
    layer.tokens.resize(static_cast<size_t>(length));
    layer.append_id.clear();
    layer.evicted = false;
  }
  ++created_;
  sessions_[fork->id] = std::move(copy);
}

TableHistory::Draft TableHistory::DrawDraft(const ModelSession& session) {
  if (!session.draft.kept.empty() && Range(0, 3) == 0) return session.draft;  // once more
  const int64_t longest = session.longest();
  Draft draft{Range(0, 3) == 0 ? Range(0, longest + 1)
                               : longest - Range(0, std::min(longest, 2 * kRows))};
  int64_t token = Range(0, 1);
  for (int64_t most = Range(0, 2 * kRows); most > 0; --most) {
    if (draft.length + token >= longest && Range(0, 7) > 0) break;
    draft.kept.push_back(token);
    token += Range(0, 3) == 0 ? Range(1, 9) : 1;
  }
  return draft;
}

Code TableHistory::JudgeDraft(const ModelSession& session, const Draft& draft) {
  const int64_t whole = session.length();
  if (session.longest() > whole) return Code::kFailedPrecondition;
  if (draft == session.draft && whole == draft.length + std::ssize(draft.kept)) return Code::kOk;
  const bool beyond = !draft.kept.empty() && draft.length + draft.kept.back() >= whole;
  return draft.length > whole || beyond ? Code::kOutOfRange : Code::kOk;
}

void TableHistory::Keep(const Draft& draft, ModelSession& session) {
  int64_t in_place = 0;
  while (in_place < std::ssize(draft.kept) && draft.kept[static_cast<size_t>(in_place)] == in_place)
    ++in_place;
  const bool moves = in_place < std::ssize(draft.kept);
  if (moves && draft == session.draft &&
      session.length() == draft.length + std::ssize(draft.kept)) {
    return;
  }
  for (ModelLayer& layer : session.layers) {
    if (draft.length + in_place >= layer.length()) continue;
    Tokens tokens(layer.tokens.begin(), layer.tokens.begin() + draft.length);
    for (const int64_t token : draft.kept) {
      tokens.push_back(layer.tokens[static_cast<size_t>(draft.length + token)]);
    }
    layer.tokens = std::move(tokens);
    layer.append_id.clear();
    layer.evicted = false;
    session.draft = moves ? draft : Draft{};
  }
}

void TableHistory::Truncate() {
  if (sessions_.empty()) return;
  const auto found = Any();
  const std::string id = found->first;
  const ModelSession before = found->second;
  const bool drafts = Range(0, 1) == 1;
  const Draft draft = drafts ? DrawDraft(before) : Draft{Range(0, before.longest() + 1)};
  const Code judged = drafts                            ? JudgeDraft(before, draft)
                      : draft.length > before.longest() ? Code::kOutOfRange
                                                        : Code::kOk;
  bool changing = false;
  for (int64_t n = 0; n < std::ssize(before.layers); ++n) changing |= Changing(id, n);
  const bool lost = lost_ && before.device == 1;
  if (!lost) Touch(id);
  const bool begins = judged == Code::kOk && !changing && !lost;
  std::string outer = std::exchange(truncating_, begins ? id : truncating_);
  const auto whose =
      std::pair(std::exchange(tenant_, before.tenant), std::exchange(device_, before.device));
  const Result<SessionInfo> cut = Try([&] {
    return drafts ? table_->KeepDraft(before.tenant, id, draft.length, draft.kept)
                  : table_->Truncate(before.tenant, id, draft.length);
  });
  truncating_ = std::move(outer);
  std::tie(tenant_, device_) = whose;
  NoteEvicted(before.tenant, before.device);
  if (shortage_ && !cut.ok()) Renew(before.tenant, id);
  const auto now = sessions_.find(id);
  if (!cut.ok()) {
    const Code code = lost                     ? Code::kUnavailable
                      : drafts && changing     ? Code::kUnavailable
                      : judged != Code::kOk    ? judged
                      : changing               ? Code::kUnavailable
                      : now == sessions_.end() ? Code::kNotFound
                                               : Code::kResourceExhausted;
    if (code == Code::kResourceExhausted) ++counts_["exhausted"];
    return ExpectCode(cut.status(), code);
  }
  ASSERT_TRUE(begins && now != sessions_.end());
  if (cut->shared_bytes > 0) ++counts_["shared cuts"];
  Touch(id);
  if (drafts && !draft.kept.empty()) {
    ++counts_[draft == now->second.draft ? "drafts kept again" : "drafts kept"];
  }
  Keep(draft, now->second);
}

void TableHistory::Free() {
  if (sessions_.empty()) return;
  const auto session = Any();
  if (InUse(session->first)) ++counts_["freed in use"];
  Must([&] { EXPECT_TRUE(table_->Free(session->second.tenant, session->first).ok()); });
  sessions_.erase(session);
}

void TableHistory::Advance() {
  clock_.Advance(std::chrono::seconds(Range(0, 8)));
  KeepAlive();  // the first call to notice expiry
}

void TableHistory::KeepAlive() {
  if (sessions_.empty()) return;
  const auto found = Any();
  const std::string& id = found->first;
  const ModelSession& session = found->second;
  const Status status = Try([&] { return table_->KeepAlive(session.tenant, id); }).status();
  const Code code = Over(id)                       ? Code::kNotFound
                    : lost_ && session.device == 1 ? Code::kUnavailable
                                                   : Code::kOk;
  ExpectCode(status, code);
  if (status.ok()) Touch(id);
  if (shortage_ && !status.ok()) Renew(session.tenant, id);
}

// Unknown ids and the other tenant's ids get the same message.
void TableHistory::Guess() {
  const Status unknown = table_->Get(0, "guessed").status();
  EXPECT_EQ(unknown.code(), Code::kNotFound);
  if (sessions_.empty()) return;
  const auto session = Any();
  const Status other = table_->Get(1 - session->second.tenant, session->first).status();
  EXPECT_EQ(other.ToString(), unknown.ToString());
}

void TableHistory::LoseDevice() {
  lost_ = true;
  table_->LoseDevice(1);
}

}  // namespace attend::test
