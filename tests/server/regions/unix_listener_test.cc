// SPDX-License-Identifier: Apache-2.0
//
// The socket on which a server offers shared memory: what it may create, take over and follow.

#include "server/regions/unix_listener.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
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
    Result<UnixListener> listener = ListenAt(Options());
    if (!listener.ok()) return listener.status();
    listener_ = std::move(*listener);
    return Status();
  }

  UnixListenOptions Options() const {
    UnixListenOptions options;
    options.path = path_;
    options.name = "socket " + path_;
    options.type = type_;
    options.mode = mode_;
    options.own_folder = own_folder_;
    return options;
  }

  fs::path folder_;
  std::string path_;
  int type_ = SOCK_SEQPACKET;
  mode_t mode_ = 0600;
  bool own_folder_ = true;
  std::optional<UnixListener> listener_;
};

TEST_F(UnixListenerTest, TheSocketIsOnlyForItsUser) {
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
  mode_ = 0666;
  ASSERT_TRUE(Start().ok());
  ASSERT_EQ(lstat(path_.c_str(), &about), 0);
  EXPECT_EQ(about.st_mode & 0777, 0666u);
}

TEST_F(UnixListenerTest, AnotherProgramsSocketIsNotReplaced) {
  const UniqueFd listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
  ASSERT_EQ(bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(listener.get(), 1), 0);
  const Status refused = Start();
  EXPECT_NE(refused.message().find("another process is listening on it"), std::string::npos)
      << refused.message();
}

// Another server may be starting, or hang, at the same path: it is not awaited.
TEST_F(UnixListenerTest, APathLockedByAnotherServerIsRefused) {
  Result<UnixListener> first = ListenAt(Options());
  ASSERT_TRUE(first.ok()) << first.status().ToString();
  first->socket.Reset();
  const Status refused = Start();
  EXPECT_EQ(refused.code(), Code::kUnavailable);
  EXPECT_NE(refused.message().find("another server is using it"), std::string::npos);
  StopListening(&*first);
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
  EXPECT_NE(refused.message().find("not a socket"), std::string::npos) << refused.message();
}

TEST_F(UnixListenerTest, FoldersWritableByOthersAreRefused) {
  const fs::path open = folder_ / "open";
  fs::create_directory(open);
  path_ = open / "shm.sock";
  ASSERT_EQ(chmod(open.c_str(), 0777), 0);
  const Status refused = Start();
  EXPECT_NE(refused.message().find("is writable by other users"), std::string::npos)
      << refused.message();
  ASSERT_EQ(chmod(open.c_str(), 01777), 0);
  EXPECT_TRUE(Start().ok()) << "a sticky folder keeps other users from replacing it";
  listener_.reset();
  path_ = open / std::string(120, 'x');
  EXPECT_NE(Start().message().find("must have 1 to 107"), std::string::npos);
}

// As for gRPC's sockets: the folder may be anyone's but must exist; mode and group can be set.
TEST_F(UnixListenerTest, OrdinarySocketsMayBeInAnyExistingFolder) {
  type_ = SOCK_STREAM;
  own_folder_ = false;
  mode_ = 0660;
  path_ = folder_ / "missing" / "a.sock";
  EXPECT_EQ(Start().message(), "socket " + path_ + ": " + (folder_ / "missing").string() +
                                   ": No such file or directory");
  fs::create_directory(folder_ / "open");
  ASSERT_EQ(chmod((folder_ / "open").c_str(), 0777), 0);
  fs::create_directory_symlink(folder_ / "open", folder_ / "link");
  path_ = folder_ / "link" / "a.sock";
  ASSERT_TRUE(Start().ok());
  struct stat about {};
  ASSERT_EQ(lstat(path_.c_str(), &about), 0);
  EXPECT_EQ(about.st_mode & 0777, 0660u);
  EXPECT_TRUE(fs::exists(path_ + ".lock"));
}

// A new server starts, then the old one stops: it must not remove a socket that is no longer its
// own.
TEST_F(UnixListenerTest, OnlyItsOwnSocketIsRemoved) {
  ASSERT_TRUE(Start().ok());
  fs::remove(path_);
  fs::remove(path_ + ".lock");
  Result<UnixListener> other = ListenAt(Options());
  ASSERT_TRUE(other.ok()) << other.status().message();
  StopListening(&*listener_);
  EXPECT_TRUE(fs::exists(path_)) << "it is another's by now";
  EXPECT_TRUE(fs::exists(path_ + ".lock"));
  StopListening(&*other);
  EXPECT_FALSE(fs::exists(path_));
}

TEST_F(UnixListenerTest, AStaleSocketIsReplacedAndAFileIsKept) {
  ASSERT_TRUE(Start().ok());
  listener_.reset();  // like a process that died: the files stay
  ASSERT_TRUE(fs::exists(path_));
  ASSERT_TRUE(Start().ok());
  StopListening(&*listener_);
  EXPECT_TRUE(fs::is_empty(folder_));
  { std::ofstream(path_) << "precious"; }
  EXPECT_NE(Start().message().find("not a socket"), std::string::npos);
  EXPECT_EQ(fs::file_size(path_), 8u);
  EXPECT_FALSE(fs::exists(path_ + ".lock"));
}

TEST(DefaultSocketPathTest, IsTheUsersOwn) {
  const char* const variable = "XDG_RUNTIME_DIR";
  const char* const before = std::getenv(variable);
  const std::optional<std::string> restored =
      before == nullptr ? std::nullopt : std::optional<std::string>(before);
  const std::string own = "/tmp/attend-" + std::to_string(geteuid()) + "/shared-memory.sock";
  setenv(variable, "/run/user/7", 1);
  EXPECT_EQ(DefaultSocketPath(), "/run/user/7/attend/shared-memory.sock");
  setenv(variable, "run/user/7", 1);  // not absolute, which the XDG specification rules out
  EXPECT_EQ(DefaultSocketPath(), own);
  setenv(variable, "", 1);
  EXPECT_EQ(DefaultSocketPath(), own);
  unsetenv(variable);
  EXPECT_EQ(DefaultSocketPath(), own);
  if (restored) setenv(variable, restored->c_str(), 1);
}

}  // namespace
}  // namespace attend
