// SPDX-License-Identifier: Apache-2.0
//
// The sessions themselves: made, forked, cut, freed, evicted and expired. What requests do with
// them is in session_history_requests.cc.

#include "tests/server/support/session_history.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <thread>

#include "server/sessions/session_table.h"

namespace attend::test {
namespace {

using grpc::StatusCode;
using std::chrono::seconds;

// Pages of 512, 224 and 4 KiB: few of the first fill the memory.
constexpr struct {
  DType dtype;
  int64_t heads_kv, dim, dim_v;
} kShapes[] = {
    {DType::kFloat32, 4, 256, 256}, {DType::kFloat16, 8, 128, 96}, {DType::kBFloat16, 1, 8, 16}};

TestServer::Devices AnyKind(std::mt19937_64& random) {
  using enum TestServer::Devices;
  constexpr TestServer::Devices kKinds[] = {kPlain, kStaging, kGathering, kFarSessions};
  return kKinds[random() % std::size(kKinds)];
}

}  // namespace

SessionHistory::SessionHistory(uint64_t seed)
    : random_(seed),
      server_(
          [](Config& config) {
            config.session_memory_bytes = kMemory;
            config.max_sessions = kSessionsMax;
            config.staging_min_bytes = 1;
            std::vector<std::string> tenants;
            for (int n = 0; n < kTenants; ++n) {
              tenants.push_back(std::string(kNames[n]) + "=" + std::to_string(kWeights[n]));
            }
            config.tenants = *Tenants::Parse(tenants);
          },
          kDevices, AnyKind(random_), TestServer::kAnywhere, clock_) {
  if (!server_.backend(0).arena().on_host()) ++counts_["not in host memory"];
  if (Chance(50)) {
    for (int device = 0; device < kDevices; ++device) server_.backend(device).HonourStops();
  }
  for (const char* const name : kNames) {
    calls_.push_back(std::make_unique<SessionCalls>(server_, name));
  }
}

int64_t SessionHistory::Model::length() const {
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const Layer& layer : layers) least = std::min(least, layer.tokens.length());
  return least;
}

int64_t SessionHistory::Model::longest() const {
  int64_t most = 0;
  for (const Layer& layer : layers) most = std::max(most, layer.tokens.length());
  return most;
}

void SessionHistory::Step() {
  NoteMemory();
  switch (Range(0, 19)) {
    case 0:
    case 1:
      return Create();
    case 2:
    case 3:
      return Fork();
    case 4:
      return Truncate();
    case 5:
      return Free();
    case 6:
      return Advance();
    case 7:
      return Reconnect();
    case 8:
      return Guess();
    case 9:
      return WrongLength();
    case 10:
      return Malformed();
    case 11:
      return Abandon();
    case 12:
    case 13:
      return InFlight();
    default:
      return Attend();
  }
}

bool SessionHistory::Over(const Model& session) const {
  return clock_->Now() - session.last_used >= session.lease && !in_flight_.contains(session.id);
}

SessionHistory::Model* SessionHistory::Any() {
  std::vector<Model*> all;
  for (auto& [id, session] : sessions_) {
    if (!Over(session) && !lost_[static_cast<size_t>(session.device)]) all.push_back(&session);
  }
  if (all.empty()) return nullptr;
  return all[static_cast<size_t>(Range(0, std::ssize(all) - 1))];
}

void SessionHistory::NoteMemory() {
  const SessionTable& table = *server_.server().sessions();
  for (int device = 0; device < kDevices; ++device) {
    tenant_bytes_[static_cast<size_t>(device)] = table.tenant_bytes(device);
  }
}

void SessionHistory::Create() {
  v1::CreateSessionRequest request;
  const auto& shape = kShapes[Chance(50) ? 0 : Range(0, std::ssize(kShapes) - 1)];
  v1::LayerShape* const layer = request.add_shapes();
  layer->set_dtype(static_cast<v1::DType>(shape.dtype));
  layer->set_heads_kv(shape.heads_kv);
  layer->set_dim(shape.dim);
  layer->set_dim_v(shape.dim_v);
  request.set_layers(static_cast<int32_t>(Range(1, 2)));
  constexpr const char* kNamesOfDevices[] = {"", "cpu", "cpu", "cpu1"};
  request.set_device(kNamesOfDevices[Range(0, 3)]);
  const int64_t lease_s = Range(20, 200);
  request.set_lease_seconds(static_cast<double>(lease_s));
  request.set_pinned(Chance(10));
  const auto tenant = static_cast<int>(Range(0, kTenants - 1));
  v1::Session made;
  const grpc::Status status = calls(tenant).Create(request, made);
  if (request.device() == "cpu1" && lost_[1]) {
    EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE) << status.error_message();
  } else if (!status.ok()) {
    EXPECT_TRUE(HasAllPlaces(tenant));
    EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  } else {
    Model session{.id = made.id(),
                  .tenant = tenant,
                  .device = made.device() == "cpu" ? 0 : 1,
                  .lease = seconds(lease_s),
                  .pinned = request.pinned()};
    session.layers.resize(static_cast<size_t>(request.layers()));
    for (Layer& each : session.layers) {
      each.tokens = {shape.dtype, shape.heads_kv, shape.dim, shape.dim_v};
    }
    Touch(session);
    EXPECT_TRUE(sessions_.emplace(made.id(), session).second);
  }
  Settle(-1);
}

bool SessionHistory::HasAllPlaces(int tenant) const {
  Ledger places(kSessionsMax, kWeights);
  for (const auto& [id, session] : sessions_) places.Add(session.tenant, 1);
  return places.Room(tenant) == 0;
}

void SessionHistory::Fork() {
  Model* const origin = Any();
  if (origin == nullptr) return;
  const int64_t whole = origin->length();
  const int64_t length = Chance(10) ? whole + Range(1, 100) : Range(0, whole);
  v1::Session made;
  const grpc::Status status = calls(origin->tenant).Fork(origin->id, length, made);
  Touch(*origin);
  if (length > whole) {
    EXPECT_EQ(status.error_code(), StatusCode::OUT_OF_RANGE) << status.error_message();
  } else if (status.ok()) {
    Model fork = *origin;
    fork.id = made.id();
    for (Layer& layer : fork.layers) {
      layer.tokens.Truncate(length);
      layer.evicted = false;
    }
    Touch(fork);
    EXPECT_TRUE(sessions_.emplace(fork.id, fork).second);
    ++counts_["forked"];
  } else if (!HasAllPlaces(origin->tenant)) {
    ExpectExhausted(status);
  }
  Settle(origin->tenant, {origin->id});
}

void SessionHistory::Truncate() {
  Model* const session = Any();
  if (session == nullptr) return;
  const int64_t longest = session->longest();
  const int64_t length = Chance(10) ? longest + Range(1, 100) : Range(0, longest);
  const grpc::Status status = calls(session->tenant).Truncate(session->id, length);
  Touch(*session);
  if (length > longest) {
    EXPECT_EQ(status.error_code(), StatusCode::OUT_OF_RANGE) << status.error_message();
  } else if (status.ok()) {
    for (Layer& layer : session->layers) {
      if (length >= layer.tokens.length()) continue;
      layer.tokens.Truncate(length);
      layer.evicted = false;
    }
    ++counts_["cut"];
  } else {
    ExpectExhausted(status);
  }
  Settle(session->tenant, {session->id});
}

void SessionHistory::Free() {
  Model* const session = Any();
  if (session == nullptr) return;
  const std::string id = session->id;
  const grpc::Status status = calls(session->tenant).Free(id);
  EXPECT_TRUE(status.ok()) << status.error_message();
  gone_.push_back(id);
  sessions_.erase(id);
  Settle(-1);
}

void SessionHistory::Advance() {
  Model* const used = Any();
  clock_->Advance(seconds(Range(1, 40)));
  if (used != nullptr && !Over(*used) && Chance(50)) {
    EXPECT_TRUE(calls(used->tenant).KeepAlive(used->id).ok());
    Touch(*used);
  }
  Settle(-1);
}

// A connection that goes takes nothing with it.
void SessionHistory::Reconnect() {
  const auto tenant = static_cast<size_t>(Range(0, kTenants - 1));
  calls_[tenant] = std::make_unique<SessionCalls>(server_, kNames[tenant]);
  Settle(-1);
}

void SessionHistory::Settle(int needy, const std::set<std::string>& kept) {
  std::map<std::string, v1::Session> listed;
  for (int tenant = 0; tenant < kTenants; ++tenant) {
    for (const v1::Session& session : calls(tenant).List(static_cast<int>(Range(2, 20)))) {
      const auto found = sessions_.find(session.id());
      ASSERT_TRUE(found != sessions_.end()) << "listed, and nobody made it";
      EXPECT_EQ(found->second.tenant, tenant);
      EXPECT_FALSE(Over(found->second)) << "its lease is over";
      listed[session.id()] = session;
    }
  }
  for (auto it = sessions_.begin(); it != sessions_.end();) {
    Model& session = it->second;
    const auto found = listed.find(session.id);
    if (found == listed.end()) {
      EXPECT_TRUE(Over(session) && !in_flight_.contains(session.id));
      gone_.push_back(session.id);
      ++counts_["expired"];
      it = sessions_.erase(it);
      continue;
    }
    const bool may_lose = needy >= 0 && !session.pinned && !kept.contains(session.id) &&
                          !in_flight_.contains(session.id);
    TakeEvictions(session, found->second, needy, may_lose);
    ++it;
  }
  const SessionTable& table = *server_.server().sessions();
  EXPECT_LE(std::ssize(sessions_), kSessionsMax);
  EXPECT_TRUE(table.Consistent());
}

void SessionHistory::TakeEvictions(Model& session, const v1::Session& listed, int needy,
                                   bool may_lose) {
  ASSERT_EQ(listed.layer_lengths_size(), std::ssize(session.layers));
  bool evicted = false;
  for (size_t n = 0; n < session.layers.size(); ++n) {
    Layer& layer = session.layers[n];
    const int64_t length = listed.layer_lengths(static_cast<int>(n));
    ASSERT_LE(length, layer.tokens.length());
    if (length == layer.tokens.length()) continue;
    EXPECT_TRUE(may_lose) << "layer " << n << " has lost tokens";
    EXPECT_EQ(length % kPageTokens, 0) << "whole pages are evicted";
    layer.tokens.Truncate(length);
    evicted = layer.evicted = true;
  }
  EXPECT_EQ(listed.length(), session.length());
  if (!evicted) return;
  ++counts_["evicted"];
  if (session.tenant == needy) return;
  // Only of what it had beyond its own part.
  ++counts_["evicted by others"];
  const int64_t own = DivideByWeight(kMemory, kWeights).own[session.tenant];
  const auto tenant = static_cast<size_t>(session.tenant);
  EXPECT_GT(tenant_bytes_[static_cast<size_t>(session.device)][tenant], own);
  EXPECT_GE(server_.server().sessions()->tenant_bytes(session.device)[tenant], own);
}

void SessionHistory::Append(const Request& request) {
  for (size_t n = 0; n < request.uses.size(); ++n) {
    const auto found = sessions_.find(request.uses[n].id);
    if (found == sessions_.end()) continue;
    Layer& layer = found->second.layers[static_cast<size_t>(request.uses[n].layer)];
    layer.tokens.k += request.step.k_rows[n];
    layer.tokens.v += request.step.v_rows[n];
    if (request.step.rows > 0) layer.evicted = false;
  }
}

void SessionHistory::End() {
  for (const auto& [id, session] : sessions_) {
    if (lost_[static_cast<size_t>(session.device)] || Over(session) || Chance(50)) continue;
    EXPECT_TRUE(calls(session.tenant).Free(id).ok());
  }
  clock_->Advance(seconds(300));
  SessionTable& table = *server_.server().sessions();
  table.Expire();
  EXPECT_EQ(table.stats().sessions, 0);
  for (int device = 0; device < kDevices; ++device) {
    EXPECT_EQ(table.memory(device).used_bytes, 0);
    EXPECT_EQ(table.memory(device).free_bytes, kMemory);
    EXPECT_THAT(table.tenant_bytes(device), ::testing::Each(0));
  }
}

}  // namespace attend::test
