// SPDX-License-Identifier: Apache-2.0

#include "client/load/load_runner.h"

#include <poll.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>

#include "client/call/shared_call.h"
#include "client/load/true_time.h"

namespace attend::client {
namespace {

// Bounds of a closed loop's pause after a refusal. The minimum keeps an idle loop from hammering a
// server that is down or full; within the maximum the server's retry time is used.
constexpr auto kRestAfterFailure = std::chrono::milliseconds(5);
constexpr auto kRestMost = std::chrono::seconds(1);

// A request due shortly before the end of an open loop is still sent this much later, if a slot is
// free.
constexpr std::chrono::nanoseconds kLatenessMax = std::chrono::seconds(1);

int64_t Ns(double seconds) { return static_cast<int64_t>(std::ceil(seconds * 1e9)); }

void SleepUntil(int64_t ns) {
  const timespec when = {ns / 1'000'000'000, ns % 1'000'000'000};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &when, nullptr) == EINTR) {
  }
}

}  // namespace

LoadRunner::LoadRunner(const LoadOptions& options, const Workload& workload, VerifyQueue* verify,
                       const std::atomic<bool>* interrupted)
    : options_(options), workload_(workload), verify_(verify), interrupted_(interrupted) {}

Status LoadRunner::Open(const LoadStep& step) {
  Result<std::unique_ptr<Client>> client = Client::Make(options_.client);
  if (!client.ok()) return client.status();
  client_ = std::move(*client);
  open_loop_ = step.open();
  if (options_.stream) {
    StreamOptions stream_options;
    stream_options.tenant = options_.tenant;
    stream_options.server = options_.server;
    for (int i = 0; i < client_->connections(); ++i) {
      streams_.push_back(client_->OpenStream(stream_options));
    }
  }
  timer_ = std::make_unique<TimerThread>();
  slots_.assign(static_cast<size_t>(open_loop_ ? options_.outstanding_max : step.concurrency), {});
  if (workload_.memory() != nullptr) ATTEND_RETURN_IF_ERROR(PlaceOutputs());
  {
    const MutexLock lock(mutex_);
    free_.clear();
    for (Slot& slot : slots_) free_.push_back(&slot);
    outstanding_ = 0;
  }
  requests_ = 0;
  measured_ = 0;
  stopping_ = false;
  abandoning_ = false;
  due_unsent_ = 0;
  shown_bytes_ = 0;
  return Status();
}

Status LoadRunner::PlaceOutputs() {
  const int64_t bytes = workload_.output_bytes();
  const int64_t slots = static_cast<int64_t>(slots_.size());
  if (bytes > INT64_MAX / slots) return InvalidArgument("the answers' bytes overflow 64 bits");
  Result<std::shared_ptr<SharedRegion>> region = workload_.MakeRegion(bytes * slots);
  if (!region.ok()) {
    return Status(region.status().code(), "room for the answers of " + std::to_string(slots) +
                                              " requests in flight: " + region.status().message());
  }
  for (int64_t i = 0; i < slots; ++i) slots_[static_cast<size_t>(i)].output = {*region, i * bytes};
  return Status();
}

std::shared_ptr<const EncodedCall> LoadRunner::CallOf(const Slot& slot) const {
  const WorkItem& item = *slot.draw.item;
  const auto& encoded = slot.draw.check ? item.encoded_checked : item.encoded;
  if (slot.output.region == nullptr) return encoded;
  return encoded->WithOutputs(ShareOutputs(slot.output, item.call));
}

Result<LoadResult> LoadRunner::Run(const LoadStep& step) {
  ATTEND_RETURN_IF_ERROR(Open(step));
  const int64_t start_ns = NowNs();
  measurement_.emplace(options_, client_->connections(), start_ns + Ns(options_.warmup_s));
  last_answer_ns_ = measurement_->begin_ns();
  std::thread dispatcher([this, &step] { Dispatch(step); });
  Watch();
  LoadResult result;
  result.step = step;
  result.interrupted = interrupted_->load();
  if (result.interrupted) measurement_->Interrupt(NowNs());
  {
    const MutexLock lock(mutex_);  // so that TakeSlot cannot miss the wake-up
    stopping_ = true;
  }
  changed_.NotifyAll();
  dispatcher.join();
  result.due_unsent = due_unsent_;
  WaitForAnswers(&result);
  result.interrupted = interrupted_->load();
  // Everything is closed before anything is destroyed, because callbacks may still be sending.
  timer_->Stop();
  for (const auto& stream : streams_) stream->Close();
  client_->Close();
  streams_.clear();
  client_.reset();
  timer_.reset();
  slots_.clear();
  measurement_->Fill(last_answer_ns_, &result);
  if (result.interrupted) verify_->Drop();
  result.verified = verify_->Drain();
  return result;
}

void LoadRunner::Dispatch(const LoadStep& step) {
  if (!open_loop_) {
    const int64_t now = NowNs();
    for (Slot& slot : slots_) {
      {
        const MutexLock lock(mutex_);
        ++outstanding_;
      }
      Send(&slot, now);
    }
    return;
  }
  prctl(PR_SET_TIMERSLACK, 1000);  // ns; the default of 50 us would be added to every latency
  Schedule schedule(options_.arrivals, step.rate_per_s, options_.seed);
  const int64_t start_ns = measurement_->begin_ns() - Ns(options_.warmup_s);
  for (;;) {
    const int64_t intended = start_ns + schedule.NextNs();
    if (intended >= measurement_->end_ns()) return;
    // Short sleeps, so that a slow schedule can be stopped.
    for (int64_t now = NowNs(); now < intended && !stopping_; now = NowNs()) {
      SleepUntil(std::min(intended, now + 50'000'000));
    }
    if (NowNs() < intended) return;  // stopped before it was due
    bool waited = false;
    Slot* slot = TakeSlot(&waited);
    if (slot == nullptr) return CountUnsent(intended, start_ns, &schedule);
    slot->held_back = waited;
    Send(slot, intended);
  }
}

void LoadRunner::CountUnsent(int64_t intended_ns, int64_t start_ns, Schedule* schedule) {
  if (options_.count > 0 && measured_ >= options_.count) return;
  const int64_t begin_ns = measurement_->reported_from_ns(), end_ns = measurement_->end_ns();
  due_unsent_ = schedule->CountWithin(begin_ns - start_ns, end_ns - start_ns);
  due_unsent_ += intended_ns >= begin_ns && intended_ns < end_ns;
  if (options_.count > 0) due_unsent_ = std::min(due_unsent_, options_.count - measured_);
}

LoadRunner::Slot* LoadRunner::TakeSlot(bool* waited) {
  const MutexLock lock(mutex_);
  *waited = free_.empty();
  while (!stopping_ && free_.empty()) changed_.Wait(mutex_);
  // A request due just before the end is still sent if a slot is free: a dispatcher that woke up
  // late does not mean overload.
  const bool too_late = options_.count > 0 || *interrupted_ ||
                        NowNs() - kLatenessMax.count() >= measurement_->end_ns();
  if (free_.empty() || (stopping_ && too_late)) return nullptr;
  Slot* slot = free_.back();
  free_.pop_back();
  ++outstanding_;
  return slot;
}

bool LoadRunner::Admit(int64_t intended_ns, bool* measured) {
  *measured = intended_ns >= measurement_->begin_ns();
  if ((stopping_ && !open_loop_) || intended_ns >= measurement_->end_ns()) return false;
  if (!*measured) return true;
  const int64_t before = measured_.fetch_add(1);
  if (options_.count > 0 && before >= options_.count) return false;
  measurement_->CountDue(intended_ns);
  return true;
}

void LoadRunner::Send(Slot* slot, int64_t intended_ns) {
  if (!Admit(intended_ns, &slot->measured)) return Retire(slot);
  slot->draw = workload_.DrawRequest(requests_.fetch_add(1, std::memory_order_relaxed));
  const Workload::Draw draw = slot->draw;
  slot->intended_ns = intended_ns;
  const std::shared_ptr<const EncodedCall> encoded = CallOf(*slot);
  slot->sent_ns = NowNs();
  if (options_.stream) {
    Stream& stream = *streams_[next_stream_.fetch_add(1) % streams_.size()];
    const int connection = stream.connection();
    stream.Send(encoded, {}, [this, slot, connection](StreamAnswer answer) {
      OnAnswer(slot, {.status = std::move(answer.status),
                      .result = std::move(answer.result),
                      .payload_bytes = answer.payload_bytes,
                      .retry_after_ms = answer.retry_after_ms,
                      .connection = connection,
                      .server_id = std::move(answer.server_id),
                      .server = std::move(answer.server)});
    });
    return;
  }
  CallOptions call_options;
  call_options.tenant = options_.tenant;
  call_options.server = options_.server;
  if (draw.deadline)
    call_options.timeout = std::chrono::nanoseconds(Ns(options_.deadline_ms / 1e3));
  // Copies from device memory would not be read.
  const bool discard = options_.discard_output || options_.device_memory;
  if (discard && !draw.verify) call_options.payload = Payload::kDiscard;
  // Small enough for std::function to store without an allocation.
  CallHandle handle =
      client_->CallAsync(encoded, {}, call_options,
                         [this, slot](CallOutcome outcome) { OnAnswer(slot, std::move(outcome)); });
  if (draw.cancel_after_ms >= 0) {
    timer_->At(Clock::now() + std::chrono::nanoseconds(Ns(draw.cancel_after_ms / 1e3)),
               [handle]() mutable { handle.Cancel(); });
  }
}

void LoadRunner::OnAnswer(Slot* slot, CallOutcome outcome) {
  const int64_t now = NowNs();
  const auto rest = std::chrono::milliseconds(outcome.retry_after_ms);
  Record(*slot, outcome, now);
  if (outcome.status.ok() && slot->draw.verify && slot->measured) {
    // Copy: the next request's answer overwrites the place.
    if (slot->output.region != nullptr) DetachTensors(&outcome.result);
    verify_->Add(slot->draw.item->call, std::move(outcome.result), slot->draw.seed);
  }
  const Code code = outcome.status.code();
  const bool asked_for = (code == Code::kCancelled && slot->draw.cancel_after_ms >= 0) ||
                         (code == Code::kDeadlineExceeded && slot->draw.deadline);
  // The server refuses a deadline that it cannot keep, before it passes.
  const bool early = code == Code::kDeadlineExceeded &&
                     static_cast<double>(now - slot->sent_ns) < 0.9e6 * options_.deadline_ms;
  if (code == Code::kOk || (asked_for && !early)) {
    return Continue(slot, std::chrono::milliseconds(0));
  }
  Continue(slot, std::clamp<std::chrono::milliseconds>(rest, kRestAfterFailure, kRestMost));
}

bool LoadRunner::Expected(const Slot& slot, Code code) const {
  return code == Code::kOk || options_.allowed.contains(code) ||
         (code == Code::kCancelled && slot.draw.cancel_after_ms >= 0) ||
         (code == Code::kDeadlineExceeded && slot.draw.deadline);
}

void LoadRunner::Record(const Slot& slot, const CallOutcome& outcome, int64_t now_ns) {
  const Code code = outcome.status.code();
  // Calls cancelled by this program at the end count as unanswered.
  if (abandoning_ && code == Code::kCancelled) return;
  LoadRecorder& recorder = *measurement_->recorders()[static_cast<size_t>(outcome.connection)];
  const MutexLock lock(recorder.mutex);
  if (code == Code::kOk) {
    recorder.interval.Record(now_ns - slot.sent_ns);
    const bool counted_run = options_.count > 0;
    if (counted_run ? slot.measured
                    : now_ns >= measurement_->begin_ns() && now_ns < measurement_->end_ns()) {
      LoadStats& window = recorder.windows[measurement_->window_of(now_ns)];
      ++window.window_ok;
      window.window_bytes_in += static_cast<double>(slot.draw.item->encoded->payload_bytes());
      window.window_bytes_out += static_cast<double>(outcome.payload_bytes);
      window.window_flops += slot.draw.item->flops;
    }
  }
  if (!slot.measured) return;
  for (int64_t last = last_answer_ns_; last < now_ns;) {
    if (last_answer_ns_.compare_exchange_weak(last, now_ns)) break;
  }
  LoadStats& stats = recorder.windows[measurement_->window_of(slot.intended_ns)];
  ++stats.sent;
  ++stats.by_code[code];
  stats.held_back += slot.held_back;
  stats.retries += outcome.attempts - 1;
  const std::string& name = outcome.server_id.empty() ? outcome.server : outcome.server_id;
  if (!name.empty()) stats.servers[name].Add(outcome.server, code);
  if (!Expected(slot, code)) ++stats.unexpected;
  if (code != Code::kOk) {
    stats.first_message.try_emplace(code, outcome.status.message());
    return;
  }
  stats.from_intended.Record(now_ns - slot.intended_ns);
  stats.from_sent.Record(now_ns - slot.sent_ns);
  stats.AddPhases(outcome.result.timings, now_ns - slot.sent_ns);
  stats.batch_requests += static_cast<double>(outcome.result.batch_requests);
  if (!outcome.result.check) return;
  const RowsReport& check = *outcome.result.check;
  if (check.ok) ++stats.checks_passed;
  if (check.undecided) ++stats.checks_undecided;
  if (!check.failed()) return;
  ++stats.checks_failed;
  if (stats.first_check_failure.empty()) {
    stats.first_check_failure = "request " + outcome.result.request_id + ": " + check.detail;
  }
}

void LoadRunner::Continue(Slot* slot, std::chrono::milliseconds rest) {
  if (open_loop_ || stopping_) return Retire(slot);
  if (rest == std::chrono::milliseconds(0)) return Send(slot, NowNs());
  timer_->At(Clock::now() + rest, [this, slot] { Send(slot, NowNs()); });
}

void LoadRunner::Retire(Slot* slot) {
  const MutexLock lock(mutex_);
  free_.push_back(slot);
  --outstanding_;
  changed_.NotifyAll();
}

void LoadRunner::Watch() {
  int64_t shown = NowNs();
  const auto finished = [this] {
    if (interrupted_->load() || NowNs() >= measurement_->end_ns()) return true;
    return options_.count > 0 && measured_ >= options_.count;
  };
  for (; !finished(); measurement_->Judge(NowNs())) {
    const int64_t now = NowNs();
    if (now - shown >= 1'000'000'000) {
      Progress(now, shown);
      shown = now;
    }
    SleepUntil(std::min({measurement_->end_ns(), measurement_->next_ns(), shown + 1'000'000'000,
                         now + 50'000'000}));
  }
}

void LoadRunner::WaitForAnswers(LoadResult* result) {
  const auto grace = std::chrono::nanoseconds(Ns(result->interrupted ? 0 : options_.grace_s));
  const auto give_up = Clock::now() + grace;
  const MutexLock lock(mutex_);
  while (outstanding_ > 0 && Clock::now() < give_up && !interrupted_->load()) {
    changed_.WaitUntil(mutex_, std::min(give_up, Clock::now() + std::chrono::milliseconds(50)));
  }
  result->unanswered = outstanding_;
  abandoning_ = true;
}

void LoadRunner::Progress(int64_t now_ns, int64_t since_ns) {
  if (options_.quiet) return;
  const LoadInterval interval = TakeInterval(measurement_->recorders());
  int64_t outstanding;
  {
    const MutexLock lock(mutex_);
    outstanding = outstanding_;
  }
  const double seconds = static_cast<double>(now_ns - since_ns) * 1e-9;
  const bool warming = since_ns < measurement_->begin_ns() - 1'000'000;
  char text[256];
  std::snprintf(text, sizeof text,
                "%7.1f s%s  %8.0f req/s  %6.2f GB/s  p50 %8.3f ms  p99 %8.3f ms  %5lld out",
                static_cast<double>(now_ns - measurement_->begin_ns()) * 1e-9 + 0.0,
                warming ? " warm-up" : "        ",
                static_cast<double>(interval.from_sent.count()) / seconds,
                (interval.window_bytes - shown_bytes_) / seconds * 1e-9,
                static_cast<double>(interval.from_sent.ValueAt(0.5)) * 1e-6,
                static_cast<double>(interval.from_sent.ValueAt(0.99)) * 1e-6,
                static_cast<long long>(outstanding));
  std::string line = text;
  if (interval.unexpected > 0) {
    line += "  " + std::to_string(interval.unexpected) + " unexpected";
  }
  shown_bytes_ = interval.window_bytes;
  // Skipped rather than waited for: this thread also ends the measurement.
  pollfd reader{STDERR_FILENO, POLLOUT, 0};
  if (poll(&reader, 1, 0) > 0) std::fprintf(stderr, "%s\n", line.c_str());
}

}  // namespace attend::client
