// SPDX-License-Identifier: Apache-2.0
//
// A random history of sessions at a whole server, and a model of what each should hold. The devices
// compute with the double-precision reference over the server's pages, which some say are not in
// host memory, what becomes free is poisoned, and time is the history's own. After each step the
// server must list exactly the model's sessions; tokens may be missing only where eviction may have
// taken them.

#pragma once

#include <array>
#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "server/memory/ledger.h"
#include "tests/kernels/support/manual_clock.h"
#include "tests/server/support/session_calls.h"
#include "tests/server/support/session_steps.h"
#include "tests/server/support/test_server.h"

namespace attend::test {

class SessionHistory {
 public:
  explicit SessionHistory(uint64_t seed);

  // Expectations are GoogleTest's.
  void Step();
  // Frees all, or lets their leases end: nothing is held.
  void End();

  // What has happened, and how often.
  using Counts = std::map<std::string, int64_t>;
  const Counts& counts() const { return counts_; }

 private:
  static constexpr int kTenants = 2, kDevices = 2;
  static constexpr std::array<const char*, kTenants> kNames = {"default", "other"};
  static inline const TenantWeights kWeights = {3, 1};
  static constexpr int64_t kMemory = int64_t{16} << 20;
  static constexpr int64_t kSessionsMax = 16;
  static constexpr int64_t kPageTokens = 64;

  struct Layer {
    LayerTokens tokens;
    bool evicted = false;  // and neither appended to nor cut since
  };
  struct Model {
    std::string id;
    int tenant = 0;
    int device = 0;
    Duration lease{};
    TimePoint last_used{};
    bool pinned = false;
    std::vector<Layer> layers = {};

    int64_t length() const;  // of the shortest layer
    int64_t longest() const;
  };
  // A layer of each of some sessions of a tenant, all alike.
  struct Use {
    std::string id;
    int64_t layer = 0;
  };
  struct Request {
    int tenant = 0;
    int device = 0;
    std::vector<Use> uses;
    SessionStep step;
  };

  int64_t Range(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }
  bool Chance(int percent) { return Range(1, 100) <= percent; }
  SessionCalls& calls(int tenant) { return *calls_[static_cast<size_t>(tenant)]; }
  bool Over(const Model& session) const;
  // One that is there and whose device is not lost, or null.
  Model* Any();
  void Touch(Model& session) { session.last_used = clock_->Now(); }

  // Steps.
  void Create();
  void Fork();
  void Truncate();
  void Free();
  void Advance();
  void Reconnect();
  void Guess();
  void Attend();
  void WrongLength();
  void Malformed();
  void Abandon();
  void InFlight();

  // What the server says of lost devices' sessions.
  void ExpectLost(int tenant, const std::string& id);
  void ExpectExhausted(const grpc::Status& status);
  // As far as the ledger of sessions goes.
  bool HasAllPlaces(int tenant) const;
  // Without `rows`: as many as lead to the end of the first layer's page, or one more or less.
  Request MakeRequest(Model& first, std::optional<int64_t> rows, int64_t len_q);
  void Judge(Request& request, const v1::AttendResponse& response);
  // The rows are the sessions'; those that have been freed have none.
  void Append(const Request& request);
  void AskAgain(Request& request, const v1::AttendResponse& first);
  // While a request of these sessions is under way.
  void Meanwhile(const Request& request);
  void EndInFlight(Request& request, const grpc::Status& status,
                   const v1::AttendResponse& response);
  // Compares the server with the model. Tokens may have been evicted for a need of `needy`, a
  // tenant, or none (-1), but not from `kept`.
  void Settle(int needy, const std::set<std::string>& kept = {});
  void TakeEvictions(Model& session, const v1::Session& listed, int needy, bool may_lose);
  void NoteMemory();

  std::mt19937_64 random_;
  std::shared_ptr<ManualClock> clock_ = std::make_shared<ManualClock>();
  TestServer server_;
  std::vector<std::unique_ptr<SessionCalls>> calls_;
  std::map<std::string, Model> sessions_;
  std::vector<std::string> gone_;    // ids that were sessions'
  std::set<std::string> in_flight_;  // sessions that a request uses
  std::array<bool, kDevices> lost_{};
  std::array<std::vector<int64_t>, kDevices> tenant_bytes_;  // before the step
  int64_t appends_ = 0;
  Counts counts_;
};

}  // namespace attend::test
