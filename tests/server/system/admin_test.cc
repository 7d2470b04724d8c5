// SPDX-License-Identifier: Apache-2.0
//
// An operator's calls to a whole server: who may make them, and their effect while clients are at
// work.

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "attend/v1/admin.grpc.pb.h"
#include "tests/server/support/health_client.h"
#include "tests/server/support/messages.h"
#include "tests/server/support/session_calls.h"
#include "tests/server/support/temporary_directory.h"
#include "tests/server/support/test_server.h"

namespace attend {
namespace {

using grpc::StatusCode;
using test::Health;
using test::TestServer;
using v1::AdminService;

class AdminTest : public ::testing::Test {
 protected:
  TestServer Make(const std::function<void(Config&)>& change = {}) const {
    return TestServer([&](Config& config) {
      config.listen = {"unix:" + (folder_.path() / "socket").string()};
      config.tenants = *Tenants::Parse({"a=1", "b=1"});
      config.session_memory_bytes = int64_t{32} << 20;
      if (change) change(config);
    });
  }
  template <class In, class Out>
  static grpc::Status Ask(const TestServer& server,
                          grpc::Status (AdminService::Stub::*method)(grpc::ClientContext*,
                                                                     const In&, Out*),
                          const In& in, Out& out) {
    const auto stub = AdminService::NewStub(server.Connect());
    grpc::Status status;
    do {  // gRPC's client gives up a call that it has not sent yet when its connection drains
      grpc::ClientContext context;
      status = (stub.get()->*method)(&context, in, &out);
    } while (status.error_message() == "GOAWAY received");
    return status;
  }
  static grpc::Status Drain(const TestServer& server) {
    v1::DrainResponse out;
    return Ask(server, &AdminService::Stub::Drain, v1::DrainRequest(), out);
  }
  static grpc::Status Undrain(const TestServer& server) {
    v1::UndrainResponse out;
    return Ask(server, &AdminService::Stub::Undrain, v1::UndrainRequest(), out);
  }
  static v1::GetStatusResponse Status(const TestServer& server) {
    v1::GetStatusResponse out;
    EXPECT_TRUE(Ask(server, &AdminService::Stub::GetStatus, v1::GetStatusRequest(), out).ok());
    return out;
  }
  static StatusCode Attend(const TestServer& server) {
    grpc::ClientContext context;
    v1::AttendResponse response;
    return server.Stub()
        ->Attend(&context, test::PlainWireProblem(1).request, &response)
        .error_code();
  }
  // Creates a session of the tenant with as many tokens as the request has.
  static std::string MakeSession(const TestServer& server, const std::string& tenant,
                                 bool pinned = false) {
    test::SessionCalls calls(server, tenant);
    v1::CreateSessionRequest request;
    v1::LayerShape& shape = *request.add_shapes();
    shape.set_dtype(v1::DTYPE_FLOAT32);
    shape.set_heads_kv(1);
    shape.set_dim(8);
    request.set_pinned(pinned);
    v1::Session session;
    EXPECT_TRUE(calls.Create(request, session).ok());
    return session.id();
  }

  const test::TemporaryDirectory folder_;
};

TEST_F(AdminTest, AdminCallsNeedASocketOfTheServersUser) {
  const TestServer tcp;
  const grpc::Status refused = Drain(tcp);
  EXPECT_EQ(refused.error_code(), StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(Attend(tcp), StatusCode::OK);
  {
    const TestServer open = Make([](Config& config) { config.socket_mode = "0666"; });
    EXPECT_EQ(Drain(open).error_code(), StatusCode::PERMISSION_DENIED);
    EXPECT_EQ(Attend(open), StatusCode::OK);
  }
  const TestServer own = Make([](Config& config) { config.socket_mode = "0700"; });
  EXPECT_TRUE(Drain(own).ok());
  EXPECT_NE(own.log().find("admin call method=\"/attend.v1.AdminService/Drain\" code=\"OK\""),
            std::string::npos);
}

TEST_F(AdminTest, ResumesAfterADrain) {
  const TestServer server = Make();
  const auto channel = server.Connect();
  EXPECT_TRUE(Drain(server).ok());
  EXPECT_TRUE(Drain(server).ok());
  EXPECT_EQ(Attend(server), StatusCode::UNAVAILABLE);
  EXPECT_EQ(test::CheckHealth(channel, ""), Health::kNotServing);
  EXPECT_TRUE(Status(server).draining());
  EXPECT_TRUE(Undrain(server).ok());
  EXPECT_EQ(Attend(server), StatusCode::OK);
  EXPECT_EQ(test::CheckHealth(channel, ""), Health::kServing);
  EXPECT_FALSE(Status(server).draining());
  // New streams stay open again.
  const auto stub = server.Stub();
  grpc::ClientContext context;
  const auto stream = stub->AttendStream(&context);
  for (int n = 0; n < 2; ++n) {
    v1::AttendResponse answer;
    ASSERT_TRUE(stream->Write(test::PlainWireProblem(2).request));
    ASSERT_TRUE(stream->Read(&answer));
    EXPECT_EQ(answer.status().code(), 0);
  }
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(AdminTest, ADrainEndsStreamsAfterTheirAnswersAndTheEndCannotBeUndone) {
  TestServer server = Make();
  const auto stub = server.Stub();
  grpc::ClientContext context;
  const auto stream = stub->AttendStream(&context);
  v1::AttendResponse answer;
  ASSERT_TRUE(stream->Write(test::PlainWireProblem(2).request));
  ASSERT_TRUE(stream->Read(&answer));
  EXPECT_TRUE(Drain(server).ok());
  EXPECT_FALSE(stream->Read(&answer));
  EXPECT_EQ(stream->Finish().error_code(), StatusCode::UNAVAILABLE);
  EXPECT_TRUE(Undrain(server).ok());
  // While a request holds up the end, which removes the socket's file.
  server.backend().Hold();
  std::thread running([&] { EXPECT_EQ(Attend(server), StatusCode::OK); });
  server.backend().WaitForWaiting(1);
  EXPECT_FALSE(Status(server).ending());
  std::thread end([&] { EXPECT_TRUE(server.server().Drain(std::chrono::minutes(1))); });
  while (!Status(server).ending()) std::this_thread::yield();
  EXPECT_TRUE(Status(server).draining());
  EXPECT_EQ(Undrain(server).error_code(), StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(Attend(server), StatusCode::UNAVAILABLE);
  server.backend().Release();
  running.join();
  end.join();
}

// In any interleaving, a call is answered or refused, and accepted calls are answered.
TEST_F(AdminTest, DrainsAndResumesBesideClientsAnswerEveryAcceptedCall) {
  const TestServer server = Make();
  std::atomic<bool> stop{false};
  std::atomic<int> answered{0}, refused{0};
  std::vector<std::thread> clients;
  for (int t = 0; t < 3; ++t) {
    clients.emplace_back([&] {
      const auto stub = server.Stub();
      const v1::AttendRequest request = test::PlainWireProblem(3).request;
      while (!stop) {
        grpc::ClientContext context;
        v1::AttendResponse response;
        const StatusCode code = stub->Attend(&context, request, &response).error_code();
        EXPECT_TRUE(code == StatusCode::OK || code == StatusCode::UNAVAILABLE) << code;
        ++(code == StatusCode::OK ? answered : refused);
      }
    });
  }
  std::vector<std::thread> operators;
  for (int t = 0; t < 2; ++t) {
    operators.emplace_back([&] {
      for (int n = 0; n < 20; ++n) {
        EXPECT_TRUE(Drain(server).ok());
        EXPECT_TRUE(Undrain(server).ok());
      }
    });
  }
  for (std::thread& each : operators) each.join();
  for (const int before = answered; answered == before;) std::this_thread::yield();
  EXPECT_TRUE(Drain(server).ok());
  for (const int before = refused; refused == before;) std::this_thread::yield();
  stop = true;
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(Status(server).inflight_requests(), 0);
  EXPECT_TRUE(Undrain(server).ok());
  EXPECT_EQ(Attend(server), StatusCode::OK);
}

TEST_F(AdminTest, SetsTheLogLevel) {
  const TestServer server = Make([](Config& config) { config.log_level = "info"; });
  v1::SetLogLevelRequest request;
  v1::SetLogLevelResponse response;
  for (const char* const level : {"debug", "warn", "error", "off", "trace", "info"}) {
    request.set_level(level);
    ASSERT_TRUE(Ask(server, &AdminService::Stub::SetLogLevel, request, response).ok()) << level;
    EXPECT_EQ(Status(server).log_level(), level);
  }
  EXPECT_EQ(response.before(), "trace");
  EXPECT_EQ(Attend(server), StatusCode::OK);
  EXPECT_EQ(server.log().find("request done"), std::string::npos);
  request.set_level("debug");
  ASSERT_TRUE(Ask(server, &AdminService::Stub::SetLogLevel, request, response).ok());
  EXPECT_EQ(Attend(server), StatusCode::OK);
  EXPECT_NE(server.log().find("request done"), std::string::npos);
  request.set_level("loud");
  const grpc::Status wrong = Ask(server, &AdminService::Stub::SetLogLevel, request, response);
  EXPECT_EQ(wrong.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_NE(wrong.error_message().find("level is \"loud\", must be trace"), std::string::npos);
}

TEST_F(AdminTest, ListsAndFreesSessionsOfAnyTenant) {
  const TestServer server = Make();
  const std::string one = MakeSession(server, "a");
  const std::string two = MakeSession(server, "b");
  v1::ListTenantSessionsRequest list;
  v1::ListTenantSessionsResponse listed;
  ASSERT_TRUE(Ask(server, &AdminService::Stub::ListSessions, list, listed).ok());
  ASSERT_EQ(listed.sessions_size(), 2);
  list.set_tenant("b");
  ASSERT_TRUE(Ask(server, &AdminService::Stub::ListSessions, list, listed).ok());
  ASSERT_EQ(listed.sessions_size(), 1);
  EXPECT_EQ(listed.sessions(0).tenant(), "b");
  EXPECT_EQ(listed.sessions(0).session().id(), two);
  list.set_tenant("unknown");
  EXPECT_EQ(Ask(server, &AdminService::Stub::ListSessions, list, listed).error_code(),
            StatusCode::INVALID_ARGUMENT);

  v1::FreeSessionsRequest free;
  v1::FreeSessionsResponse freed;
  EXPECT_EQ(Ask(server, &AdminService::Stub::FreeSessions, free, freed).error_code(),
            StatusCode::INVALID_ARGUMENT);
  free.add_sessions(one);
  free.add_sessions("none");
  ASSERT_TRUE(Ask(server, &AdminService::Stub::FreeSessions, free, freed).ok());
  EXPECT_EQ(freed.freed(), 1);
  EXPECT_EQ(freed.not_found(), 1);
  free.set_tenant("b");
  EXPECT_EQ(Ask(server, &AdminService::Stub::FreeSessions, free, freed).error_code(),
            StatusCode::INVALID_ARGUMENT);
  free.clear_sessions();
  ASSERT_TRUE(Ask(server, &AdminService::Stub::FreeSessions, free, freed).ok());
  EXPECT_EQ(freed.freed(), 1);
  v1::Session gone;
  EXPECT_EQ(test::SessionCalls(server, "b").Get(two, gone).error_code(), StatusCode::NOT_FOUND);
}

TEST_F(AdminTest, EvictsATenantsSessions) {
  const TestServer server = Make();
  MakeSession(server, "a");
  v1::EvictTenantRequest request;
  v1::EvictTenantResponse response;
  request.set_tenant("a");
  ASSERT_TRUE(Ask(server, &AdminService::Stub::EvictTenant, request, response).ok());
  // it has no tokens; session_operator_test evicts sessions with tokens
  EXPECT_EQ(response.sessions(), 0);
  request.set_tenant("");
  EXPECT_EQ(Ask(server, &AdminService::Stub::EvictTenant, request, response).error_code(),
            StatusCode::INVALID_ARGUMENT);
  const v1::GetStatusResponse status = Status(server);
  ASSERT_EQ(status.tenants_size(), 3);
  EXPECT_EQ(status.tenants(1).name(), "a");
  EXPECT_EQ(status.tenants(1).sessions(), 1);
  EXPECT_GE(status.connections(), 1);
  ASSERT_EQ(status.devices_size(), 1);
  EXPECT_TRUE(status.devices(0).healthy());
}

}  // namespace
}  // namespace attend
