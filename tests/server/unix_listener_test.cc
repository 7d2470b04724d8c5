// SPDX-License-Identifier: Apache-2.0
//
// Where a server listens for those who want shared memory: what it may make, take over and follow.

#include "server/unix_listener.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <filesystem>
#include <optional>
#include <string>

namespace attend {
namespace {

namespace fs = std::filesystem;

class UnixListenerTest : public ::testing::Test {
 protected:
  UnixListenerTest() {
    std::string pattern = fs::temp_directory_path() / "attend-listener-XXXXXX";
    folder_ = mkdtemp(pattern.data());
    path_ = folder_ / "shm.sock";
  }
  ~UnixListenerTest() override { fs::remove_all(folder_); }

  Status Start() {
    Result<UnixListener> listener = ListenAt(path_, any_user_);
    if (!listener.ok()) return listener.status();
    listener_ = std::move(*listener);
    return Status();
  }

  fs::path folder_;
  std::string path_;
  bool any_user_ = false;
  std::optional<UnixListener> listener_;
};

TEST_F(UnixListenerTest, TheFileIsTheUsersOwn) {
  path_ = folder_ / "made" / "here" / "shm.sock";
  ASSERT_TRUE(Start().ok());
  struct stat about {};
  ASSERT_EQ(lstat(path_.c_str(), &about), 0);
  EXPECT_TRUE(S_ISSOCK(about.st_mode));
  EXPECT_EQ(about.st_mode & 0777, 0600u);
  for (const fs::path& made : {folder_ / "made", folder_ / "made" / "here"}) {
    ASSERT_EQ(lstat(made.c_str(), &about), 0);
    EXPECT_EQ(about.st_mode & 0777, 0700u);
  }
  listener_.reset();
  any_user_ = true;
  ASSERT_TRUE(Start().ok());
  ASSERT_EQ(lstat(path_.c_str(), &about), 0);
  EXPECT_EQ(about.st_mode & 0777, 0666u);
}

TEST_F(UnixListenerTest, AnotherProgramsSocketIsLeftAlone) {
  const UniqueFd listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
  ASSERT_EQ(bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(listener.get(), 1), 0);
  const Status refused = Start();
  EXPECT_NE(refused.message().find("another process listens there"), std::string::npos)
      << refused.message();
}

// A server that starts, or hangs, at the same path: nobody waits for it.
TEST_F(UnixListenerTest, TheLockDecidesWhoOwnsThePath) {
  Result<UnixListener> first = ListenAt(path_, false);
  ASSERT_TRUE(first.ok()) << first.status().ToString();
  first->socket.Reset();
  const Status refused = Start();
  EXPECT_EQ(refused.code(), Code::kUnavailable);
  EXPECT_NE(refused.message().find("another server owns it"), std::string::npos);
  StopListening(path_, &*first);
  EXPECT_TRUE(fs::is_empty(folder_)) << "nothing is left";
  EXPECT_TRUE(Start().ok());
}

TEST_F(UnixListenerTest, SymbolicLinksAreNotFollowed) {
  fs::create_directory(folder_ / "real");
  ASSERT_EQ(chmod((folder_ / "real").c_str(), 0700), 0);
  fs::create_directory_symlink(folder_ / "real", folder_ / "link");
  path_ = folder_ / "link" / "shm.sock";
  Status refused = Start();
  EXPECT_NE(refused.message().find("is a symbolic link"), std::string::npos) << refused.message();
  path_ = folder_ / "real" / "shm.sock";
  const fs::path victim = folder_ / "victim";
  fs::create_symlink(victim, folder_ / "real" / "shm.sock.lock");
  refused = Start();
  EXPECT_NE(refused.message().find("shm.sock.lock"), std::string::npos) << refused.message();
  EXPECT_FALSE(fs::exists(victim));
  fs::remove(folder_ / "real" / "shm.sock.lock");
  fs::create_symlink(victim, folder_ / "real" / "shm.sock");
  refused = Start();
  EXPECT_NE(refused.message().find("no socket"), std::string::npos) << refused.message();
}

TEST_F(UnixListenerTest, FoldersThatOthersMayWriteToAreRefused) {
  const fs::path open = folder_ / "open";
  fs::create_directory(open);
  path_ = open / "shm.sock";
  ASSERT_EQ(chmod(open.c_str(), 0777), 0);
  const Status refused = Start();
  EXPECT_NE(refused.message().find("others may write"), std::string::npos) << refused.message();
  ASSERT_EQ(chmod(open.c_str(), 01777), 0);
  EXPECT_TRUE(Start().ok()) << "nobody replaces another's file in a sticky folder";
  listener_.reset();
  path_ = open / std::string(120, 'x');
  EXPECT_NE(Start().message().find("must have 1 to 107"), std::string::npos);
}

TEST(DefaultSocketPathTest, IsTheUsersOwn) {
  const std::string path = DefaultSocketPath();
  EXPECT_TRUE(path.ends_with("/shared-memory.sock")) << path;
  EXPECT_TRUE(path.starts_with("/"));
}

}  // namespace
}  // namespace attend
