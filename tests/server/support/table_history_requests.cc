// SPDX-License-Identifier: Apache-2.0
//
// The steps of requests.

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "tests/server/support/table_history.h"

namespace attend::test {
namespace {

constexpr size_t kOpenMax = 10;
constexpr size_t kRequestsKept = 4;
// A device's memory has fewer.
constexpr int64_t kTooManyRows = 1000;

}  // namespace

// A new id, of alike sessions, or an old one.
TableHistory::Request TableHistory::MakeRequest() {
  if (!requests_.empty() && Range(0, 3) == 3) {
    return requests_[Range(0, std::ssize(requests_) - 1)];
  }
  const auto first = Any();
  const ModelSession& session = first->second;
  const int64_t layer = Range(0, std::ssize(session.layers) - 1);
  std::vector<CacheUse> uses;
  const auto add = [&](const std::string& id, int64_t n) {
    const ModelLayer& layer = sessions_.at(id).layers[n];
    // Its client may not know about an eviction yet.
    const int64_t more = layer.evicted && Range(0, 1) == 1 ? 1 : 0;
    uses.push_back({id, n, layer.length() + more, ""});
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

void TableHistory::Begin() {
  if (sessions_.empty() || open_.size() == kOpenMax) return;
  Request request = MakeRequest();
  if (requests_.size() == kRequestsKept) requests_.erase(requests_.begin());
  requests_.push_back(request);
  int64_t there = 0;
  Code code = Judge(request, nullptr, there);
  const int64_t rows = there > 0 ? 0 : request.rows;
  if (code == Code::kOk && !Fits(request, rows)) code = Code::kInvalidArgument;
  Result<std::unique_ptr<CacheHold>> hold =
      Try([&] { return table_->Hold(request.tenant, request.uses, request.rows); });
  for (const CacheUse& use : request.uses) Renew(request.tenant, use.session);
  if (!hold.ok()) {
    ++counts_[code == Code::kOutOfRange ? "refused as evicted" : "refused"];
    return ExpectCode(hold.status(), code);
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
  for (const CacheUse& use : open.request.uses) {
    for (const ModelLayer& layer : sessions_.at(use.session).layers) {
      open.alike &= LayoutOf(layer.shape, kRows).page_bytes == open.hold->layout().page_bytes;
    }
  }
  open_.push_back(std::move(open));
  for (int64_t steps = Range(0, 3); steps > 0; --steps) {
    if (!open_.empty()) GoOn(std::prev(open_.end()));
  }
}

void TableHistory::GoOn(OpenRef open) {
  Settle();  // tokens of its sessions may just have been evicted
  switch (open->state) {
    case Open::State::kLooked:
      return Reserve(open);
    case Open::State::kReserved:
      if (open->hold->append_rows() == 0) return Close(open);
      if (Range(0, 3) > 0) return;  // it is still running
      if (Range(0, 4) == 4) {
        ++counts_["given up"];
        return Close(open);
      }
      return Commit(*open);
    case Open::State::kCommitted:  // appended rows may still be read by the answer's check
      return Close(open);
  }
}

void TableHistory::Reserve(OpenRef open) {
  CacheHold& hold = *open->hold;
  const int64_t stride = (hold.length_max() + kRows - 1) / kRows + 1;
  open->table.assign(static_cast<size_t>(stride * std::ssize(open->tokens)), -1);
  int64_t there = 0;
  const Code code = Judge(open->request, &hold, there);
  CacheRefusal refusal;
  const Status status = Try([&] { return hold.Reserve(open->table.data(), stride, &refusal); });
  NoteEvicted(open->request.tenant, hold.device());
  if (!status.ok()) return CloseRefused(open, status, code, refusal);
  EXPECT_EQ(code, Code::kOk);
  open->state = Open::State::kReserved;
  TakeTokens(*open);
  Write(*open);
}

void TableHistory::CloseRefused(OpenRef open, const Status& status, Code code,
                                const CacheRefusal& refusal) {
  if (code == Code::kOk && status.code() == Code::kResourceExhausted) {
    if (!shortage_) ExpectShort(*open, refusal);
    ++counts_["exhausted"];
  } else {
    ExpectCode(status, code);
    ++counts_["refused late"];
  }
  Close(open);
}

// Its tokens may differ from those at its hold: only lengths were compared.
void TableHistory::TakeTokens(Open& open) {
  const size_t stride = open.table.size() / open.tokens.size();
  for (size_t n = 0; n < open.tokens.size(); ++n) {
    const CacheUse& use = open.request.uses[n];
    const Tokens& now = sessions_.at(use.session).layers[use.layer].tokens;
    std::copy(now.begin(), now.end(), open.tokens[n].begin());
    EXPECT_EQ(open.table[(n + 1) * stride - 1], 0);
  }
}

void TableHistory::NoteEvicted(int tenant, int device) {
  const int other = 1 - tenant;
  const int64_t evicted = table_->stats().evictions_others;
  if (std::exchange(evicted_, evicted) == evicted) return;
  EXPECT_GE(table_->tenant_bytes(device)[other], OwnBytes(device, other)) << "evicted below it";
}

void TableHistory::Commit(Open& open) {
  Must([&] { open.hold->Commit(); });
  open.state = Open::State::kCommitted;
  for (size_t n = 0; n < open.tokens.size(); ++n) {
    const CacheUse& use = open.request.uses[n];
    const auto session = sessions_.find(use.session);
    if (session == sessions_.end()) continue;
    ModelLayer& layer = session->second.layers[use.layer];
    ASSERT_EQ(layer.length() + open.hold->append_rows(), std::ssize(open.tokens[n]));
    layer.append_begin = layer.length();
    layer.append_id = use.append_id;
    layer.evicted = false;
    layer.tokens = open.tokens[n];
    session->second.draft = {};
    appended_[open.request.tenant] += open.request.rows;
  }
}

void TableHistory::Close(OpenRef open) {
  ExpectTokens(*open, 0, 1);
  for (const CacheUse& use : open->request.uses) Touch(use.session);
  Must([&] { open_.erase(open); });
}

}  // namespace attend::test
