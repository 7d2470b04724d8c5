// SPDX-License-Identifier: Apache-2.0
//
// Calls of the C interface with broken shared memory: its socket does not answer, or the server
// does not know the regions that were handed out.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "attend/v1/shared_memory.pb.h"
#include "tests/client/c/c_calls.h"
#include "tests/client/support/fake_server.h"

namespace attend::client::c::test {
namespace {

// The socket of a server's shared memory.
class RegionSocket {
 public:
  enum class Answers { kNone, kRegions };
  explicit RegionSocket(Answers answers) : answers_(answers) {
    std::string pattern = fs::temp_directory_path() / "attend-region-socket-XXXXXX";
    folder_ = mkdtemp(pattern.data());
    listener_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path().copy(address.sun_path, sizeof(address.sun_path) - 1);
    EXPECT_EQ(bind(listener_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(listener_, 8), 0);
    thread_ = std::thread([this] { Accept(); });
  }
  ~RegionSocket() {
    shutdown(listener_, SHUT_RDWR);
    thread_.join();
    for (std::thread& peer : peers_) peer.join();
    close(listener_);
    fs::remove_all(folder_);
  }
  std::string path() const { return folder_ + "/shm.sock"; }
  int connections() const { return connections_; }

 private:
  void Accept() {
    for (int peer; (peer = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC)) >= 0;) {
      ++connections_;
      peers_.emplace_back([this, peer] {
        Serve(peer);
        close(peer);
      });
    }
  }
  void Serve(int peer) const {
    char packet[4096];
    for (ssize_t bytes; (bytes = recv(peer, packet, sizeof(packet), 0)) > 0;) {
      v1::RegionRequest request;
      ASSERT_TRUE(request.ParseFromArray(packet, static_cast<int>(bytes)));
      if (answers_ == Answers::kNone) continue;
      if (request.has_create()) {
        SendRegion(peer, request.create().bytes());
      } else {
        v1::RegionReply reply;
        reply.mutable_released();
        const std::string text = reply.SerializeAsString();
        (void)send(peer, text.data(), text.size(), MSG_NOSIGNAL);  // or the client has gone
      }
    }
  }
  static void SendRegion(int peer, uint64_t size) {
    const int memory = memfd_create("region", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    ASSERT_EQ(ftruncate(memory, static_cast<off_t>(size)), 0);
    ASSERT_EQ(fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    v1::RegionReply reply;
    reply.mutable_created()->set_token("unknown");
    reply.mutable_created()->set_bytes(size);
    std::string text = reply.SerializeAsString();
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    iovec data{text.data(), text.size()};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* const rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &memory, sizeof(memory));
    ASSERT_GT(sendmsg(peer, &message, MSG_NOSIGNAL), 0);
    close(memory);
  }

  const Answers answers_;
  std::string folder_;
  int listener_ = -1;
  std::atomic<int> connections_ = 0;
  std::vector<std::thread> peers_;
  std::thread thread_;
};

attend_client* OpenTo(const FakeServer& server) {
  attend_client_options options = {};
  options.struct_bytes = sizeof(options);
  options.server = server.address().c_str();
  options.attempts_max = 1;
  attend_client* client = nullptr;
  EXPECT_EQ(attend_client_open(&options, &client), ATTEND_CLIENT_OK) << attend_client_last_error();
  return client;
}

// Large enough for shared memory.
Case Large() { return Case(4, 96, 64); }

TEST(RegionSocket, ASilentSocketDelaysOnlyOneCall) {
  RegionSocket socket(RegionSocket::Answers::kNone);
  FakeServer server;
  server.SetSharedMemory(socket.path());
  attend_client* const client = OpenTo(server);
  Case c = Large();
  for (int n = 0; n < 4; ++n) {
    const attend_client_answer answer = Call(Start(client, c.params)).Answer();
    EXPECT_EQ(answer.code, ATTEND_CLIENT_OK) << answer.message;
  }
  EXPECT_EQ(socket.connections(), 1);
  EXPECT_EQ(server.infos(), 1);
  attend_client_close(client);
}

TEST(RegionSocket, ACancelReachesTheSecondAttempt) {
  RegionSocket socket(RegionSocket::Answers::kRegions);
  FakeServer server;
  server.SetSharedMemory(socket.path());
  std::atomic<int> seconds = 0;
  server.SetBefore([&](int64_t number, grpc::ServerContext* context) {
    if (number % 2 == 0) return grpc::Status(grpc::StatusCode::NOT_FOUND, "no such region");
    ++seconds;
    return server.UntilCancelled(context);
  });
  Case c = Large();
  for (int n = 0; n < 20; ++n) {
    attend_client* const client = OpenTo(server);  // sent in the regions
    Call call(Start(client, c.params));
    while (seconds == n) std::this_thread::yield();
    attend_client_cancel(call.get());
    EXPECT_EQ(call.Answer().code, ATTEND_CLIENT_CANCELLED);
    attend_client_close(client);
  }
}

}  // namespace
}  // namespace attend::client::c::test
