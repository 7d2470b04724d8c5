// SPDX-License-Identifier: Apache-2.0
//
// The socket for shared memory: packets, connections that come and go, and the socket file.

#include "server/regions/region_socket.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <cstring>
#include <filesystem>
#include <future>

#include "server/regions/unix_listener.h"
#include "tests/server/support/fake_backend.h"
#include "tests/server/support/region_client.h"
#include "tests/server/support/region_socket_fixture.h"

namespace attend {
namespace {

namespace fs = std::filesystem;
using test::RegionClient;
using RegionSocketTest = test::RegionSocketFixture;

TEST_F(RegionSocketTest, ARefusalLeavesTheConnectionUsable) {
  ASSERT_TRUE(Start().ok());
  RegionClient client(options_.path), other(options_.path);
  const v1::RegionReply large = client.TryCreate((1 << 19) + 1);
  EXPECT_EQ(large.error().code(), static_cast<int>(Code::kInvalidArgument));
  EXPECT_NE(large.error().message().find("shared-memory-client-max"), std::string::npos);
  EXPECT_EQ(client.TryCreate(0).error().code(), static_cast<int>(Code::kInvalidArgument));
  EXPECT_EQ(client.TryCreate(UINT64_MAX).error().code(), static_cast<int>(Code::kInvalidArgument));
  const auto region = client.Create(1 << 19);
  EXPECT_EQ(client.TryCreate(1).error().code(), static_cast<int>(Code::kResourceExhausted));
  EXPECT_EQ(other.Release(region->token()).error().code(), static_cast<int>(Code::kNotFound));
  ASSERT_TRUE(client.Send(std::string("\x1a\x00", 2)));  // a request of later versions
  const auto unknown = client.Receive();
  ASSERT_TRUE(unknown.has_value());
  EXPECT_EQ(unknown->error().code(), static_cast<int>(Code::kUnimplemented));
  EXPECT_NE(registry_.Find(region->token(), 0), nullptr);
}

TEST_F(RegionSocketTest, ABadPacketDoesNotHarmOtherClients) {
  ASSERT_TRUE(Start().ok());
  RegionClient good(options_.path);
  const auto region = good.Create(4096);
  for (const std::string& packet : {std::string("\xff\xff\xff"), std::string(5000, 'x'),
                                    std::string("\x0a\x7f"), std::string(4096, '\0')}) {
    RegionClient bad(options_.path);
    ASSERT_TRUE(bad.Send(packet));
    const auto reply = bad.Receive();
    ASSERT_TRUE(reply.has_value());
    EXPECT_EQ(reply->error().code(), static_cast<int>(Code::kInvalidArgument));
    EXPECT_FALSE(bad.Receive().has_value()) << "what cannot be read ends the connection";
  }
  {
    // The replies are not read: once they fill the socket, the connection ends.
    RegionClient deaf(options_.path);
    v1::RegionRequest request;
    request.mutable_release()->set_token("none");
    const std::string packet = request.SerializeAsString();
    while (deaf.Send(packet)) {
    }
  }
  WaitForClients(1);
  EXPECT_NE(registry_.Find(region->token(), 0), nullptr);
  good.Create(4096);
}

int OpenFiles() {
  int count = 0;
  for ([[maybe_unused]] const auto& each : fs::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

// Clients never send descriptors; any that arrive must not fill the server's table.
TEST_F(RegionSocketTest, DescriptorsFromClientsAreRefusedAndClosed) {
  ASSERT_TRUE(Start().ok());
  v1::RegionRequest request;
  request.mutable_create()->set_bytes(4096);
  for (const int files : {1, 2, 200}) {
    RegionClient client(options_.path);
    const auto region = client.Create(4096);
    const int before = OpenFiles();
    ASSERT_TRUE(client.SendWithFiles(request.SerializeAsString(), files));
    const auto reply = client.Receive();
    ASSERT_TRUE(reply.has_value());
    EXPECT_EQ(reply->error().code(), static_cast<int>(Code::kInvalidArgument));
    EXPECT_NE(reply->error().message().find("descriptors"), std::string::npos);
    EXPECT_FALSE(client.Receive().has_value()) << "the connection is over";
    WaitForClients(0);
    EXPECT_LE(OpenFiles(), before);
  }
}

TEST_F(RegionSocketTest, AnotherUsersProcessIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  ASSERT_TRUE(Start().ok());
  // The file modes alone would keep other users out.
  ASSERT_EQ(chmod(folder_.c_str(), 0755), 0);
  ASSERT_EQ(chmod(options_.path.c_str(), 0666), 0);
  int heard[2];
  ASSERT_EQ(pipe2(heard, O_CLOEXEC), 0);
  const pid_t child = fork();
  if (child == 0) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, options_.path.data(), options_.path.size());
    if (setuid(65534) != 0) _exit(1);
    const int socket = ::socket(AF_UNIX, SOCK_SEQPACKET, 0);
    connect(socket, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
    char reply[256];
    const ssize_t bytes = recv(socket, reply, sizeof(reply), 0);
    if (bytes > 0) (void)!write(heard[1], reply, static_cast<size_t>(bytes));
    _exit(0);
  }
  close(heard[1]);
  char bytes[256];
  const ssize_t count = read(heard[0], bytes, sizeof(bytes));
  waitpid(child, nullptr, 0);
  close(heard[0]);
  v1::RegionReply reply;
  ASSERT_GT(count, 0);
  ASSERT_TRUE(reply.ParseFromArray(bytes, static_cast<int>(count)));
  EXPECT_EQ(reply.error().code(), static_cast<int>(Code::kPermissionDenied));
  EXPECT_NE(reply.error().message().find("65534"), std::string::npos);
  EXPECT_EQ(registry_.stats().clients, 0);
}

// One user cannot take all places when any user may connect.
TEST_F(RegionSocketTest, ConnectionsPerUserAreBounded) {
  options_.connections_max = 8;
  options_.any_user = true;
  ASSERT_TRUE(Start().ok());
  RegionClient first(options_.path);
  RegionClient second(options_.path);
  first.Create(1);
  second.Create(1);
  RegionClient third(options_.path);
  const auto refused = third.Receive();
  ASSERT_TRUE(refused.has_value());
  EXPECT_NE(refused->error().message().find("has 2 connections, the limit for one user"),
            std::string::npos)
      << refused->error().message();
}

TEST_F(RegionSocketTest, StoppingEndsConnectionsAndRemovesTheSocket) {
  ASSERT_TRUE(Start().ok());
  RegionClient client(options_.path);
  const auto region = client.Create(4096);
  RegionRef used = registry_.Find(region->token(), 0);
  socket_->Stop();
  EXPECT_FALSE(client.Receive().has_value());
  EXPECT_FALSE(fs::exists(options_.path));
  EXPECT_FALSE(RegionClient(options_.path).connected());
  EXPECT_EQ(registry_.Find(region->token(), 0), nullptr);
  used->data[0] = 'z';
  EXPECT_EQ(region->data()[0], 'z') << "what is in use stays";
  used.reset();
  WaitUntilEmpty();
  EXPECT_EQ(region->data()[0], 'z') << "an answer there may not have been read";
  socket_->Stop();  // a second call does nothing
}

// Memory whose allocation and release wait for the test.
class SlowMemory final : public RegionMemory {
 public:
  enum class When { kComes, kGoes };
  explicit SlowMemory(RegionMemory& memory, When when = When::kComes)
      : memory_(memory), when_(when) {}
  Result<RegionMapping> Map(int64_t bytes) override {
    if (when_ == When::kComes) Wait();
    return memory_.Map(bytes);
  }
  void Unlock(void* data, int64_t bytes) override {
    if (when_ == When::kGoes && !passed_) Wait();
    memory_.Unlock(data, bytes);
  }
  void Unmap(void* data, int64_t bytes, Pages pages) override { memory_.Unmap(data, bytes, pages); }
  int64_t page_bytes() const override { return memory_.page_bytes(); }
  void WaitUntilAsked() { asked_.get_future().wait(); }
  void Release() { release_.set_value(); }

 private:
  void Wait() {
    passed_ = true;
    asked_.set_value();
    released_.wait();
  }

  RegionMemory& memory_;
  const When when_;
  bool passed_ = false;
  std::promise<void> asked_, release_;
  std::future<void> released_ = release_.get_future();
};

TEST_F(RegionSocketTest, AClientThatWaitsForMemoryDoesNotDelayOthers) {
  RegionLimits limits{{1}, 16 << 12, 16 << 12, 4};
  limits.return_wait = std::chrono::hours(1);
  SlowMemory slow(memory_, SlowMemory::When::kGoes);
  RegionRegistry registry(limits, slow, clock_, RandomToken);
  Result<std::unique_ptr<RegionSocket>> socket =
      RegionSocket::Start(options_, registry, logger_, clock_);
  ASSERT_TRUE(socket.ok());
  RegionClient waiting(options_.path), other(options_.path);
  const auto ask = [&](uint64_t bytes) {
    v1::RegionRequest request;
    request.mutable_create()->set_bytes(bytes);
    ASSERT_TRUE(waiting.Send(request.SerializeAsString()));
  };
  ASSERT_TRUE(waiting.Release(waiting.Create(12 << 12)->token()).has_released());
  slow.WaitUntilAsked();
  ask(12 << 12);
  ask(1);  // its later packets wait too
  EXPECT_NE(other.Create(1), nullptr);
  slow.Release();
  for (int n = 0; n < 2; ++n) {
    const auto reply = waiting.Receive();
    ASSERT_TRUE(reply.has_value() && reply->has_created()) << reply->error().message();
  }
  EXPECT_EQ(registry.stats().refused, 0);
}

TEST_F(RegionSocketTest, StoppingWaitsForARegionOnlyUntilTheLimit) {
  SlowMemory slow(memory_);
  RegionRegistry registry({{1}, 1 << 20, 1 << 19, 4}, slow, clock_, RandomToken);
  Result<std::unique_ptr<RegionSocket>> socket =
      RegionSocket::Start(options_, registry, logger_, clock_);
  ASSERT_TRUE(socket.ok());
  RegionClient client(options_.path);
  v1::RegionRequest request;
  request.mutable_create()->set_bytes(4096);
  ASSERT_TRUE(client.Send(request.SerializeAsString()));
  slow.WaitUntilAsked();
  EXPECT_FALSE((*socket)->Stop(std::chrono::steady_clock::now())) << "it is still being made";
  slow.Release();
  EXPECT_TRUE((*socket)->Stop());
  EXPECT_FALSE(fs::exists(options_.path));
  EXPECT_EQ(registry.stats().regions, 0);
  EXPECT_TRUE((*socket)->Stop()) << "once more does nothing";
}

}  // namespace
}  // namespace attend
