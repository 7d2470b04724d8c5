// SPDX-License-Identifier: Apache-2.0
//
// A call over shared memory may fail only because the server does not know the memory (NOT_FOUND)
// or was replaced (UNAVAILABLE). Unless it is on sessions or with SHARED, plain_ keeps it as it was
// given, and SentAgain sends it a second time without the memory, within the same deadline. A place
// that a failed attempt may still write to is not reused.

#include "client/c/call_state.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "client/c/params.h"
#include "client/c/status.h"
#include "client/forward_pass.h"

namespace attend::client::c {
namespace {

thread_local bool in_done = false;

}  // namespace

void CallState::OutOfDone(std::function<void()> function) {
  if (in_done) {
    std::thread(std::move(function)).detach();
  } else {
    function();
  }
}

CallState::~CallState() {
  outcome_ = {};  // refers to the region
  placed_.on_device.reset();
  if (placed_.owner != nullptr && placed_.outputs != nullptr) {
    placed_.owner->GiveBack(std::move(placed_.outputs));
  }
}

std::shared_ptr<const void> CallState::Borrow() {
  return {this, [self = shared_from_this()](const void*) {
            bool ends = false;
            {
              const MutexLock lock(self->mutex_);
              self->released_ = true;
              ends = self->Ends();
            }
            if (ends) self->RunDone();
          }};
}

bool CallState::Ends() {
  if (ended_ || !started_ || !answered_ || !released_) return false;
  ended_ = true;
  changed_.NotifyAll();
  return true;
}

void CallState::RunDone() const {
  if (done_ == nullptr) return;
  const bool nested = std::exchange(in_done, true);
  done_(user_);
  in_done = nested;
}

void CallState::Started() {
  bool ends = false;
  {
    const MutexLock lock(mutex_);
    started_ = true;
    ends = Ends();
  }
  if (ends) RunDone();
}

Status CallState::Read(const attend_client_params& params, ShareOptions share, Sent* sent) {
  const std::shared_ptr<ClientState> client = client_.lock();
  AttentionCall call;
  ATTEND_RETURN_IF_ERROR(ReadParams(params, Borrow(), &call));
  ATTEND_RETURN_IF_ERROR(ReadOptions(params, client->tenant(), &sent->options));
  Result<DeviceTensors> devices = DevicesOf(params, call);
  if (!devices.ok()) return devices.status();
  CallOptions& options = sent->options;
  const TimePoint begin = Now();
  const TimePoint deadline = options.timeout.count() == 0 || options.timeout > kNever - begin
                                 ? kNever
                                 : begin + options.timeout;
  const bool shared = params.transport == ATTEND_CLIENT_SHARED;
  if (shared || PayloadBytes(call) + AnswerBytes(call) >= kPreparedBytesMin) {
    // If the server does not answer, the call will report that.
    const Status prepared = client->Prepare(options.timeout);
    if (shared) ATTEND_RETURN_IF_ERROR(prepared);
  }
  if (call.backward && call.backward->o.shape.empty()) {
    ATTEND_RETURN_IF_ERROR(BringToHost(*devices, &call));
    devices->ordinals.clear();
    ATTEND_RETURN_IF_ERROR(AddForwardPass(client->client(), options, &call));
  }
  share.transport = params.transport;
  share.on_device = share.on_device && !call.check;
  Result<SharedCall> placed = client->Share(call, *devices, share);
  if (!placed.ok()) return placed.status();
  sent->shared = std::move(*placed);
  if (sent->shared.on_device) options.payload = Payload::kDiscard;  // stays in GPU memory
  if (deadline != kNever) {
    options.timeout =
        std::max<std::chrono::nanoseconds>(deadline - Now(), std::chrono::nanoseconds(1));
  }
  const MutexLock lock(mutex_);
  deadline_ = deadline;
  if (sent->shared.pool == nullptr) return Status();
  placed_ = {sent->shared.pool, sent->shared.owner, std::move(sent->shared.on_device),
             std::move(sent->shared.inputs), std::move(sent->shared.outputs)};
  in_session_ = share.in_session;
  if (params.transport != ATTEND_CLIENT_SHARED && !in_session_) {
    plain_ = std::move(call);
    devices_ = std::move(*devices);
    options_ = options;
    options_.payload = Payload::kCopy;
  }
  options.server = sent->shared.server;
  return Status();
}

void CallState::Keep(CallHandle handle, bool again) {
  bool cancelled = false;
  {
    const MutexLock lock(mutex_);
    // The first attempt may have failed, and the second have begun, before Start gets here.
    if (sent_again_ && !again) return;
    sent_again_ = again;
    handle_ = handle;
    cancelled = cancelled_;
  }
  if (cancelled) handle.Cancel();
}

void CallState::Start(const attend_client_params& params) {
  const std::shared_ptr<ClientState> client = client_.lock();
  Sent sent;
  if (Status failed = Read(params, {}, &sent); !failed.ok()) {
    Answered({.status = std::move(failed)});
    return;
  }
  Keep(client->client().CallAsync(
      sent.shared.call, sent.options,
      [self = shared_from_this()](CallOutcome outcome) { self->Answered(std::move(outcome)); }));
}

void CallState::StartOn(Stream* stream, const std::vector<Session*>& sessions, int32_t layer,
                        const attend_client_params& params) {
  Sent sent;
  ShareOptions share;
  share.in_session = !sessions.empty();
  share.on_device = sessions.empty() && stream == nullptr;
  share.server = sessions.empty() ? stream->server() : sessions.front()->server();
  if (Status failed = Read(params, share, &sent); !failed.ok()) {
    Answered({.status = std::move(failed)});
    return;
  }
  if (stream == nullptr) {
    Keep(Session::AttendAsync(
        sessions, layer, std::move(sent.shared.call), sent.options,
        [self = shared_from_this()](CallOutcome outcome) { self->Answered(std::move(outcome)); }));
    return;
  }
  const auto answered = [self = shared_from_this()](StreamAnswer answer) {
    self->Answered({.status = std::move(answer.status),
                    .result = std::move(answer.result),
                    .payload_bytes = answer.payload_bytes});
  };
  if (sessions.empty()) {
    Keep(stream->Send(sent.shared.call, answered));
  } else {
    Keep(Session::Send(*stream, sessions, layer, std::move(sent.shared.call), answered));
  }
}

bool CallState::SentAgain(const CallOutcome& outcome) {
  const Code code = outcome.status.code();
  const std::shared_ptr<ClientState> client = client_.lock();
  if (client == nullptr || (code != Code::kNotFound && code != Code::kUnavailable)) return false;
  std::optional<AttentionCall> plain;
  DeviceTensors devices;
  CallOptions options;
  Placed lost;  // not reused: the first attempt may still read and write there
  {
    const MutexLock lock(mutex_);
    if (cancelled_ || !plain_ || Now() >= deadline_) return false;
    plain.swap(plain_);
    devices = std::move(devices_);
    options = options_;
    if (deadline_ != kNever) options.timeout = deadline_ - Now();
    lost = std::exchange(placed_, Placed());
  }
  client->Lose(lost.pool, code);
  lost = {};
  if (!BringToHost(devices, &*plain).ok()) return false;
  const auto answered = [self = shared_from_this()](CallOutcome again) {
    self->Answered(std::move(again));
  };
  Keep(client->client().CallAsync(*plain, options, answered), /*again=*/true);
  return true;
}

void CallState::Lose(const std::shared_ptr<RegionPool>& pool, bool in_session, Code code) {
  const std::shared_ptr<ClientState> client = client_.lock();
  if (client == nullptr || pool == nullptr) return;
  if (code != Code::kNotFound && code != Code::kUnavailable) return;
  // NOT_FOUND or a conflict may concern the session rather than the memory.
  if (in_session) {
    client->Doubt(pool);
  } else {
    client->Lose(pool, code);
  }
}

void CallState::Answered(CallOutcome outcome) {
  if (SentAgain(outcome)) return;
  const Code code = outcome.status.code();
  std::optional<AttentionCall> plain;  // destroyed without the lock: it holds the caller's memory
  Placed placed;
  bool in_session = false;
  {
    const MutexLock lock(mutex_);
    plain.swap(plain_);
    in_session = in_session_;
    placed.pool = placed_.pool;
    placed.owner = placed_.owner;
    placed.inputs = std::move(placed_.inputs);
    if (code != Code::kOk) {
      // The attempt may still write there.
      placed.on_device.swap(placed_.on_device);
      placed.outputs = std::move(placed_.outputs);
    }
  }
  if (code != Code::kOk) {
    Lose(placed.pool, in_session, code);
  } else if (placed.pool != nullptr) {
    if (const std::shared_ptr<ClientState> client = client_.lock()) client->Trust(placed.pool);
    if (placed.inputs != nullptr) placed.owner->GiveBack(std::move(placed.inputs));
  }
  plain.reset();
  placed = {};
  bool ends = false;
  {
    const MutexLock lock(mutex_);
    outcome_ = std::move(outcome);
    answered_ = true;
    ends = Ends();
  }
  if (ends) RunDone();
}

bool CallState::Wait(std::optional<std::chrono::nanoseconds> timeout) {
  const TimePoint begin = Now();
  const TimePoint until = !timeout || *timeout > kNever - begin ? kNever : begin + *timeout;
  const MutexLock lock(mutex_);
  while (!ended_) {
    if (until == kNever) {
      changed_.Wait(mutex_);
    } else if (!changed_.WaitUntil(mutex_, until)) {
      return ended_;
    }
  }
  return true;
}

void CallState::Cancel() {
  CallHandle handle;
  {
    const MutexLock lock(mutex_);
    cancelled_ = true;
    handle = handle_;
  }
  handle.Cancel();
}

const CallOutcome* CallState::outcome() const {
  const MutexLock lock(mutex_);
  return ended_ ? &outcome_ : nullptr;
}

void CallState::Fill(attend_client_answer* answer) const {
  const MutexLock lock(mutex_);
  FillAnswer(outcome_, answer);
  if (placed_.on_device) placed_.on_device->Fill(answer);
}

Status CallState::Copy(const attend_client_tensor& tensor, void* to, int32_t to_memory,
                       void* stream) const {
  const std::vector<int64_t> shape(tensor.shape, tensor.shape + tensor.dims);
  const Result<int64_t> bytes = TensorBytes("tensor", static_cast<DType>(tensor.dtype), shape);
  if (!bytes.ok()) return bytes.status();
  if (*bytes > 0) ATTEND_RETURN_IF_ERROR(NotNull("to", to));
  std::shared_ptr<SharedRegion> region;
  if (tensor.memory != 0) {
    const MutexLock lock(mutex_);
    if (!placed_.on_device) {
      return InvalidArgument("tensor.memory is a GPU's, the answer is the host's");
    }
    region = placed_.outputs;
  }
  return CopyAnswer(region.get(), tensor, to, to_memory, *bytes, stream);
}

void CallState::Used(void* stream) {
  std::shared_ptr<SharedRegion> region;
  {
    const MutexLock lock(mutex_);
    if (!placed_.on_device || placed_.outputs == nullptr) return;
    region = placed_.outputs;
  }
  if (KeepUntil(*region, stream).ok()) return;
  const MutexLock lock(mutex_);
  placed_.outputs = nullptr;  // not reused; `on_device` holds it to the end
}

}  // namespace attend::client::c
