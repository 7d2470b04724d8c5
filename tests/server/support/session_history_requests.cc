// SPDX-License-Identifier: Apache-2.0
//
// What the requests of a history do with its sessions.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <limits>
#include <thread>
#include <utility>

#include "server/engine/engine.h"
#include "tests/server/support/session_history.h"

namespace attend::test {
namespace {

using grpc::StatusCode;
using std::chrono::seconds;
using ::testing::HasSubstr;

std::string Text(const grpc::Status& status) {
  return std::to_string(status.error_code()) + " " + status.error_message();
}

}  // namespace

void SessionHistory::ExpectLost(int tenant, const std::string& id) {
  v1::Session session;
  const grpc::Status status = calls(tenant).Get(id, session);
  EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr("its device is lost"));
}

void SessionHistory::ExpectExhausted(const grpc::Status& status) {
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr("(session-memory)"));
  ++counts_["exhausted"];
}

// With others of the tenant's sessions, if there are any like the first.
SessionHistory::Request SessionHistory::MakeRequest(Model& first, std::optional<int64_t> rows,
                                                    int64_t len_q) {
  Request request;
  request.tenant = first.tenant;
  request.device = first.device;
  std::vector<const LayerTokens*> layers;
  const auto add = [&](const Model& session) {
    const int64_t layer = Range(0, std::ssize(session.layers) - 1);
    request.uses.push_back({session.id, layer});
    layers.push_back(&session.layers[static_cast<size_t>(layer)].tokens);
  };
  add(first);
  for (const auto& [id, session] : sessions_) {
    const LayerTokens& a = session.layers[0].tokens;
    const LayerTokens& b = first.layers[0].tokens;
    const bool alike = session.tenant == first.tenant && session.device == first.device &&
                       a.dtype == b.dtype && a.dim == b.dim;
    if (alike && &session != &first && !Over(session) && Chance(25)) add(session);
  }
  if (!rows.has_value()) {
    rows = kPageTokens - layers[0]->length() % kPageTokens + Range(-1, 1);
    ++counts_["page edges"];
  }
  request.step = MakeSessionStep(layers, *rows, len_q, random_);
  v1::AttendRequest& message = request.step.problem.request;
  for (int n = 0; n < message.sessions_size(); ++n) {
    const Use& use = request.uses[static_cast<size_t>(n)];
    message.mutable_sessions(n)->set_session(use.id);
    message.mutable_sessions(n)->set_layer(static_cast<int32_t>(use.layer));
  }
  return request;
}

void SessionHistory::Judge(Request& request, const v1::AttendResponse& response) {
  EXPECT_EQ(test::Judge(request.step.problem, response), "") << Describe(request.step.problem.spec);
  EXPECT_THAT(
      std::vector<int64_t>(response.session_lengths().begin(), response.session_lengths().end()),
      ::testing::ElementsAreArray(request.step.problem.spec.kv_lengths));
  EXPECT_TRUE(!response.has_check() || response.check().ok()) << response.check().detail();
  ++counts_["answered"];
}

void SessionHistory::Attend() {
  Model* const session = Any();
  if (session == nullptr) return;
  std::optional<int64_t> rows;
  if (Chance(70)) rows = Chance(40) ? 0 : Chance(40) ? 1 : Range(1, 300);
  Request request = MakeRequest(*session, rows, Range(0, 3));
  v1::AttendRequest& message = request.step.problem.request;
  const bool named = Chance(50);
  for (v1::SessionUse& use : *message.mutable_sessions()) {
    if (named) use.set_append_id(std::to_string(++appends_));
  }
  message.set_check(Chance(15));
  SessionCalls::Way way = SessionCalls::Way::kUnary;
  if (Chance(30)) way = SessionCalls::Way::kStream;
  if (message.has_k() && Chance(30)) way = SessionCalls::Way::kChunks;
  v1::AttendResponse response;
  const grpc::Status status = calls(request.tenant).Attend(way, message, response, random_);
  std::set<std::string> used;
  for (const Use& use : request.uses) {
    used.insert(use.id);
    Touch(sessions_.at(use.id));
  }
  if (status.ok()) {
    Judge(request, response);
    Append(request);
    if (named && request.step.rows > 0 && Chance(40)) AskAgain(request, response);
  } else {
    ExpectExhausted(status);
  }
  Settle(request.tenant, used);
}

// Its answer got lost, so the client sends it once more.
void SessionHistory::AskAgain(Request& request, const v1::AttendResponse& first) {
  v1::AttendRequest& message = request.step.problem.request;
  v1::AttendResponse again;
  const grpc::Status status =
      calls(request.tenant).Attend(SessionCalls::Way::kUnary, message, again, random_);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_TRUE(std::ranges::equal(first.raw(), again.raw()));
  EXPECT_TRUE(std::ranges::equal(first.session_lengths(), again.session_lengths()));
  message.mutable_sessions(0)->set_append_id("another");
  const grpc::Status other =
      calls(request.tenant).Attend(SessionCalls::Way::kUnary, message, again, random_);
  EXPECT_EQ(other.error_code(), StatusCode::FAILED_PRECONDITION) << other.error_message();
  ++counts_["again"];
}

void SessionHistory::WrongLength() {
  Model* const session = Any();
  if (session == nullptr) return;
  Request request = MakeRequest(*session, Range(0, 2), 1);
  const auto n = static_cast<int>(Range(0, std::ssize(request.uses) - 1));
  const Use& use = request.uses[static_cast<size_t>(n)];
  const Layer& layer = sessions_.at(use.id).layers[static_cast<size_t>(use.layer)];
  const int64_t length = layer.tokens.length();
  v1::SessionUse& wrong = *request.step.problem.request.mutable_sessions(n);
  wrong.set_length(length + Range(1, 100));
  v1::AttendResponse response;
  const grpc::Status status =
      calls(request.tenant)
          .Attend(SessionCalls::Way::kUnary, request.step.problem.request, response, random_);
  EXPECT_EQ(status.error_code(),
            layer.evicted ? StatusCode::OUT_OF_RANGE : StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("sessions[" + std::to_string(n) + "].length is "));
  EXPECT_THAT(status.error_message(),
              HasSubstr("the layer has " + std::to_string(length) + " tokens"));
  for (int i = 0; i <= n; ++i) Touch(sessions_.at(request.uses[static_cast<size_t>(i)].id));
  ++counts_["wrong lengths"];
  Settle(-1);
}

// Whoever guesses an id, or comes too late, or is another tenant, learns nothing.
void SessionHistory::Guess() {
  std::vector<std::pair<int, std::string>> guesses = {{0, ""}, {1, std::string(16, 'x')}};
  if (!gone_.empty()) {
    guesses.emplace_back(0, gone_[static_cast<size_t>(Range(0, std::ssize(gone_) - 1))]);
  }
  if (const Model* const other = Any(); other != nullptr) {
    guesses.emplace_back(1 - other->tenant, other->id);
  }
  LayerTokens shape;
  SessionStep step = MakeSessionStep({&shape}, 1, 1, random_);
  std::set<std::string> answers, attended;
  for (const auto& [tenant, id] : guesses) {
    SessionCalls& calls = this->calls(tenant);
    v1::Session session;
    v1::AttendResponse response;
    step.problem.request.mutable_sessions(0)->set_session(id);
    for (const grpc::Status& status :
         {calls.Get(id, session), calls.KeepAlive(id), calls.Fork(id, 0, session),
          calls.Truncate(id, 0), calls.Free(id)}) {
      EXPECT_EQ(status.error_code(), StatusCode::NOT_FOUND);
      answers.insert(Text(status));
    }
    for (const auto way :
         {SessionCalls::Way::kUnary, SessionCalls::Way::kStream, SessionCalls::Way::kChunks}) {
      attended.insert(Text(calls.Attend(way, step.problem.request, response, random_)));
    }
  }
  EXPECT_EQ(answers.size(), 1u) << ::testing::PrintToString(answers);
  EXPECT_EQ(attended.size(), 1u) << ::testing::PrintToString(attended);
  EXPECT_TRUE(attended.begin()->starts_with("5 "));  // NOT_FOUND
  Settle(-1);
}

void SessionHistory::Malformed() {
  Model* const session = Any();
  if (session == nullptr) return;
  Request request = MakeRequest(*session, 2, 1);
  v1::AttendRequest& message = request.step.problem.request;
  const LayerTokens& shape = session->layers[0].tokens;
  const auto set_rows = [&](int64_t rows) {
    const int at = message.layout() == v1::LAYOUT_BLHD ? 1 : 2;
    message.mutable_k()->set_shape(at, rows);
    message.mutable_v()->set_shape(at, rows);
  };
  std::string words;
  switch (Range(0, 5)) {
    case 0:
      message.mutable_sessions(0)->set_layer(-1);
      words = "sessions[0].layer is -1";
      break;
    case 1:
      message.mutable_sessions(0)->set_layer(static_cast<int32_t>(session->layers.size()));
      words = "sessions[0].layer is ";
      break;
    case 2:
      *message.add_sessions() = message.sessions(0);
      words = "names a session a second time";
      break;
    case 3:
      set_rows((int64_t{1} << 30) + 1);
      words = "more would exceed";
      break;
    case 4:  // 2^31 elements
      set_rows((int64_t{1} << 31) / (shape.heads_kv * shape.dim));
      break;
    default:
      message.mutable_sessions(0)->set_append_id(std::string(33, 'x'));
      words = "append_id has 33 bytes";
      break;
  }
  v1::AttendResponse response;
  const grpc::Status status =
      calls(request.tenant).Attend(SessionCalls::Way::kUnary, message, response, random_);
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr(words));
  // How many sessions were found before the fault is the server's to know.
  for (const Use& use : request.uses) {
    EXPECT_TRUE(calls(request.tenant).KeepAlive(use.id).ok());
    Touch(sessions_.at(use.id));
  }
  ++counts_["malformed"];
  Settle(-1);
}

// A client that goes in the middle of its chunks has appended nothing.
void SessionHistory::Abandon() {
  Model* const session = Any();
  if (session == nullptr) return;
  Request request = MakeRequest(*session, Range(1, 100), 1);
  const grpc::Status status =
      calls(request.tenant).AbandonChunks(request.step.problem.request, random_);
  std::set<std::string> used;
  for (const Use& use : request.uses) {
    used.insert(use.id);
    // A truncation that takes nothing away is refused while the append is under way.
    const int64_t longest = sessions_.at(use.id).longest();
    while (calls(request.tenant).Truncate(use.id, longest).error_code() ==
           StatusCode::UNAVAILABLE) {
      std::this_thread::yield();
    }
    Touch(sessions_.at(use.id));
  }
  if (status.error_code() == StatusCode::CANCELLED) {
    ++counts_["abandoned"];
  } else {
    ExpectExhausted(status);
  }
  Settle(request.tenant, used);
}

void SessionHistory::InFlight() {
  Model* const session = Any();
  if (session == nullptr) return;
  Request request = MakeRequest(*session, Chance(25) ? 0 : Range(1, 100), Range(0, 2));
  test::FakeBackend& backend = server_.backend(request.device);
  backend.Hold();
  grpc::ClientContext context;
  v1::AttendResponse response;
  auto answer = std::async(std::launch::async, [&] {
    return calls(request.tenant).Attend(context, request.step.problem.request, response);
  });
  const auto ended = [&] { return answer.wait_for(seconds(0)) == std::future_status::ready; };
  while (backend.waiting_batches() == 0 && !ended()) std::this_thread::yield();
  std::set<std::string> used;
  for (const Use& use : request.uses) {
    used.insert(use.id);
    Touch(sessions_.at(use.id));
  }
  if (!ended()) {
    in_flight_ = used;
    Settle(request.tenant);
    Meanwhile(request);
    if (Chance(25)) backend.FailItem(1, Internal("planted"));
    const bool loses = request.device == 1 && Chance(10);
    if (loses) backend.LoseDevice();
    if (Chance(25)) context.TryCancel();
    backend.Release();
    answer.wait();
    while (server_.server().engine().inflight() > 0) std::this_thread::yield();
    backend.ForgetFaults();
    lost_[static_cast<size_t>(request.device)] |= loses;
    in_flight_.clear();
  }
  backend.Release();
  EndInFlight(request, answer.get(), response);
  Settle(request.tenant, used);
}

void SessionHistory::Meanwhile(const Request& request) {
  const Use& use = request.uses[0];
  SessionCalls& calls = this->calls(request.tenant);
  if (request.step.rows > 0) {
    EXPECT_EQ(calls.Truncate(use.id, 0).error_code(), StatusCode::UNAVAILABLE);
    v1::AttendRequest message = request.step.problem.request;
    v1::AttendResponse response;
    const grpc::Status status = calls.Attend(SessionCalls::Way::kUnary, message, response, random_);
    EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr("is under way"));
  }
  for (int64_t n = Range(0, 3); n > 0; --n) {
    NoteMemory();
    switch (Range(0, 5)) {
      case 0:
        Create();
        break;
      case 1:
        Fork();
        break;
      case 2:
        Free();
        break;
      case 3:
        Guess();
        break;
      default:
        Advance();
        break;
    }
  }
  NoteMemory();
}

void SessionHistory::EndInFlight(Request& request, const grpc::Status& status,
                                 const v1::AttendResponse& response) {
  ++counts_["in flight"];
  for (const Use& use : request.uses) {
    const auto found = sessions_.find(use.id);
    if (found == sessions_.end()) continue;
    Touch(found->second);
    if (lost_[static_cast<size_t>(request.device)]) ExpectLost(request.tenant, use.id);
  }
  if (status.ok()) {
    Judge(request, response);
    return Append(request);
  }
  switch (status.error_code()) {
    case StatusCode::RESOURCE_EXHAUSTED:
      ExpectExhausted(status);
      return;
    case StatusCode::INTERNAL:
      EXPECT_THAT(status.error_message(), HasSubstr("planted"));
      ++counts_["failed"];
      return;
    case StatusCode::UNAVAILABLE:
      EXPECT_TRUE(lost_[static_cast<size_t>(request.device)]) << status.error_message();
      ++counts_["lost"];
      return;
    default:
      break;
  }
  // Its rows are all there or none.
  EXPECT_EQ(status.error_code(), StatusCode::CANCELLED) << status.error_message();
  ++counts_["cancelled"];
  std::set<bool> appended;
  for (size_t n = 0; n < request.uses.size(); ++n) {
    const Use& use = request.uses[n];
    v1::Session now;
    if (!sessions_.contains(use.id)) continue;
    const grpc::Status found = calls(request.tenant).Get(use.id, now);
    if (!found.ok()) continue;             // the device is lost, and its sessions with it
    if (request.step.rows == 0) continue;  // it may have been cut since
    const int64_t length = now.layer_lengths(static_cast<int>(use.layer));
    const int64_t longer = request.step.problem.spec.kv_lengths[n];
    EXPECT_TRUE(length == longer || length == longer - request.step.rows) << length;
    appended.insert(length == longer);
  }
  EXPECT_LE(appended.size(), 1u) << "some sequences were appended to, others not";
  if (appended.contains(true)) Append(request);
}

}  // namespace attend::test
