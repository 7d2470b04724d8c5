// SPDX-License-Identifier: Apache-2.0
//
// Sessions together with their device and server: checks of memory that is not the host's, a lost
// device, draining. For sessions as clients see them, see client/system/session_test.cc and
// e2e/test_sessions.py.

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <thread>

#include "server/engine/engine.h"
#include "server/sessions/session_table.h"
#include "tests/server/support/messages.h"
#include "tests/server/support/session_calls.h"
#include "tests/server/support/test_server.h"

namespace attend::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kDim = 16;

void WithSessions(Config& config) { config.session_memory_bytes = int64_t{32} << 20; }

// Sessions with the shape of PlainWireProblem.
class PlainSessions : public SessionCalls {
 public:
  using SessionCalls::Attend;
  using SessionCalls::SessionCalls;

  grpc::Status Create(v1::Session& session, const std::string& device = "", bool pinned = false) {
    v1::CreateSessionRequest request;
    v1::LayerShape* const shape = request.add_shapes();
    shape->set_dtype(v1::DTYPE_FLOAT32);
    shape->set_heads_kv(2);
    shape->set_dim(kDim);
    request.set_device(device);
    request.set_pinned(pinned);
    return SessionCalls::Create(request, session);
  }
  // The problem with its K and V appended to the session. If the session was empty, the answer must
  // be the same.
  grpc::Status Attend(const v1::Session& session, WireProblem& problem,
                      v1::AttendResponse& response, int64_t length = 0) {
    v1::SessionUse* const use = problem.request.add_sessions();
    use->set_session(session.id());
    use->set_length(length);
    return Attend(problem.request, response);
  }
  // Appends `tokens` tokens of zeros.
  grpc::Status Append(const v1::Session& session, int64_t tokens, int64_t length = 0) {
    WireProblem problem = PlainWireProblem(1);
    v1::AttendRequest& request = problem.request;
    request.mutable_q()->set_shape(2, 0);  // only appends
    request.clear_raw();
    request.add_raw();
    for (v1::Tensor* const tensor : {request.mutable_k(), request.mutable_v()}) {
      tensor->set_shape(2, tokens);
      request.add_raw(std::string(static_cast<size_t>(tokens * 2 * kDim * 4), '\0'));
    }
    for (v1::Tensor* const tensor :
         {request.mutable_q(), request.mutable_k(), request.mutable_v()}) {
      tensor->clear_byte_length();
    }
    v1::AttendResponse response;
    return Attend(session, problem, response, length);
  }
};

TEST(Sessions, AChecksKeysAreFetchedFromTheDevice) {
  TestServer server(WithSessions, 1, TestServer::Devices::kFarSessions);
  PlainSessions calls(server);
  for (const bool wrong : {false, true}) {
    if (wrong) {
      server.backend().Corrupt([](const Attention& a) { static_cast<float*>(a.o.data)[3] += 1; });
    }
    v1::Session session;
    ASSERT_TRUE(calls.Create(session).ok());
    WireProblem problem = PlainWireProblem(FreshSeed());
    problem.request.set_check(true);
    v1::AttendResponse response;
    const grpc::Status status = calls.Attend(session, problem, response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(response.check().ok(), !wrong) << response.check().detail();
    EXPECT_EQ(response.check().rows_checked(), 16);
    EXPECT_EQ(Judge(problem, response).empty(), !wrong);
    // K and V of two heads, eight tokens each.
    EXPECT_EQ(server.backend().arena().copied_bytes(), (wrong ? 2 : 1) * 2 * 2 * 8 * kDim * 4);
  }
}

// A check's copies are charged to the memory budget, which has room for everything but the request
// to be checked: for a sampled check, the keys of the one head that its only row sees.
TEST(Sessions, ASampledCheckWithoutRoomForItsKeysIsSkippedAndCounted) {
  constexpr int64_t kTokens = 4096;
  constexpr int64_t kRows = 8;  // of the request
  for (const bool asked : {false, true}) {
    TestServer server(
        [&](Config& config) {
          WithSessions(config);
          config.memory_budget_bytes = kTokens * (asked ? 2 : 1) * 2 * kDim * 4;
          config.check_sample = asked ? 0 : 1;
          config.metrics_listen = "127.0.0.1:0";
        },
        1, TestServer::Devices::kFarSessions);
    PlainSessions calls(server);
    const auto checks = [&](const std::string& result) {
      return server.Metric("attend_reference_checks_total{result=\"" + result +
                           "\",transport=\"inline\"}");
    };
    v1::Session session;
    ASSERT_TRUE(calls.Create(session).ok());
    for (int64_t length = 0; length < kTokens - kRows;) {
      const int64_t tokens = std::min<int64_t>(512, kTokens - kRows - length);
      ASSERT_TRUE(calls.Append(session, tokens, length).ok());
      length += tokens;
    }
    const double fit = checks("ok");
    WireProblem problem = PlainWireProblem(FreshSeed(), kRows);
    problem.request.set_check(asked);
    v1::AttendResponse response;
    const grpc::Status status = calls.Attend(session, problem, response, kTokens - kRows);
    if (asked) {
      EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
      EXPECT_THAT(status.error_message(), HasSubstr("check: tensor memory: "));
      EXPECT_EQ(checks("refused"), 1);
    } else {
      ASSERT_TRUE(status.ok()) << status.error_message();
      EXPECT_FALSE(response.has_check());
      EXPECT_EQ(response.o().shape(2), kRows);
      EXPECT_EQ(checks("skipped"), 1);
    }
    EXPECT_EQ(checks("ok"), fit);
    EXPECT_EQ(server.backend().arena().copied_bytes(), 0);
    EXPECT_EQ(server.server().engine().host_pool().used_bytes(), 0);
  }
}

TEST(Sessions, ALostDeviceEndsOnlyItsSessions) {
  TestServer server(WithSessions, 2);
  PlainSessions calls(server);
  v1::Session lost, kept;
  ASSERT_TRUE(calls.Create(lost, "cpu").ok());
  ASSERT_TRUE(calls.Create(kept, "cpu1").ok());
  server.backend(0).LoseDevice();
  WireProblem first = PlainWireProblem(1);
  v1::AttendResponse response;
  EXPECT_EQ(calls.Attend(lost, first, response).error_code(), grpc::StatusCode::UNAVAILABLE);
  v1::Session now;
  const grpc::Status status = calls.Get(lost.id(), now);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), AllOf(HasSubstr("session "), HasSubstr("device is lost")));
  EXPECT_EQ(calls.Fork(lost.id()).error_code(), grpc::StatusCode::UNAVAILABLE);
  WireProblem second = PlainWireProblem(2);
  ASSERT_TRUE(calls.Attend(kept, second, response).ok());
  EXPECT_EQ(Judge(second, response), "");
  EXPECT_TRUE(calls.Free(lost.id()).ok());
  EXPECT_EQ(calls.Get(lost.id(), now).error_code(), grpc::StatusCode::NOT_FOUND);
  v1::Session fresh;
  EXPECT_EQ(calls.Create(fresh, "cpu").error_code(), grpc::StatusCode::UNAVAILABLE);
  ASSERT_TRUE(calls.Create(fresh).ok());
  EXPECT_EQ(fresh.device(), "cpu1");
}

TEST(Sessions, AFailedAppendAppendsNothing) {
  TestServer server(WithSessions);
  PlainSessions calls(server);
  v1::Session session;
  ASSERT_TRUE(calls.Create(session).ok());
  server.backend().FailItem(1, Internal("planted"));
  v1::AttendResponse response;
  WireProblem failed = PlainWireProblem(1);
  EXPECT_EQ(calls.Attend(session, failed, response).error_code(), grpc::StatusCode::INTERNAL);
  ASSERT_TRUE(calls.Get(session.id(), session).ok());
  EXPECT_EQ(session.length(), 0);
  WireProblem good = PlainWireProblem(1);
  ASSERT_TRUE(calls.Attend(session, good, response).ok());
  EXPECT_EQ(Judge(good, response), "");
}

TEST(Sessions, ARefusalHasMachineReadableDetails) {
  TestServer server(WithSessions);
  PlainSessions calls(server);
  v1::Session session;
  ASSERT_TRUE(calls.Create(session).ok());
  WireProblem problem = PlainWireProblem(1);
  v1::AttendResponse response;
  ASSERT_TRUE(calls.Attend(session, problem, response).ok());
  EXPECT_FALSE(response.sessions_ending());
  WireProblem again = PlainWireProblem(1);
  const grpc::Status status = calls.Attend(session, again, response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(calls.refusal().session_lengths(), ::testing::ElementsAre(8));
  EXPECT_EQ(calls.refusal().missing_bytes(), 0);
  // Metadata with too many values is refused by name.
  WireProblem many = PlainWireProblem(1);
  for (int n = 0; n < 256; ++n) many.request.add_sessions()->set_session(session.id());
  EXPECT_THAT(calls.Attend(session, many, response).error_message(),
              HasSubstr("sessions has 257 entries, must have at most 256"));
}

TEST(Sessions, ARefusedForkOrTruncationReportsItsMissingMemory) {
  TestServer server([](Config& config) { config.session_memory_bytes = int64_t{8} << 20; });
  PlainSessions calls(server);
  constexpr int64_t kPageTokens = 64;
  constexpr int64_t kPageBytes = kPageTokens * 2 * 2 * kDim * 4;  // K and V of two heads
  v1::Session session, rest;
  ASSERT_TRUE(calls.Create(session).ok());
  ASSERT_TRUE(calls.Create(rest, "", true).ok());
  ASSERT_TRUE(calls.Append(session, kPageTokens).ok());
  ASSERT_TRUE(calls.Fork(session.id()).ok());  // shares the page
  constexpr int64_t kTokens = (int64_t{8} << 20) / kPageBytes * kPageTokens;
  ASSERT_TRUE(calls.Append(rest, kTokens - kPageTokens).ok());
  EXPECT_EQ(calls.Fork(session.id(), 5).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(calls.refusal().missing_bytes(), kPageBytes);
  EXPECT_EQ(calls.Truncate(session.id(), 5).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(calls.refusal().missing_bytes(), kPageBytes);
  EXPECT_EQ(calls.Fork(session.id(), 65).error_code(), grpc::StatusCode::OUT_OF_RANGE);
  EXPECT_EQ(calls.refusal().missing_bytes(), 0);
}

TEST(Sessions, RequestsThatEndDuringADrainReportThatSessionsEnd) {
  TestServer server(WithSessions);
  PlainSessions calls(server);
  v1::Session session;
  ASSERT_TRUE(calls.Create(session).ok());
  server.backend().Hold();
  WireProblem problem = PlainWireProblem(1);
  v1::AttendResponse response;
  std::thread caller([&] { EXPECT_TRUE(calls.Attend(session, problem, response).ok()); });
  while (server.server().engine().inflight() == 0) std::this_thread::yield();
  server.WaitForQueued(0);
  server.server().engine().Drain();
  server.backend().Release();
  caller.join();
  EXPECT_TRUE(response.sessions_ending());
}

TEST(Sessions, ADrainingServerReportsThatSessionsEnd) {
  TestServer server(WithSessions);
  PlainSessions calls(server);
  v1::Session session, now;
  ASSERT_TRUE(calls.Create(session).ok());
  EXPECT_FALSE(session.ending());
  server.server().engine().Drain();
  ASSERT_TRUE(calls.Get(session.id(), now).ok());
  EXPECT_TRUE(now.ending());
  v1::Session fresh;
  WireProblem problem = PlainWireProblem(1);
  v1::AttendResponse response;
  for (const grpc::Status& refused :
       {calls.Create(fresh), calls.Fork(session.id()), calls.Attend(session, problem, response)}) {
    EXPECT_EQ(refused.error_code(), grpc::StatusCode::UNAVAILABLE);
    EXPECT_THAT(refused.error_message(),
                AllOf(HasSubstr("draining"), HasSubstr("its sessions end")));
  }
}

TEST(Sessions, DisabledSessionCallsAreRefusedUnread) {
  TestServer server;
  PlainSessions calls(server);
  v1::Session session;
  const std::string too_long(size_t{100} << 10, 'x');
  EXPECT_EQ(calls.Get(too_long, session).error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

TEST(Sessions, TheServersInfoHasTheSessionLimits) {
  for (const bool on : {true, false}) {
    TestServer server(on ? WithSessions : [](Config&) {});
    v1::GetServerInfoResponse info;
    grpc::ClientContext context;
    ASSERT_TRUE(server.Stub()->GetServerInfo(&context, {}, &info).ok());
    ASSERT_EQ(info.has_sessions(), on);
    EXPECT_EQ(info.devices(0).session_bytes_max() > 0, on);
    if (!on) continue;
    EXPECT_EQ(info.sessions().page_tokens(), 64);
    EXPECT_EQ(info.sessions().sessions_max(), Config().max_sessions);
    EXPECT_EQ(info.sessions().lease_seconds_default(), 60);
  }
}

}  // namespace
}  // namespace attend::test
