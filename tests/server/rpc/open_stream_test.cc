// SPDX-License-Identifier: Apache-2.0
//
// A stream that begins while its caller's rights change.

#include "server/rpc/open_stream.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "server/auth/authenticator.h"
#include "server/rpc/stream_call.h"
#include "server/wire/request_codec.h"
#include "tests/server/support/context_fixture.h"
#include "tests/server/support/temporary_directory.h"

namespace attend {
namespace {

constexpr char kMethod[] = "/attend.v1.AttentionService/AttendStream";
const std::string kToken = "attend_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";

// A call whose client sends nothing.
class SilentCall final : public ServerCall {
 public:
  explicit SilentCall(const std::string& token) {
    metadata_.Add(kAuthorizationMetadataKey, "Bearer " + token);
  }
  const std::string& path() const override { return path_; }
  const CallMetadata& metadata() const override { return metadata_; }
  const ConnectionPeer& peer() const override { return peer_; }
  TimePoint deadline() const override { return kNever; }
  void Read() override { reads_ = true; }
  void Write(OutMessage) override { ADD_FAILURE() << "an answer"; }
  void AddHeader(std::string_view, std::string_view) override {}
  void Finish(CallEnd end) override { end_ = std::move(end); }
  void Cancel() override {}
  bool cancelled() const override { return false; }

  // The status that the stream ends with.
  Status End(CallHandler& handler) {
    if (reads_) handler.OnHalfClose();
    if (!end_) return Internal("it has not ended");
    handler.OnDone();
    return end_->status;
  }

 private:
  const std::string path_ = kMethod;
  CallMetadata metadata_;
  const ConnectionPeer peer_{.address = "unix:1"};
  bool reads_ = false;
  std::optional<CallEnd> end_;
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

  // Scopes of the only caller; empty: another caller replaces it.
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

  // How a stream ends. `between` is called after the caller has been identified, before the stream
  // is registered for rechecks.
  Status Open(const std::function<void()>& between) {
    SilentCall call(kToken);
    H2Wire wire(call);
    const auto make = [&](const Caller& caller, CountHold hold) {
      between();
      return new StreamCall(context_, FactsOfStream(context_, kMethod, caller, wire),
                            AttendFormat(), std::nullopt, std::move(wire), std::move(hold));
    };
    return call.End(*BeginStream(context_, kMethod, wire, make));
  }

  test::TemporaryDirectory directory_;
  const std::string file_ = directory_.path() / "tokens";
  std::unique_ptr<Authenticator> authenticator_;
};

TEST_F(OpenStreamTest, StaysOpenIfNothingChanges) {
  EXPECT_TRUE(Open([] {}).ok());
  EXPECT_TRUE(Open([this] { Reload(); }).ok()) << "the file is the same";
}

TEST_F(OpenStreamTest, EndsIfItsCallerIsRemovedBeforeItIsRegistered) {
  const Status status = Open([this] {
    SetScopes("");
    Reload();
  });
  EXPECT_EQ(status.code(), kUnauthenticated) << status.message();
}

TEST_F(OpenStreamTest, EndsIfItsCallerLosesTheScopeBeforeItIsRegistered) {
  const Status status = Open([this] {
    SetScopes("info");
    Reload();
  });
  EXPECT_EQ(status.code(), Code::kPermissionDenied) << status.message();
}

}  // namespace
}  // namespace attend
