// SPDX-License-Identifier: Apache-2.0
//
// The client's end of the regions' socket against a scripted server: answers that come late, never,
// without a descriptor, or with too many.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "attend/v1/shared_memory.pb.h"
#include "client/memory/shared_memory.h"

namespace attend::client {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kBytes = 8192;
constexpr int kServersSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

class FakeDeviceMemory final : public DeviceMemory {
 public:
  explicit FakeDeviceMemory(int& freed) : freed_(freed) {}
  ~FakeDeviceMemory() override { ++freed_; }
  std::byte* data() const override { return nullptr; }
  int64_t bytes() const override { return kBytes; }
  Status Write(int64_t, const void*, int64_t) override { return Status(); }
  Status Read(int64_t, void*, int64_t) override { return Status(); }
  Status Describe(v1::ImportCudaMemory* lent) const override {
    lent->set_bytes(kBytes);
    return Status();
  }

 private:
  int& freed_;
};

class SharedSocketTest : public ::testing::Test {
 protected:
  explicit SharedSocketTest(std::chrono::milliseconds wait = std::chrono::minutes(1)) {
    std::string pattern = fs::temp_directory_path() / "attend-peer-XXXXXX";
    folder_ = mkdtemp(pattern.data());
    const std::string path = folder_ / "peer.sock";
    const int listener = Listen(path);
    memory_ = *SharedMemory::Connect({path}, {}, wait);
    peer_ = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    close(listener);
  }
  ~SharedSocketTest() override {
    ClosePeer();
    fs::remove_all(folder_);
  }
  static int Listen(const std::string& path) {
    const int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    EXPECT_EQ(bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(listener, 1), 0);
    return listener;
  }
  void ClosePeer() {
    if (peer_ >= 0) close(peer_);
    peer_ = -1;
  }

  v1::RegionRequest Receive() {
    char packet[4096];
    const ssize_t bytes = recv(peer_, packet, sizeof(packet), 0);
    EXPECT_GT(bytes, 0);
    v1::RegionRequest request;
    EXPECT_TRUE(request.ParseFromArray(packet, static_cast<int>(std::max<ssize_t>(0, bytes))));
    return request;
  }
  static int Memory(int64_t bytes, int seals) {
    const int memory = memfd_create("peer", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    EXPECT_EQ(ftruncate(memory, bytes), 0);
    EXPECT_EQ(fcntl(memory, F_ADD_SEALS, seals), 0);
    return memory;
  }
  void Send(const v1::RegionReply& reply, int files) {
    SendWith(reply, files, Memory(kBytes, kServersSeals));
  }
  // Closes `memory`.
  void SendWith(const v1::RegionReply& reply, int files, int memory) {
    std::string bytes = reply.SerializeAsString();
    const std::vector<int> fds(static_cast<size_t>(files), memory);
    std::vector<char> control(CMSG_SPACE(fds.size() * sizeof(int)));
    iovec data{bytes.data(), bytes.size()};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    if (files > 0) {
      message.msg_control = control.data();
      message.msg_controllen = control.size();
      cmsghdr* const rights = CMSG_FIRSTHDR(&message);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
      std::memcpy(CMSG_DATA(rights), fds.data(), fds.size() * sizeof(int));
    }
    EXPECT_GT(sendmsg(peer_, &message, 0), 0);
    close(memory);
  }
  static v1::RegionReply Created(const std::string& token) {
    v1::RegionReply reply;
    reply.mutable_created()->set_token(token);
    reply.mutable_created()->set_bytes(kBytes);
    return reply;
  }
  static v1::RegionReply Released() {
    v1::RegionReply reply;
    reply.mutable_released();
    return reply;
  }
  // The reply that ends a connection whose token is no longer valid.
  static v1::RegionReply Ended() {
    v1::RegionReply reply;
    reply.mutable_error()->set_code(static_cast<int32_t>(Code::kPermissionDenied));
    return reply;
  }
  using Region = Result<std::shared_ptr<SharedRegion>>;
  std::future<Region> Create() {
    return std::async(std::launch::async, [this] { return memory_->Create(kBytes); });
  }
  Region CreateWith(const v1::RegionReply& reply, int files) {
    std::future<Region> created = Create();
    EXPECT_TRUE(Receive().has_create());
    Send(reply, files);
    return created.get();
  }
  Region Lend(const std::string& token) {
    std::future<Region> lent = std::async(std::launch::async, [this] {
      return memory_->Lend(std::make_shared<FakeDeviceMemory>(freed_));
    });
    EXPECT_TRUE(Receive().has_import_cuda());
    v1::RegionReply reply;
    reply.mutable_imported()->set_token(token);
    Send(reply, 0);
    return lent.get();
  }
  static int OpenFiles() {
    int count = 0;
    for ([[maybe_unused]] const auto& each : fs::directory_iterator("/proc/self/fd")) ++count;
    return count;
  }

  fs::path folder_;
  std::shared_ptr<SharedMemory> memory_;
  int freed_ = 0;
  int peer_ = -1;
};

// The last reference may be dropped on a thread that must not block and holds its own locks.
TEST_F(SharedSocketTest, DroppingARegionDoesNotWaitForTheServer) {
  std::vector<Region> regions;
  for (const std::string token : {"first", "second"}) {
    regions.push_back(CreateWith(Created(token), 1));
    ASSERT_TRUE(regions.back().ok()) << regions.back().status().ToString();
  }
  std::future<void> dropped = std::async(std::launch::async, [&regions] {
    for (Region& region : regions) region = Internal("gone");
  });
  const bool waited = dropped.wait_for(std::chrono::minutes(1)) != std::future_status::ready;
  EXPECT_FALSE(waited);
  if (waited) ClosePeer();  // or the test would wait too
  dropped.wait();
  ASSERT_FALSE(waited);
  // The answers come later, but before the next request's.
  std::future<Region> created = Create();
  for (const std::string token : {"first", "second"}) {
    EXPECT_EQ(Receive().release().token(), token);
    Send(Released(), 0);
  }
  EXPECT_TRUE(Receive().has_create());
  Send(Created("third"), 1);
  const Region third = created.get();
  ASSERT_TRUE(third.ok()) << third.status().ToString();
  EXPECT_EQ((*third)->token(), "third");
}

// A server ends a connection whose answers are not read, so they must not pile up.
TEST_F(SharedSocketTest, AnswersAreReadWhileRequestsAreSent) {
  constexpr int kRegions = 500;
  std::vector<std::shared_ptr<SharedRegion>> regions;
  for (int i = 0; i < kRegions; ++i) {
    Region region = CreateWith(Created("token " + std::to_string(i)), 1);
    ASSERT_TRUE(region.ok());
    regions.push_back(std::move(*region));
  }
  std::future<int> answered = std::async(std::launch::async, [this] {
    int refused = 0;
    for (int i = 0; i < kRegions; ++i) {
      Receive();
      const std::string reply = Released().SerializeAsString();
      if (send(peer_, reply.data(), reply.size(), MSG_DONTWAIT) < 0) ++refused;
    }
    return refused;
  });
  regions.clear();
  EXPECT_EQ(answered.get(), 0) << "as the server would have ended it";
  EXPECT_TRUE(CreateWith(Created("last"), 1).ok());
}

// The server still has it open, until it answers otherwise or the connection ends.
TEST_F(SharedSocketTest, AnErrorThatEndsTheConnectionDoesNotConfirmARelease) {
  Region first = Lend("first"), second = Lend("second"), third = Lend("third");
  ASSERT_TRUE(first.ok() && second.ok() && third.ok());
  first = Internal("gone");
  EXPECT_EQ(Receive().release().token(), "first");
  Send(Ended(), 0);
  second = Internal("gone");  // reads what has arrived
  EXPECT_EQ(freed_, 0);
  std::future<Status> released =
      std::async(std::launch::async, [&] { return memory_->Release(**third); });
  for (const std::string token : {"second", "third"}) EXPECT_EQ(Receive().release().token(), token);
  ClosePeer();
  EXPECT_EQ(released.get().code(), Code::kUnavailable);
  EXPECT_EQ(freed_, 2);
}

TEST_F(SharedSocketTest, UnreleasedMemoryIsKeptAsLongAsTheServerMayHaveIt) {
  Region lent = Lend("lent");
  ASSERT_TRUE(lent.ok());
  std::future<Status> released =
      std::async(std::launch::async, [&] { return memory_->Release(**lent); });
  EXPECT_EQ(Receive().release().token(), "lent");
  Send(Ended(), 0);
  EXPECT_EQ(released.get().code(), Code::kPermissionDenied);
  lent = Internal("gone");
  EXPECT_EQ(freed_, 0);
  ClosePeer();
  memory_.reset();
  EXPECT_EQ(freed_, 1);
}

// Otherwise a file that is cut would raise SIGBUS in this process.
TEST_F(SharedSocketTest, AFileThatCanShrinkIsNotMapped) {
  const int plain = open(folder_.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  ASSERT_GE(plain, 0);
  ASSERT_EQ(ftruncate(plain, kBytes), 0);
  const int before = OpenFiles() - 1;
  struct {
    int memory;
    const char* words;
  } const cases[] = {{Memory(0, kServersSeals), "has 0 bytes"},
                     {Memory(kBytes - 1, kServersSeals), "has 8191 bytes"},
                     {Memory(kBytes, 0), "not sealed against shrinking"},
                     {Memory(kBytes, F_SEAL_GROW | F_SEAL_SEAL), "not sealed against shrinking"},
                     {plain, "not sealed against shrinking"}};
  for (const auto& [memory, words] : cases) {
    std::future<Region> created = Create();
    EXPECT_TRUE(Receive().has_create());
    SendWith(Created("bad"), 1, memory);
    EXPECT_EQ(Receive().release().token(), "bad") << "it is given back";
    const Region region = created.get();
    ASSERT_FALSE(region.ok()) << words;
    EXPECT_EQ(region.status().code(), Code::kInternal);
    EXPECT_NE(region.status().message().find(words), std::string::npos)
        << region.status().message();
    Send(Released(), 0);
  }
  EXPECT_EQ(OpenFiles(), before) << "none is kept";
  EXPECT_TRUE(CreateWith(Created("good"), 1).ok());
}

TEST_F(SharedSocketTest, AWrongNumberOfDescriptorsIsReported) {
  Region region = CreateWith(Created("none"), 0);
  ASSERT_FALSE(region.ok());
  EXPECT_NE(region.status().message().find("without the region's descriptor"), std::string::npos)
      << region.status().message();
  EXPECT_EQ(Receive().release().token(), "none") << "it is given back";
  Send(Released(), 0);
  const int before = OpenFiles();
  for (const int files : {2, 3, 100}) {
    region = CreateWith(Created("many"), files);
    ASSERT_FALSE(region.ok());
    EXPECT_NE(region.status().message().find("more than one descriptor"), std::string::npos)
        << region.status().message();
    EXPECT_EQ(OpenFiles(), before) << "none is kept";
  }
}

// Wherever an answer is expected, it is there before the request, so that the short timeout
// suffices.
class SilentServer : public SharedSocketTest {
 protected:
  static constexpr std::chrono::milliseconds kWait{20};
  SilentServer() : SharedSocketTest(kWait) {}
};

TEST_F(SilentServer, EndsTheConnectionAtTheTimeout) {
  const Region region = memory_->Create(kBytes);
  ASSERT_FALSE(region.ok());
  EXPECT_EQ(region.status().code(), Code::kUnavailable);
  EXPECT_NE(region.status().message().find("has not answered in time"), std::string::npos)
      << region.status().message();
  EXPECT_TRUE(Receive().has_create());
  char packet;
  EXPECT_EQ(recv(peer_, &packet, 1, 0), 0) << "the connection is at its end";
  EXPECT_EQ(memory_->Create(kBytes).status().code(), Code::kUnavailable);
}

TEST_F(SilentServer, DoesNotBlockConnect) {
  const SharedSocket at{folder_ / "silent.sock"};
  const int listener = Listen(at.path);
  const auto named = SharedMemory::Connect(at, {"token", ""}, kWait);
  ASSERT_FALSE(named.ok());
  EXPECT_EQ(named.status().code(), Code::kUnavailable);
  // Fills the listener's backlog with connections that are not accepted.
  std::vector<std::shared_ptr<SharedMemory>> made;
  Status refused;
  while (refused.ok() && made.size() < 100) {
    auto memory = SharedMemory::Connect(at, {}, kWait);
    refused = memory.status();
    if (memory.ok()) made.push_back(std::move(*memory));
  }
  EXPECT_EQ(refused.code(), Code::kUnavailable);
  EXPECT_NE(refused.message().find("has not taken the connection in time"), std::string::npos)
      << refused.message();
  close(listener);
}

TEST_F(SilentServer, MayKeepLentMemoryOpen) {
  v1::RegionReply imported;
  imported.mutable_imported()->set_token("lent");
  Send(imported, 0);
  Region lent = memory_->Lend(std::make_shared<FakeDeviceMemory>(freed_));
  ASSERT_TRUE(lent.ok()) << lent.status().ToString();
  EXPECT_EQ(memory_->Create(kBytes).status().code(), Code::kUnavailable);
  EXPECT_EQ(memory_->Release(**lent).code(), Code::kUnavailable);
  lent = Internal("gone");
  ClosePeer();
  EXPECT_EQ(freed_, 0);
  // Destruction leaks this memory deliberately; LeakSanitizer must not report it.
  static auto* const kept = new std::vector<std::shared_ptr<SharedMemory>>();
  kept->push_back(std::move(memory_));
}

TEST_F(SilentServer, IsAwaitedAsLongAsItsRequestsMayRun) {
  v1::RegionReply imported;
  imported.mutable_imported()->set_token("lent");
  Send(imported, 0);
  Region lent = memory_->Lend(std::make_shared<FakeDeviceMemory>(freed_));
  ASSERT_TRUE(lent.ok()) << lent.status().ToString();
  EXPECT_TRUE(Receive().has_import_cuda());
  std::future<Status> released =
      std::async(std::launch::async, [&] { return memory_->Release(**lent); });
  EXPECT_EQ(Receive().release().token(), "lent");
  EXPECT_EQ(released.wait_for(5 * kWait), std::future_status::timeout);
  Send(Released(), 0);
  const Status status = released.get();
  EXPECT_TRUE(status.ok()) << status.ToString();
}

}  // namespace
}  // namespace attend::client
