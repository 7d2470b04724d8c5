// SPDX-License-Identifier: Apache-2.0
//
// Packets to the region socket, on a new connection for each input. A RegionRequest is answered
// with a RegionReply, any other packet with an error, after which the connection is closed. Regions
// never exceed their limits and are freed with the connection.

#include <spdlog/sinks/null_sink.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <thread>

#include "attend/v1/shared_memory.pb.h"
#include "server/regions/region_socket.h"
#include "tests/fuzz/fuzz.h"

namespace attend::fuzz {
namespace {

constexpr int64_t kPacketBytesMax = 4096;
constexpr int64_t kPageBytes = 4096;

// Region memory without system calls.
class HeapMemory final : public RegionMemory {
 public:
  Result<RegionMapping> Map(int64_t bytes) override {
    RegionMapping mapping;
    mapping.file = UniqueFd(dup(STDIN_FILENO));
    mapping.bytes = bytes;
    mapping.data = std::malloc(static_cast<size_t>(bytes));
    return mapping;
  }
  void Unlock(void*, int64_t) override {}
  void Unmap(void* data, int64_t, Pages) override { std::free(data); }
  int64_t page_bytes() const override { return kPageBytes; }
};

// The socket, and its registry with tokens that an input can name: "token-0000000000" and so on,
// the same on every connection.
struct Regions {
  Regions() {
    std::string pattern = std::filesystem::temp_directory_path() / "attend-fuzz-XXXXXX";
    const std::filesystem::path folder = mkdtemp(pattern.data());
    options.path = folder / "regions.sock";
    auto started = RegionSocket::Start(options, registry, logger, clock);
    ATTEND_FUZZ_REQUIRE(started.ok(), started.status().ToString());
    socket = std::move(*started);
    // Destructors do not run at the end of the process.
    static std::filesystem::path left = folder;
    std::atexit([] { std::filesystem::remove_all(left); });
  }

  HeapMemory memory;
  std::atomic<int> tokens{0};
  RegionLimits limits{.tenant_weights = {1},
                      .bytes_max = 64 * kPageBytes,
                      .client_bytes_max = 32 * kPageBytes,
                      .client_regions_max = 4};
  const SteadyClock clock;
  RegionRegistry registry{limits, memory, clock, [this]() -> Result<std::string> {
                            std::string token = "token-" + std::to_string(tokens++);
                            token.resize(kTokenBytes, '0');
                            return token;
                          }};
  Logger logger{{}, std::make_shared<spdlog::sinks::null_sink_mt>()};
  RegionSocket::Options options{.path = {}, .tenant_weights = {1}};
  std::unique_ptr<RegionSocket> socket;
};

int Connect(const std::string& path) {
  const int client = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  const timeval patience{60, 0};
  setsockopt(client, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  ATTEND_FUZZ_REQUIRE(
      connect(client, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0, path);
  return client;
}

// False once the server has ended the connection.
bool Exchange(int client, const std::string& packet) {
  if (send(client, packet.data(), packet.size(), MSG_NOSIGNAL) < 0) return false;
  char bytes[kPacketBytesMax];
  const ssize_t received = Receive(client, bytes, sizeof(bytes));
  if (received == 0 && packet.empty()) return false;  // an empty packet reads like a close
  ATTEND_FUZZ_REQUIRE(received > 0, "no answer to a packet of " + std::to_string(packet.size()));
  v1::RegionReply reply;
  ATTEND_FUZZ_REQUIRE(reply.ParseFromArray(bytes, static_cast<int>(received)), "the reply");
  v1::RegionRequest request;
  const bool valid =
      static_cast<int64_t>(packet.size()) <= kPacketBytesMax && request.ParseFromString(packet);
  if (!valid) {
    ATTEND_FUZZ_REQUIRE(reply.error().code() == static_cast<int>(Code::kInvalidArgument),
                        reply.ShortDebugString());
    ATTEND_FUZZ_REQUIRE(Receive(client, bytes, sizeof(bytes)) == 0, "the connection stays open");
    return false;
  }
  if (reply.has_created()) {
    ATTEND_FUZZ_REQUIRE(request.has_create() && reply.created().bytes() >= request.create().bytes(),
                        request.ShortDebugString() + reply.ShortDebugString());
  } else if (reply.has_released()) {
    ATTEND_FUZZ_REQUIRE(request.has_release(), request.ShortDebugString());
  } else if (reply.has_identified()) {
    ATTEND_FUZZ_REQUIRE(request.has_identify(), request.ShortDebugString());
  } else {
    ATTEND_FUZZ_REQUIRE(reply.has_error() && !reply.error().message().empty(),
                        reply.ShortDebugString());
  }
  return true;
}

void RunOne(std::string_view input) {
  static auto* const regions = new Regions();
  regions->tokens = 0;
  const int client = Connect(regions->options.path);
  for (const std::string& packet : Records(input)) {
    if (!Exchange(client, packet)) break;
    const RegionRegistry::Stats stats = regions->registry.stats();
    ATTEND_FUZZ_REQUIRE(stats.bytes <= regions->limits.client_bytes_max &&
                            stats.regions <= regions->limits.client_regions_max,
                        std::to_string(stats.bytes) + " bytes");
  }
  close(client);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  for (;;) {
    const RegionRegistry::Stats stats = regions->registry.stats();
    if (stats.clients + stats.regions + stats.bytes + stats.changing_bytes == 0) return;
    ATTEND_FUZZ_REQUIRE(std::chrono::steady_clock::now() < until, "regions stay");
    std::this_thread::yield();
  }
}

}  // namespace
}  // namespace attend::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  attend::fuzz::RunOne(attend::fuzz::View(data, size));
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t size_max,
                                          unsigned seed) {
  return attend::fuzz::MutateRecords(data, size, size_max, seed, [](size_t) {
    return std::make_unique<attend::v1::RegionRequest>();
  });
}
