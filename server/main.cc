// SPDX-License-Identifier: Apache-2.0
//
// attend-server: settings, signals, start and end. Exit codes: 0 after a clean drain, 1 if the
// server could not start or the drain timed out, 2 for wrong settings, 128 + the signal's number
// when a second signal ended it.

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "kernels/thread_name.h"
#include "proto/process_settings.h"
#include "proto/receive_blocks.h"
#include "server/config.h"
#include "server/logging.h"
#include "server/server.h"

namespace {

sigset_t EndSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  return signals;
}

// Waits for signals on a thread of its own. The first one is told to main, the second ends the
// process. Made before any other thread, which then inherit the blocked signals.
class SignalThread {
 public:
  SignalThread() : signals_(EndSignals()), first_(promise_.get_future()) {
    pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
    thread_ = std::thread([this] { Run(); });
  }
  ~SignalThread() {
    stop_ = true;
    pthread_kill(thread_.native_handle(), SIGTERM);  // wakes sigwait
    thread_.join();
  }

  int WaitForFirst() { return first_.get(); }

 private:
  void Run() {
    attend::NameThread("attend-signals");
    for (bool first = true;; first = false) {
      int signal = 0;
      sigwait(&signals_, &signal);
      if (stop_) return;
      if (!first) _exit(128 + signal);
      promise_.set_value(signal);
    }
  }

  sigset_t signals_;
  std::promise<int> promise_;
  std::future<int> first_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// gRPC has one log hook for the whole process, without a context: hence this one global.
std::atomic<spdlog::logger*> grpc_log{nullptr};

void LogOfGrpc(gpr_log_func_args* line) {
  spdlog::logger* const logger = grpc_log.load(std::memory_order_acquire);
  if (logger == nullptr) return;
  const bool error = line->severity == GPR_LOG_SEVERITY_ERROR;
  logger->log(error ? spdlog::level::warn : spdlog::level::debug, "grpc: {}", line->message);
}

int Fail(const attend::Status& status) {
  std::fprintf(stderr, "attend-server: %s\n", status.message().c_str());
  return 1;
}

int Serve(const attend::Config& config, const attend::ReceiveBlocks& receive_blocks,
          std::shared_ptr<spdlog::logger> logger) {
  SignalThread signals;
  attend::Result<std::vector<std::unique_ptr<attend::Backend>>> backends =
      attend::MakeBackends(config, *logger);
  if (!backends.ok()) return Fail(backends.status());
  attend::Result<std::unique_ptr<attend::Server>> server =
      attend::Server::Start(config, std::move(*backends), logger, receive_blocks);
  if (!server.ok()) return Fail(server.status());
  if (!config.ready_file.empty()) {
    const attend::Status written = (*server)->WriteReadyFile(config.ready_file);
    if (!written.ok()) return Fail(written);
  }

  const int signal = signals.WaitForFirst();
  logger->info("signal {}: the server ends", signal);
  const auto timeout = std::chrono::duration_cast<attend::Duration>(
      std::chrono::duration<double>(config.drain_timeout_seconds));
  const bool drained = (*server)->Drain(timeout);
  logger->flush();
  // Without destructors. After a drain nothing is left but clients that are being refused, whom a
  // closed connection tells UNAVAILABLE and gRPC's shutdown CANCELLED. After a timeout a kernel may
  // run for long, and nothing can stop it.
  std::_Exit(drained ? 0 : 1);
}

}  // namespace

int main(int argc, char** argv) {
  attend::Config config;
  std::string text;
  switch (attend::ParseConfig(argc, argv, config, text)) {
    case attend::ConfigOutcome::kPrinted:
      std::fputs(text.c_str(), stdout);
      return 0;
    case attend::ConfigOutcome::kError:
      std::fputs(text.c_str(), stderr);
      return 2;
    case attend::ConfigOutcome::kRun:
      break;
  }
  attend::SkipDeadlockSearch();
  attend::TunedAllocator allocator;
  if (config.allocator_tuning) {
    allocator = attend::TuneAllocatorAndBlocks(config.receive_memory_bytes, attend::kServerArenas);
    if (!allocator.tuned) {
      std::fputs("attend-server: the allocator cannot be tuned; large transfers are slower\n",
                 stderr);
    }
    if (attend::kMallocHasBlocks && config.receive_memory_bytes > 0 &&
        allocator.blocks.bytes == 0) {
      std::fputs("attend-server: no address space for --receive-memory; transfers are slower\n",
                 stderr);
    }
  }
  // A stream that waits for a client's event holds the channel to the GPU that it was dealt, and
  // whatever else was dealt the same one: as many as there can be (8 is CUDA's default), one for
  // each stream of up to seven lanes.
  if (config.cuda_ipc) setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  // Bad messages are the client's to hear of, not stderr's.
  google::protobuf::SetLogHandler(nullptr);
  attend::Result<std::shared_ptr<spdlog::logger>> logger = attend::MakeLogger(config);
  if (!logger.ok()) return Fail(logger.status());
  grpc_log.store((*logger).get(), std::memory_order_release);
  gpr_set_log_function(LogOfGrpc);
  const int code = Serve(config, allocator.blocks, *logger);
  grpc_log.store(nullptr, std::memory_order_release);
  return code;
}
