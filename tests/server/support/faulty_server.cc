// SPDX-License-Identifier: Apache-2.0
//
// attend-server on fake devices, for faults that tests cannot cause on real ones:
//
//   ATTEND_FAULT=lose|corrupt|left-out|stuck attend-faulty-server FLAGS
//
// lose: of two devices, one is lost at its first batch. corrupt: answers are wrong. left-out: a GPU
// was found that could not be used. stuck: a thread that logs a failed request blocks until SIGUSR1
// arrives. It serves until it is killed.

#include <signal.h>
#include <spdlog/sinks/base_sink.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "kernels/contract/dtype.h"
#include "server/app/options.h"
#include "server/app/server.h"
#include "server/log/logging.h"
#include "tests/server/support/fake_backend.h"

namespace attend {
namespace {

int Fail(const Status& status) {
  std::fprintf(stderr, "attend-faulty-server: %s\n", status.message().c_str());
  return 1;
}

std::atomic<bool> released{false};

// Replaces the server's own sink, which no thread waits for.
class StuckLog final : public spdlog::sinks::sink {
 public:
  void log(const spdlog::details::log_msg& message) override {
    const std::string_view line(message.payload.data(), message.payload.size());
    if (line.find("request failed") != std::string_view::npos) released.wait(false);
  }
  void flush() override {}
  void set_pattern(const std::string&) override {}
  void set_formatter(std::unique_ptr<spdlog::formatter>) override {}
};

int Serve(const Config& config, std::string_view fault) {
  std::vector<std::unique_ptr<Backend>> backends;
  for (const char* name : {"cpu", "cpu1"}) {
    auto backend = std::make_unique<test::FakeBackend>(name);
    if (fault == "lose" && backends.empty()) backend->LoseDevice();
    if (fault == "corrupt") {
      backend->Corrupt(
          [](const Attention& a) { StoreElement(a.o.data, a.problem.dtype, 0, 1e4f); });
    }
    backends.push_back(std::move(backend));
  }
  Result<std::shared_ptr<Logger>> logger = MakeLogger(MakeLogSettings(config));
  if (!logger.ok()) return Fail(logger.status());
  if (fault == "stuck") {
    logger = std::make_shared<Logger>(Logger::Options(), std::make_shared<StuckLog>());
  }
  Result<std::unique_ptr<Server>> server = Server::Start(config, std::move(backends), *logger);
  if (!server.ok()) return Fail(server.status());
  if (fault == "left-out") (*server)->CountDevicesLeftOut(1);
  const Status written = (*server)->WriteReadyFile(config.ready_file);
  if (!written.ok()) return Fail(written);
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGUSR1);
  for (int signal = 0; sigwait(&signals, &signal) == 0;) {
    released = true;
    released.notify_all();
  }
  return 1;
}

}  // namespace
}  // namespace attend

int main(int argc, char** argv) {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGUSR1);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  const char* const fault = std::getenv("ATTEND_FAULT");
  attend::Config config;
  std::string text;
  if (attend::ParseConfig(argc, argv, config, text) != attend::ConfigOutcome::kRun) {
    std::fputs(text.c_str(), stderr);
    return 2;
  }
  return attend::Serve(config, fault == nullptr ? "" : fault);
}
