// SPDX-License-Identifier: Apache-2.0
//
// A stream that begins while what callers may do changes.

#include "server/rpc/open_stream.h"
#include "server/rpc/grpc_data.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "attend/v1/attention.grpc.pb.h"
#include "server/auth/authenticator.h"
#include "server/rpc/stream_call.h"
#include "server/wire/request_codec.h"
#include "tests/server/support/context_fixture.h"
#include "tests/server/support/temporary_directory.h"

namespace attend {
namespace {

constexpr char kMethod[] = "/attend.v1.AttentionService/AttendStream";
const std::string kToken = "attend_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";

// Streams as AttentionServiceImpl's. `between` is called once the caller is known, and before the
// stream is among those that are asked again.
class Streams final : public v1::AttentionService::WithRawCallbackMethod_AttendStream<
                          v1::AttentionService::Service> {
 public:
  Streams(ServiceContext& context, std::function<void()> between)
      : context_(context), between_(std::move(between)) {}
  RawStream* AttendStream(grpc::CallbackServerContext* call) override {
    auto* const wire = new GrpcStream(*call);
    const auto make = [&](const Caller& caller, CountHold hold) {
      between_();
      auto* const stream =
          new StreamCall(context_, FactsOfStream(context_, kMethod, caller, wire->call()),
                         AttendFormat(), std::nullopt, *wire, std::move(hold));
      wire->Give(*stream);
      return stream;
    };
    const Status status = BeginStream(context_, kMethod, wire->call(), make);
    if (!status.ok()) wire->End(ToGrpc(status));
    return wire;
  }

 private:
  ServiceContext& context_;
  const std::function<void()> between_;
};

class OpenStreamTest : public test::ContextTest {
 protected:
  OpenStreamTest() {
    SetScopes("compute,info");
    Authenticator::Options options;
    options.file = file_;
    options.now = [] { return WallTime(); };
    authenticator_ = *Authenticator::Load(options);
    context_.authenticator = authenticator_.get();
  }

  // Of the only caller; empty: there is another instead.
  void SetScopes(const std::string& scopes) {
    const TokenDigest digest = DigestOf(scopes.empty() ? kToken + "B" : kToken);
    const std::string_view bytes(reinterpret_cast<const char*>(digest.data()), digest.size());
    std::ofstream(file_ + ".new") << "name=me sha256=" << HexText(bytes)
                                  << " scopes=" << (scopes.empty() ? "compute" : scopes) << "\n";
    std::filesystem::rename(file_ + ".new", file_);
  }
  // As the server does when the file has changed.
  void Reload() {
    authenticator_->Reload();
    context_.streams.RecheckAll();
  }

  // How a stream ends whose client has nothing to say.
  grpc::Status Open(const std::function<void()>& between) {
    Streams service(context_, between);
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service);
    const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
    const auto stub = v1::AttentionService::NewStub(grpc::CreateChannel(
        "127.0.0.1:" + std::to_string(port), grpc::InsecureChannelCredentials()));
    grpc::ClientContext call;
    call.AddMetadata(kAuthorizationMetadataKey, "Bearer " + kToken);
    const auto stream = stub->AttendStream(&call);
    stream->WritesDone();
    v1::AttendResponse response;
    EXPECT_FALSE(stream->Read(&response));
    const grpc::Status status = stream->Finish();
    server->Shutdown();
    server->Wait();
    return status;
  }

  test::TemporaryDirectory directory_;
  const std::string file_ = directory_.path() / "tokens";
  std::unique_ptr<Authenticator> authenticator_;
};

TEST_F(OpenStreamTest, StaysIfNothingChanges) {
  EXPECT_TRUE(Open([] {}).ok());
  EXPECT_TRUE(Open([this] { Reload(); }).ok()) << "the file is the same";
}

TEST_F(OpenStreamTest, EndsIfItsCallerIsUnknownBeforeItIsAmongThoseThatAreAskedAgain) {
  const grpc::Status status = Open([this] {
    SetScopes("");
    Reload();
  });
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << status.error_message();
}

TEST_F(OpenStreamTest, EndsIfItsCallerLosesTheScopeMeanwhile) {
  const grpc::Status status = Open([this] {
    SetScopes("info");
    Reload();
  });
  EXPECT_EQ(status.error_code(), grpc::StatusCode::PERMISSION_DENIED) << status.error_message();
}

}  // namespace
}  // namespace attend
