// SPDX-License-Identifier: Apache-2.0

#include "server/util/service_manager.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <string>

#include "server/util/unique_fd.h"

namespace attend {
namespace {

using testing::HasSubstr;

// A service manager's socket. `name` begins with / or, for the abstract namespace, with @.
class Listener {
 public:
  explicit Listener(const std::string& name) : fd_(::socket(AF_UNIX, SOCK_DGRAM, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    name.copy(address.sun_path, name.size());
    if (name[0] == '@') address.sun_path[0] = '\0';
    const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
    EXPECT_EQ(bind(fd_.get(), reinterpret_cast<sockaddr*>(&address), bytes), 0);
  }
  std::string Take() {
    std::array<char, 256> text;
    const ssize_t bytes = recv(fd_.get(), text.data(), text.size(), MSG_DONTWAIT);
    return bytes < 0 ? "nothing" : std::string(text.data(), bytes);
  }

 private:
  UniqueFd fd_;
};

TEST(ServiceManager, IsNotifiedAtAPath) {
  const std::string path = testing::TempDir() + "/service_manager_" + std::to_string(getpid());
  {
    Listener listener(path);
    EXPECT_TRUE(TellServiceManager(path, "READY=1\nSTATUS=serving").ok());
    EXPECT_EQ(listener.Take(), "READY=1\nSTATUS=serving");
    EXPECT_EQ(listener.Take(), "nothing");
  }
  const Status gone = TellServiceManager(path, "STOPPING=1");
  EXPECT_EQ(gone.code(), Code::kUnavailable);
  EXPECT_THAT(gone.message(), HasSubstr(path));
  unlink(path.c_str());
}

TEST(ServiceManager, IsNotifiedInTheAbstractNamespace) {
  const std::string name = "@attend/service_manager/" + std::to_string(getpid());
  Listener listener(name);
  EXPECT_TRUE(TellServiceManager(name, "STOPPING=1").ok());
  EXPECT_EQ(listener.Take(), "STOPPING=1");
}

TEST(ServiceManager, MayBeAbsent) { EXPECT_TRUE(TellServiceManager("", "READY=1").ok()); }

TEST(ServiceManager, BadNamesAreReported) {
  EXPECT_THAT(TellServiceManager("relative", "READY=1").message(), HasSubstr("relative"));
  const std::string longest = "/" + std::string(sizeof(sockaddr_un::sun_path) - 2, 'x');
  EXPECT_EQ(TellServiceManager(longest, "READY=1").code(), Code::kUnavailable);
  const Status longer = TellServiceManager(longest + "x", "READY=1");
  EXPECT_EQ(longer.code(), Code::kInvalidArgument);
  EXPECT_THAT(longer.message(), HasSubstr("108 characters, must have at most 107"));
}

// A full queue must not block the sender.
TEST(ServiceManager, AFullQueueDoesNotBlock) {
  const std::string name = "@attend/service_manager/full/" + std::to_string(getpid());
  Listener listener(name);
  int sent = 0;
  Status status;
  while (sent < 1'000'000 && (status = TellServiceManager(name, "STATUS=x")).ok()) ++sent;
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_GT(sent, 0);
}

}  // namespace
}  // namespace attend
