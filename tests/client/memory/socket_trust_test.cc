// SPDX-License-Identifier: Apache-2.0
//
// Which process a client trusts as the server at a shared memory socket: anyone may have created
// that path.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>

#include "attend/v1/attention.pb.h"
#include "client/client.h"

namespace attend::client {
namespace {

namespace fs = std::filesystem;

constexpr uid_t kStranger = 65534;
const SharedMemory::Caller kCaller = {"attend_0123456789abcdef", "blue"};

// A process of another user that listens at a socket, and reports what it received.
class StrangersSocket {
 public:
  explicit StrangersSocket(const fs::path& under = fs::temp_directory_path()) {
    std::string pattern = under / "attend-stranger-XXXXXX";
    folder_ = mkdtemp(pattern.data());
    path_ = folder_ / "shared-memory.sock";
    EXPECT_EQ(chmod(folder_.c_str(), 0777), 0);
    int ready[2];
    EXPECT_EQ(pipe2(ready, O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(heard_, O_CLOEXEC), 0);
    child_ = fork();
    if (child_ == 0) Listen(ready[1]);
    close(ready[1]);
    close(heard_[1]);
    char byte;
    EXPECT_EQ(read(ready[0], &byte, 1), 1);
    close(ready[0]);
  }
  ~StrangersSocket() {
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
    close(heard_[0]);
    fs::remove_all(folder_);
  }
  const fs::path& path() const { return path_; }
  const fs::path& folder() const { return folder_; }
  // The size of the first packet of its first client; 0: the client left without one.
  ssize_t Heard() const {
    ssize_t bytes = -1;
    EXPECT_EQ(read(heard_[0], &bytes, sizeof(bytes)), static_cast<ssize_t>(sizeof(bytes)));
    return bytes;
  }

 private:
  [[noreturn]] void Listen(int ready) const {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path_.string().copy(address.sun_path, sizeof(address.sun_path) - 1);
    if (setuid(kStranger) != 0) _exit(1);
    const int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
        listen(listener, 1) != 0 || chmod(path_.c_str(), 0666) != 0 || write(ready, "", 1) != 1) {
      _exit(1);
    }
    const int client = accept(listener, nullptr, nullptr);
    char packet[4096];
    const ssize_t bytes = recv(client, packet, sizeof(packet), 0);
    _exit(write(heard_[1], &bytes, sizeof(bytes)) == sizeof(bytes) ? 0 : 1);
  }

  fs::path folder_, path_;
  int heard_[2] = {-1, -1};
  pid_t child_ = -1;
};

class SocketTrustTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  }
};

TEST_F(SocketTrustTest, AnUntrustedProcessReceivesNoToken) {
  const StrangersSocket stranger;
  const auto memory = SharedMemory::Connect({stranger.path()}, kCaller);
  EXPECT_EQ(memory.status().code(), Code::kPermissionDenied);
  EXPECT_THAT(memory.status().message(), ::testing::HasSubstr("a process of user 65534 listens"));
  EXPECT_EQ(stranger.Heard(), 0);
}

TEST_F(SocketTrustTest, ThePathAloneIsNotTrusted) {
  const StrangersSocket stranger;
  // A folder of root's that everyone may write to, like /tmp.
  const auto memory = SharedMemory::Connect({stranger.path(), /*named=*/true}, kCaller);
  EXPECT_EQ(memory.status().code(), Code::kPermissionDenied);
  EXPECT_EQ(stranger.Heard(), 0);
}

TEST_F(SocketTrustTest, ASocketInAWorldWritableFolderIsNotTrusted) {
  const StrangersSocket stranger;
  ASSERT_EQ(chown(stranger.folder().c_str(), kStranger, kStranger), 0);
  const auto memory = SharedMemory::Connect({stranger.path()}, kCaller);
  EXPECT_EQ(memory.status().code(), Code::kPermissionDenied);
  EXPECT_EQ(stranger.Heard(), 0);
}

TEST_F(SocketTrustTest, TheOwnerOfANamedSocketsFolderIsTrusted) {
  const StrangersSocket stranger;
  ASSERT_EQ(chown(stranger.folder().c_str(), kStranger, kStranger), 0);
  // It answers nothing, which ends the connection.
  const auto memory = SharedMemory::Connect({stranger.path(), /*named=*/true}, kCaller);
  EXPECT_EQ(memory.status().code(), Code::kUnavailable);
  EXPECT_GT(stranger.Heard(), 0);
}

TEST_F(SocketTrustTest, TheOwnerOfAFolderCreatedByRootIsTrusted) {
  const StrangersSocket stranger("/run");  // as systemd creates them for services
  ASSERT_EQ(chown(stranger.folder().c_str(), kStranger, kStranger), 0);
  const auto memory = SharedMemory::Connect({stranger.path()}, kCaller);
  EXPECT_EQ(memory.status().code(), Code::kUnavailable);
  EXPECT_GT(stranger.Heard(), 0);
}

TEST(FindSharedMemory, APathIsFollowedOnlyOnThisHost) {
  v1::GetServerInfoResponse info;
  info.mutable_shared_memory()->set_socket("/run/attend/sock");
  for (const char* here : {"127.0.0.1:1", "localhost:1", "unix:/run/attend.sock"}) {
    ClientOptions options;
    options.server = here;
    const auto client = Client::Make(options);
    ASSERT_TRUE(client.ok());
    const Result<SharedSocket> socket = (*client)->FindSharedMemory(info);
    ASSERT_TRUE(socket.ok()) << here;
    EXPECT_EQ(socket->path, "/run/attend/sock");
    EXPECT_FALSE(socket->named);
    EXPECT_EQ((*client)->FindSharedMemory({}).status().code(), Code::kFailedPrecondition);
  }
  for (const char* elsewhere : {"10.0.0.1:1", "gpu.example:1", "unix-gw.example:1"}) {
    ClientOptions options;
    options.server = elsewhere;
    const auto client = Client::Make(options);
    ASSERT_TRUE(client.ok());
    EXPECT_EQ((*client)->FindSharedMemory(info).status().code(), Code::kFailedPrecondition)
        << elsewhere;
    // A socket that the user names is taken to be local.
    const Result<SharedSocket> named = (*client)->FindSharedMemory(info, "/mounted/sock");
    ASSERT_TRUE(named.ok());
    EXPECT_EQ(named->path, "/mounted/sock");
    EXPECT_TRUE(named->named);
  }
}

}  // namespace
}  // namespace attend::client
