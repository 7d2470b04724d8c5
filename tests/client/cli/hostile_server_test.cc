// SPDX-License-Identifier: Apache-2.0
//
// attend-client and the library against a malicious server: texts with terminal control sequences
// or that imitate the tool's own lines, and endless lists.

#include <gmock/gmock.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "attend/v1/admin.grpc.pb.h"
#include "attend/v1/attention.grpc.pb.h"
#include "attend/v1/session.grpc.pb.h"
#include "client/session.h"
#include "client/tool/npy.h"
#include "tests/client/support/program.h"

namespace attend::client {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// Sets a terminal's title, clears it, begins a new line, and switches to right-to-left.
const char* const kEvil = "\x1b]0;title\a\x1b[2J\r\nforged line\u202e\u009b2J";

// Above 32 bits: Protobuf's JSON writes such numbers as strings.
constexpr int64_t kMany = int64_t{1} << 40;

class Attention final : public v1::AttentionService::Service {
 public:
  grpc::Status Attend(grpc::ServerContext*, const v1::AttendRequest*,
                      v1::AttendResponse*) override {
    return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, kEvil);
  }
  grpc::Status GetServerInfo(grpc::ServerContext*, const v1::GetServerInfoRequest*,
                             v1::GetServerInfoResponse* info) override {
    info->set_version(kEvil);
    info->set_build(kEvil);
    info->set_reference_check(kEvil);
    info->add_transports(kEvil);
    info->add_tenants(kEvil);
    v1::DeviceInfo* const device = info->add_devices();
    device->set_name(kEvil);
    device->set_description(kEvil);
    device->set_memory_bytes(kMany);
    info->mutable_limits()->set_request_bytes_max(kMany);
    v1::KernelInfo* const kernel = info->add_kernels();
    kernel->set_name(kEvil);
    kernel->set_device_kind(kEvil);
    kernel->set_summary(kEvil);
    kernel->set_available(true);
    info->mutable_sessions()->set_layers_max(1);
    info->mutable_shared_memory()->set_socket(kEvil);
    info->mutable_tenant()->set_name(kEvil);
    v1::TenantLimit* const limit = info->mutable_tenant()->add_limits();
    limit->set_name(kEvil);
    limit->set_used(1);
    return grpc::Status::OK;
  }
};

class Sessions final : public v1::SessionService::Service {
 public:
  // The ids of page n, from 0 on; an empty page is the last.
  using Page = std::function<std::vector<std::string>(int64_t n)>;
  void SetPage(Page page) {
    page_ = std::move(page);
    pages_ = 0;
  }
  int64_t pages() const { return pages_; }
  // The device of each session of a page; empty: the first one has kEvil.
  void SetDevice(std::string device) { device_ = std::move(device); }

  grpc::Status CreateSession(grpc::ServerContext*, const v1::CreateSessionRequest*,
                             v1::Session*) override {
    return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, kEvil);
  }
  grpc::Status ListSessions(grpc::ServerContext*, const v1::ListSessionsRequest*,
                            v1::ListSessionsResponse* list) override {
    for (const std::string& id : page_(pages_++)) {
      v1::Session* const session = list->add_sessions();
      session->set_id(id);
      session->set_device(list->sessions_size() == 1 && device_.empty() ? kEvil : device_);
    }
    return grpc::Status::OK;
  }

 private:
  Page page_ = [](int64_t) { return std::vector<std::string>(); };
  std::atomic<int64_t> pages_ = 0;
  std::string device_;
};

class Admin final : public v1::AdminService::Service {
 public:
  grpc::Status GetStatus(grpc::ServerContext*, const v1::GetStatusRequest*,
                         v1::GetStatusResponse* status) override {
    status->set_version(kEvil);
    status->set_log_level(kEvil);
    status->set_connections(1);
    status->add_devices()->set_name(kEvil);
    status->add_tenants()->set_name(kEvil);
    return grpc::Status::OK;
  }
  grpc::Status SetLogLevel(grpc::ServerContext*, const v1::SetLogLevelRequest*,
                           v1::SetLogLevelResponse* set) override {
    set->set_before(kEvil);
    return grpc::Status::OK;
  }
  grpc::Status ListSessions(grpc::ServerContext*, const v1::ListTenantSessionsRequest*,
                            v1::ListTenantSessionsResponse* list) override {
    list->add_sessions()->set_tenant(kEvil);  // the same id on each page, forever
    list->mutable_sessions(0)->mutable_session()->set_id("same");
    list->mutable_sessions(0)->mutable_session()->set_device(kEvil);
    return grpc::Status::OK;
  }
};

class HostileServer : public ::testing::Test {
 protected:
  HostileServer() {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&attention_);
    builder.RegisterService(&sessions_);
    builder.RegisterService(&admin_);
    server_ = builder.BuildAndStart();
    address_ = "127.0.0.1:" + std::to_string(port);
    ClientOptions options;
    options.server = address_;
    client_ = std::move(*Client::Make(options));
  }

  Ended Run(std::vector<std::string> args) {
    args.insert(args.end(), {"-s", address_});
    return RunProgram(args);
  }
  // Whether a terminal shows all of it verbatim, and every line is the tool's own.
  static void ExpectHarmless(const Ended& ended, const std::string& of) {
    for (const std::string& text : {ended.out, ended.err}) {
      const auto bad = std::find_if(text.begin(), text.end(), [](char c) {
        return (static_cast<unsigned char>(c) < 0x20 && c != '\n') || c == 0x7f;
      });
      EXPECT_EQ(bad, text.end()) << of << ": " << text;
      EXPECT_THAT(text, Not(HasSubstr("\u202e"))) << of;
      EXPECT_THAT(text, Not(HasSubstr("\u009b"))) << of;
      EXPECT_THAT(text, Not(HasSubstr("\nforged"))) << of;
    }
  }

  Attention attention_;
  Sessions sessions_;
  Admin admin_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
  std::unique_ptr<Client> client_;
};

TEST_F(HostileServer, ControlSequencesInItsTextsAreEscaped) {
  ASSERT_TRUE(WriteNpy(Path("t.npy"), Random4(DType::kFloat32, {1, 1, 2, 4}, 1)).ok());
  const std::string npy = Path("t.npy");
  sessions_.SetPage([](int64_t n) { return std::vector<std::string>(n == 0 ? 1 : 0, "id"); });
  for (const std::vector<std::string>& args : std::vector<std::vector<std::string>>{
           {"info"},
           {"info", "--all"},
           {"info", "--json"},
           {"run", "--q", npy, "--k", npy, "--v", npy, "--tenant", "nosuch"},
           {"run", "--q", npy, "--k", npy, "--v", npy, "--transport", "shm"},
           {"check", "--shape", "B1,H1,L2,D4"},
           {"load", "--shape", "B1,H1,L2,D4", "--count", "1", "--warmup", "0"},
           {"session", "list"},
           {"session", "create"},
           {"admin", "status"},
           {"admin", "log-level", "info"},
           {"admin", "sessions"}}) {
    sessions_.SetPage([](int64_t n) { return std::vector<std::string>(n == 0 ? 1 : 0, "id"); });
    const Ended ended = Run(args);
    ExpectHarmless(ended, ::testing::PrintToString(args));
    EXPECT_THAT(ended.out + ended.err, HasSubstr("u001b]0;title"))
        << ::testing::PrintToString(args);
  }
  EXPECT_THAT(Run({"info"}).out, HasSubstr("attend \\u001b]0;title\\u0007\\u001b[2J\\u000d\\n"));
  EXPECT_EQ(nlohmann::json::parse(Run({"info", "--json"}).out)["build"], kEvil);
  EXPECT_THAT(Run({"admin", "status"}).out, HasSubstr("0 requests in flight, 1 connection\n"));
}

TEST_F(HostileServer, LargeNumbersOfInfoAreNumbersInJson) {
  const auto json = nlohmann::json::parse(Run({"info", "--json"}).out);
  EXPECT_EQ(json.at("devices").at(0).at("memory_bytes"), kMany);
  EXPECT_EQ(json.at("limits").at("request_bytes_max"), kMany);
}

TEST_F(HostileServer, AListThatDoesNotAdvanceIsRefused) {
  for (const auto& [name, page] : std::vector<std::pair<const char*, Sessions::Page>>{
           {"the same page for ever",
            [](int64_t) {
              return std::vector<std::string>{"a", "b"};
            }},
           {"one id twice",
            [](int64_t n) { return std::vector<std::string>(n == 0 ? 2 : 0, "a"); }},
           {"backwards", [](int64_t n) { return std::vector<std::string>{n == 0 ? "b" : "a"}; }},
           {"no id", [](int64_t) { return std::vector<std::string>{""}; }}}) {
    sessions_.SetPage(page);
    const auto list = Session::List(*client_);
    ASSERT_FALSE(list.ok()) << name;
    EXPECT_EQ(list.status().code(), Code::kInternal) << name;
    EXPECT_THAT(list.status().message(), HasSubstr("does not advance")) << name;
    EXPECT_LE(sessions_.pages(), 2) << name;
  }
  EXPECT_THAT(Run({"admin", "sessions"}).err, HasSubstr("does not advance"));
}

TEST_F(HostileServer, AnEndlessListEndsAtItsDeadlineOrBound) {
  const auto number = [](int64_t n) {
    std::string text = std::to_string(n);
    return std::string(16 - text.size(), '0') + text;
  };
  // One at a time, so that it takes long.
  sessions_.SetPage([&](int64_t n) { return std::vector<std::string>{number(n)}; });
  auto list = Session::List(*client_, "", std::chrono::milliseconds(50));
  ASSERT_FALSE(list.ok());
  EXPECT_EQ(list.status().code(), Code::kDeadlineExceeded);
  // Many at a time, without a deadline.
  constexpr int64_t kPage = 50'000;
  sessions_.SetPage([&](int64_t n) {
    std::vector<std::string> ids;
    for (int64_t i = 0; i < kPage; ++i) ids.push_back(number(n * kPage + i));
    return ids;
  });
  list = Session::List(*client_);
  ASSERT_FALSE(list.ok());
  EXPECT_THAT(list.status().message(), HasSubstr("more than 1048576 entries"));
  EXPECT_LE(sessions_.pages(), 22);
  // Few, but long ones.
  sessions_.SetDevice(std::string(size_t{16} << 20, 'x'));
  sessions_.SetPage([&](int64_t n) { return std::vector<std::string>{number(n)}; });
  list = Session::List(*client_);
  ASSERT_FALSE(list.ok());
  EXPECT_THAT(list.status().message(), HasSubstr("more than 268435456 bytes"));
  EXPECT_LE(sessions_.pages(), 16);
}

}  // namespace
}  // namespace attend::client
