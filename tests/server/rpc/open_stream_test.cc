// SPDX-License-Identifier: Apache-2.0
//
// A stream that begins while its caller's rights change.

#include "server/rpc/open_stream.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "attend/v1/attention.pb.h"
#include "server/auth/authenticator.h"
#include "server/rpc/chunked_stream.h"
#include "server/rpc/stream_call.h"
#include "server/util/thresholds.h"
#include "tests/server/support/context_fixture.h"
#include "tests/server/support/silent_call.h"
#include "tests/server/support/temporary_directory.h"

namespace attend {
namespace {

constexpr char kMethod[] = "/attend.v1.AttentionService/AttendStream";
const std::string kToken = "attend_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";

class OpenStreamTest : public test::ContextTest {
 protected:
  OpenStreamTest() {
    SetScopes("compute,info");
    Authenticator::Options options;
    options.file = file_;
    options.now = [this] {
      if (while_checked_) while_checked_();
      return WallTime();
    };
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
    test::SilentCall call(kMethod, kToken, {.address = "unix:test", .local = true});
    WireCall wire(call);
    const auto make = [&](const Caller& caller, CountHold hold) {
      between();
      return StreamCall::Own(std::make_shared<StreamCall>(
          context_, FactsOfStream(context_, kMethod, caller, wire), AttendFormat(), std::nullopt,
          std::move(wire), std::move(hold)));
    };
    return call.End(*BeginStream(context_, kMethod, wire, make));
  }

  test::TemporaryDirectory directory_;
  const std::string file_ = directory_.path() / "tokens";
  std::unique_ptr<Authenticator> authenticator_;
  std::function<void()> while_checked_;
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

struct OtherStream : TransferStream {
  void Advance() override {}
};

// The check reads the call's metadata, which end with the call.
TEST_F(OpenStreamTest, AJoiningStreamDoesNotEndWhileItsCallerIsChecked) {
  test::SilentCall first("", "");
  const WireCall first_wire(first);
  const auto transfer = std::make_shared<ChunkedTransfer>(
      context_, CallFacts{.method = kMethod}, first_wire, kNever, std::make_shared<OtherStream>());
  v1::AttendChunkedRequest join;
  join.set_token(*chunked_.Add(transfer));
  // Too long to be read on the transport's loop, which could not end the call meanwhile.
  join.GetReflection()->MutableUnknownFields(&join)->AddLengthDelimited(
      2000, std::string(thresholds::kOwnThreadBytesMax, ' '));
  const std::string bytes = join.SerializeAsString();

  CallTable table(context_);
  ChunkedStream::Add(table);
  test::SilentCall call("/attend.v1.AttentionService/AttendChunked", kToken,
                        {.address = "unix:test", .local = true});
  CallHandler* const handler = table.Begin(call);
  enum { kNotYet, kDuring, kAfter };
  std::atomic<int> check{kNotYet};
  bool ended = false;
  while_checked_ = [&] {
    check.store(kDuring);
    check.notify_all();
    for (int n = 0; n < 50 && !call.ended(); ++n) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ended = call.ended();
    check.store(kAfter);
    check.notify_all();
  };
  handler->OnMessage({{}, {{bytes, nullptr}}});
  check.wait(kNotYet);
  transfer->Fail(Internal("planted fault"));
  transfer->Placed(0);  // its header, which no thread admits here
  EXPECT_EQ(call.AwaitEnd(*handler).code(), Code::kInternal);
  check.wait(kDuring);
  EXPECT_FALSE(ended);
}

}  // namespace
}  // namespace attend
