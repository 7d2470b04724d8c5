// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/service/serve.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "client/call/shared_call.h"
#include "client/client.h"
#include "client/memory/shared_memory.h"
#include "kernels/contract/backend.h"
#include "proto/process/process_settings.h"
#include "proto/process/receive_blocks.h"
#include "server/app/config.h"
#include "server/app/devices.h"
#include "server/app/options.h"
#include "server/app/server.h"
#include "server/log/logging.h"
#include "tests/bench/service/echo_server.h"
#include "tests/bench/service/pass_through_backend.h"
#include "tests/bench/service/raw_tcp.h"
#include "tests/bench/service/work.h"

namespace attend::bench {
namespace {

// Reports the addresses to the parent, and lives as long as the parent. Ends without destructors,
// like a server that is killed.
[[noreturn]] void ServeUntilInputEnds(const std::string& addresses) {
  std::printf("ready %s\n", addresses.c_str());
  std::fflush(stdout);
  char byte = 0;
  while (read(STDIN_FILENO, &byte, 1) > 0) {
  }
  std::_Exit(0);
}

int Cannot(const std::string& reason) {
  std::printf("cannot %s\n", reason.c_str());
  return 1;
}

int ServeAttend(bool pass_through, std::span<const std::string> flags) {
  std::vector<const char*> arguments = {"attend-server"};
  for (const std::string& flag : flags) arguments.push_back(flag.c_str());
  Config config;
  std::string text;
  if (ParseConfig(static_cast<int>(arguments.size()), arguments.data(), config, text) !=
      ConfigOutcome::kRun) {
    return Cannot(text.substr(0, text.find('\n')));
  }
  if (config.allocator_tuning) TuneAllocator(kServerArenas);
  SkipDeadlockSearch();
  const Result<std::shared_ptr<Logger>> logger = MakeLogger(MakeLogSettings(config));
  if (!logger.ok()) return Cannot(logger.status().message());
  Result<Devices> devices = MakeBackends(config, **logger);
  if (!devices.ok()) return Cannot(devices.status().message());
  std::vector<std::unique_ptr<Backend>>& backends = devices->backends;
  if (pass_through) {
    backends.clear();
    backends.push_back(MakePassThroughBackend());
  }
  const Result<std::unique_ptr<Server>> server =
      Server::Start(config, std::move(backends), *logger);
  if (!server.ok()) return Cannot(server.status().message());
  ServeUntilInputEnds((*server)->addresses().front() + " " + (*server)->metrics_address());
}

std::string TextOf(const std::string& path) {
  std::ifstream in(path);
  return std::string(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
}

// LISTEN ANSWER_BYTES [CERT KEY]
int ServeEcho(EchoKind kind, std::span<const std::string> arguments) {
  const std::string& listen = arguments[0];
  const int64_t answer_bytes = std::atoll(arguments[1].c_str());
  std::shared_ptr<grpc::ServerCredentials> credentials = grpc::InsecureServerCredentials();
  if (arguments.size() == 4) {
    grpc::SslServerCredentialsOptions options(GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE);
    options.pem_key_cert_pairs.push_back({TextOf(arguments[3]), TextOf(arguments[2])});
    credentials = grpc::SslServerCredentials(options);
  }
  TuneAllocatorAndBlocks(kReceiveBlocksBytes, kServerArenas);
  SkipDeadlockSearch();
  const EchoServer server(listen, answer_bytes, kind, credentials);
  if (server.address().empty()) return Cannot("the echo does not serve " + listen);
  ServeUntilInputEnds(server.address());
}

int ServeRawTcp() {
  const Result<std::unique_ptr<RawTcpServer>> server = RawTcpServer::Start();
  if (!server.ok()) return Cannot(server.status().message());
  ServeUntilInputEnds((*server)->address());
}

// Makes calls that are unfinished when this process is killed.
int Abandon(const std::string& address, const std::string& socket) {
  constexpr int kCalls = 8;
  constexpr int kRegionCalls = 4;
  client::ClientOptions options;
  options.server = address;
  options.connections = 2;
  const Result<std::unique_ptr<client::Client>> client = client::Client::Make(options);
  if (!client.ok()) return Cannot(client.status().message());
  const Work work("abandoned", test::MakeSpec(1, 8, 8, 512, 4096, 64, 64, DType::kFloat16),
                  Truth::kMarks, test::FreshSeed());
  const Result<std::shared_ptr<client::SharedMemory>> memory =
      client::SharedMemory::Connect({socket});
  if (!memory.ok()) return Cannot(memory.status().message());
  const Result<client::AttentionCall> shared = client::ShareCall(**memory, work.call());
  if (!shared.ok()) return Cannot(shared.status().message());
  // All use one region, and may overwrite each other's answers, which are never read.
  for (int i = 0; i < kRegionCalls; ++i) {
    (*client)->CallAsync(*shared, {}, [](const client::CallOutcome&) {});
  }
  for (int i = 0; i < kCalls; ++i) {
    client::CallOptions call;
    call.transport = i % 2 == 0 ? client::CallTransport::kInline : client::CallTransport::kChunked;
    (*client)->CallAsync(work.call(), call, [](const client::CallOutcome&) {});
  }
  ServeUntilInputEnds(address);
}

}  // namespace

int Serve(std::span<const std::string> arguments) {
  const std::string kind = arguments.empty() ? "" : arguments.front();
  if (kind == "attend") return ServeAttend(false, arguments.subspan(1));
  if (kind == "attend-pass-through") return ServeAttend(true, arguments.subspan(1));
  if (kind == "echo" && (arguments.size() == 3 || arguments.size() == 5)) {
    return ServeEcho(EchoKind::kPlain, arguments.subspan(1));
  }
  if (kind == "inline-echo" && arguments.size() == 3) {
    return ServeEcho(EchoKind::kInline, arguments.subspan(1));
  }
  if (kind == "raw-tcp") return ServeRawTcp();
  if (kind == "abandon" && arguments.size() == 3) return Abandon(arguments[1], arguments[2]);
  return Cannot("unknown server \"" + kind + "\"");
}

std::optional<int> ServeIfAsked(int argc, char** argv) {
  if (argc < 2 || std::string(argv[1]) != "--serve") return std::nullopt;
  return Serve(std::vector<std::string>(argv + 2, argv + argc));
}

}  // namespace attend::bench
