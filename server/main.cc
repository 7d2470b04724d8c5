// SPDX-License-Identifier: Apache-2.0
//
// attend-server: settings, signals, start and end. Exit codes: 0 after a clean drain; 1 if the
// server could not start or the drain timed out; 2 for wrong settings; 128 + the signal's number if
// a second signal ended it. SIGHUP reopens the log file and reloads what can be reloaded
// (Server::Reload).

#include <google/protobuf/stubs/logging.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "kernels/util/mutex.h"
#include "kernels/util/thread_name.h"
#include "proto/process/process_settings.h"
#include "server/app/config.h"
#include "server/app/devices.h"
#include "server/app/options.h"
#include "server/app/server.h"
#include "server/log/last_lines.h"
#include "server/log/logging.h"
#include "server/memory/memory_reserve.h"
#include "server/net/connection_limits.h"
#include "server/util/service_manager.h"
#include "server/util/whole_file.h"

namespace {

// A second signal within this time is the same request: supervisors signal a process and its group,
// or signal twice to be sure.
constexpr std::chrono::seconds kOneWish{1};
// At the end, for unwritten lines.
constexpr std::chrono::milliseconds kLastLinesTime{500};
// How often suppressed lines are reported, of kinds that have become quiet.
constexpr timespec kLeftOutPeriod{1, 0};

sigset_t Signals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGHUP);
  return signals;
}

// Waits for signals, which main has blocked, on its own thread. The first signal to end is reported
// to main; a second, later one ends the process. SIGHUP's actions run on another thread, because a
// hanging disk may block them.
class SignalThread {
 public:
  // `logger` must outlive the object.
  explicit SignalThread(attend::Logger& logger)
      : logger_(logger), signals_(Signals()), first_(promise_.get_future()) {
    hangups_ = std::thread([this] { RunHangups(); });
    thread_ = std::thread([this] { Run(); });
  }
  ~SignalThread() {
    stop_ = true;
    pthread_kill(thread_.native_handle(), SIGTERM);  // wakes sigtimedwait
    thread_.join();
    HangUp();  // wakes the other thread
    hangups_.join();
  }

  int WaitForFirst() { return first_.get(); }

  // Sets the further action of SIGHUP; runs it at once if a SIGHUP came without one. Empty: none.
  // Does not return while the previous action runs.
  void OnHangup(std::function<void()> hook) {
    const attend::MutexLock lock(hook_mutex_);
    on_hangup_ = std::move(hook);
    if (on_hangup_ && std::exchange(missed_, false)) on_hangup_();
  }

 private:
  void Run() {
    attend::NameThread("attend-signals");
    for (;;) {
      const int signal = sigtimedwait(&signals_, nullptr, &kLeftOutPeriod);
      if (stop_) return;
      if (signal < 0) {
        logger_.SayLeftOut();
      } else if (signal == SIGHUP) {
        HangUp();
      } else {
        End(signal);
      }
    }
  }

  void HangUp() {
    const attend::MutexLock lock(hangup_mutex_);
    hung_up_ = true;
    hangup_.NotifyOne();
  }

  // Signals that come during an action are served together by one more.
  void RunHangups() {
    attend::NameThread("attend-reload");
    for (;;) {
      {
        const attend::MutexLock lock(hangup_mutex_);
        while (!hung_up_) hangup_.Wait(hangup_mutex_);
        hung_up_ = false;
      }
      if (stop_) return;
      logger_.Reopen();
      const attend::MutexLock lock(hook_mutex_);
      missed_ = !on_hangup_;
      if (on_hangup_) on_hangup_();
    }
  }

  void End(int signal) {
    const attend::TimePoint now = clock_.Now();
    if (!ending_) {
      ending_ = now;
      promise_.set_value(signal);
    } else if (now - *ending_ >= kOneWish) {
      logger_.WaitUntilWritten(kLastLinesTime);
      _exit(128 + signal);
    } else {
      logger_.info("signal {} again within a second: the drain continues", signal);
    }
  }

  attend::Logger& logger_;
  const attend::SteadyClock clock_;
  const sigset_t signals_;
  attend::Mutex hangup_mutex_;
  attend::CondVar hangup_;
  bool hung_up_ ATTEND_GUARDED_BY(hangup_mutex_) = false;
  attend::Mutex hook_mutex_;  // held while the hook runs
  std::function<void()> on_hangup_ ATTEND_GUARDED_BY(hook_mutex_);
  bool missed_ ATTEND_GUARDED_BY(hook_mutex_) = false;  // a SIGHUP came without a hook
  std::optional<attend::TimePoint> ending_;             // when the first signal to end came
  std::promise<int> promise_;
  std::future<int> first_;
  std::atomic<bool> stop_{false};
  std::thread hangups_;
  std::thread thread_;
};

// Time that a stop may take beyond the drain.
constexpr std::chrono::seconds kAfterDrain{10};

// Memory that running requests need to end when the heap is exhausted.
constexpr int64_t kMemoryReserveBytes = int64_t{16} << 20;

// Global, because Terminate has no context.
std::atomic<attend::Logger*> the_log{nullptr};

int Fail(const attend::Status& status) {
  attend::WriteLastLine("attend-server: " + status.message());
  return 1;
}

// For uncaught exceptions. If the system refuses a thread, prints one line and exits like a server
// that cannot start, without destructors, which would wait for threads.
[[noreturn]] void Terminate() {
  try {
    if (const std::exception_ptr thrown = std::current_exception()) std::rethrow_exception(thrown);
  } catch (const std::system_error& error) {
    attend::Logger* const logger = the_log.load(std::memory_order_acquire);
    if (logger != nullptr) logger->WaitUntilWritten(kLastLinesTime);
    Fail(attend::Unavailable(std::string("cannot create a thread: ") + error.what()));
    std::_Exit(1);
  } catch (const std::exception& error) {
    Fail(attend::Internal(error.what()));
  }
  std::abort();
}

// Tells systemd, if it started the server, about its state.
void Tell(attend::Logger& logger, const std::string& state) {
  const char* const socket = std::getenv("NOTIFY_SOCKET");
  const attend::Status told = attend::TellServiceManager(socket == nullptr ? "" : socket, state);
  if (!told.ok()) logger.warn("cannot notify the service manager: {}", told.message());
}

int Serve(const attend::Config& config, std::shared_ptr<attend::Logger> logger) {
  const auto fail = [&logger](const attend::Status& status) {
    logger->WaitUntilWritten(kLastLinesTime);  // so that the error is the last line
    return Fail(status);
  };
  SignalThread signals(*logger);
  if (const attend::Status folder = attend::CheckFolderOf("ready-file", config.ready_file);
      !folder.ok()) {
    return fail(folder);
  }
  attend::Result<attend::Devices> devices = attend::MakeBackends(config, *logger);
  if (!devices.ok()) return fail(devices.status());
  attend::Result<std::unique_ptr<attend::Server>> server =
      attend::Server::Start(config, std::move(devices->backends), logger);
  if (!server.ok()) return fail(server.status());
  (*server)->CountDevicesLeftOut(devices->left_out);
  signals.OnHangup([&server] { (*server)->Reload(); });
  if (!config.ready_file.empty()) {
    const attend::Status written = (*server)->WriteReadyFile(config.ready_file);
    if (!written.ok()) {
      signals.OnHangup(nullptr);  // before the server is destroyed
      return fail(written);
    }
  }
  Tell(*logger, "READY=1\nSTATUS=serving on " + (*server)->addresses().front());

  const int signal = signals.WaitForFirst();
  logger->info("signal {}: the server is stopping", signal);
  const auto timeout = std::chrono::duration_cast<attend::Duration>(
      std::chrono::duration<double>(config.drain_timeout_seconds));
  Tell(*logger,
       "STOPPING=1\nSTATUS=finishing accepted requests\nEXTEND_TIMEOUT_USEC=" +
           std::to_string(
               std::chrono::ceil<std::chrono::microseconds>(timeout + kAfterDrain).count()));
  const bool drained = (*server)->Drain(timeout);
  logger->SayLeftOut(/*all=*/true);
  logger->WaitUntilWritten(kLastLinesTime);
  // No destructors. After a drain only refused clients remain, for whom a closed connection means
  // UNAVAILABLE. After a timeout a GPU kernel may still run for long, and nothing can stop it.
  std::_Exit(drained ? 0 : 1);
}

}  // namespace

int main(int argc, char** argv) {
  // Before anything slow, and before any thread is made: threads inherit the mask.
  const sigset_t signals = Signals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  attend::PrepareWrites();
  attend::Config config;
  std::string text;
  switch (attend::ParseConfig(argc, argv, config, text)) {
    case attend::ConfigOutcome::kPrinted:
      std::fputs(text.c_str(), stdout);
      return 0;
    case attend::ConfigOutcome::kError:
      attend::WriteLastLine(text.substr(0, text.find_last_not_of('\n') + 1));
      return 2;
    case attend::ConfigOutcome::kRun:
      break;
  }
  // Memory holds private keys and callers' tokens.
  if (!config.core_dumps && prctl(PR_SET_DUMPABLE, 0) != 0) {
    attend::WriteLastLine(std::string("attend-server: cannot keep memory out of core dumps: ") +
                          std::strerror(errno) + "; --core-dumps allows them");
    return 1;
  }
  std::set_terminate(Terminate);
  const attend::DescriptorLimit descriptors = attend::RaiseDescriptorLimit();
  if (config.allocator_tuning && !attend::TuneAllocator(attend::kServerArenas)) {
    attend::WriteLastLine("attend-server: cannot tune the allocator; large transfers are slower");
  }
  // A stream that waits for a client's event blocks its hardware channel, and with it every other
  // stream on that channel. So use the most channels that CUDA allows (8 is its default): one per
  // stream for up to seven lanes.
  if (config.cuda_ipc) setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  // Malformed messages are reported to the client; keep Protobuf's own log off stderr.
  google::protobuf::SetLogHandler(nullptr);
  attend::KeepMemoryReserve(kMemoryReserveBytes);
  attend::Result<std::shared_ptr<attend::Logger>> logger =
      attend::MakeLogger(attend::MakeLogSettings(config));
  if (!logger.ok()) return Fail(logger.status());
  the_log.store((*logger).get(), std::memory_order_release);
  attend::WriteLogOnCrash((*logger).get());
  if (descriptors.now > descriptors.before) {
    (*logger)->info("descriptors: limit raised from {} to {}", descriptors.before, descriptors.now);
  }
  const int code = Serve(config, *logger);
  the_log.store(nullptr, std::memory_order_release);
  attend::WriteLogOnCrash(nullptr);
  return code;
}
