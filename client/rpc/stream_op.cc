// SPDX-License-Identifier: Apache-2.0

#include "client/rpc/stream_op.h"

#include <cassert>
#include <utility>

#include "client/rpc/op_lock.h"

namespace attend::client {

void Refuse(const StreamCallback& callback, Status status) {
  callback({.status = std::move(status)});
}

StreamOp::StreamOp(ConnectionPool* pool, const StreamOptions& options, RequestIds* ids,
                   const std::atomic<int64_t>* message_bytes_max)
    : pool_(pool),
      options_(options),
      ids_(ids),
      message_bytes_max_(message_bytes_max),
      lease_(pool->Acquire(pool->CheckServer(options.server).ok() ? options.server : "")),
      connection_(lease_->index),
      loop_(lease_->loop) {
  for (int slot = 0; slot < kSlots; ++slot) events_[slot] = Event{this, slot};
}

void* StreamOp::Expect(Slot slot) {
  assert(!ended_ && self_ != nullptr && "nothing would keep it alive until the event");
  ++expected_;
  return events_[slot].Tag();
}

void StreamOp::Start() {
  static const std::string* const method =
      new std::string("/attend.v1.AttentionService/AttendStream");
  Status refused = CheckNames(options_.tenant, options_.traceparent);
  if (refused.ok()) refused = pool_->CheckServer(options_.server);
  if (refused.ok() && !loop_->Add(this)) {
    refused = Status(Code::kCancelled, "the client is being destroyed");
  }
  if (!refused.ok()) {
    lease_.Release();
    const MutexLock lock(mutex_);
    final_ = std::move(refused);
    closing_ = ended_ = true;
    return;
  }
  const OpLock lock(mutex_, loop_);
  self_ = shared_from_this();
  pool_->Introduce(options_.tenant, options_.traceparent, &*context_);
  if (options_.timeout.count() > 0) context_->set_deadline(DeadlineAfter(options_.timeout));
  call_ = lease_->stub.PrepareCall(&*context_, *method, loop_->queue());
  call_->StartCall(Expect(kStarted));
  if (cancelled_) PostCancel();  // cancelled between Add and here
}

CallHandle StreamOp::Send(std::shared_ptr<const EncodedCall> call, std::string_view id,
                          StreamCallback callback) {
  std::string name = id.empty() ? std::string(ids_->Next().view()) : std::string(id);
  // gRPC would end the whole stream over one message that is too large.
  Status refused =
      call->chunked() != nullptr
          ? InvalidArgument("the call is encoded in chunks, a stream takes one message")
          : call->CheckMessageBytes(message_bytes_max_->load(std::memory_order_relaxed));
  SharedOutputs outputs = call->outputs();
  Pending pending{std::move(callback), std::move(call), std::move(outputs)};
  if (refused.ok()) {
    const OpLock lock(mutex_, loop_);
    const uint64_t serial = pending.serial = ++serials_;
    if (closing_ || no_more_) {
      refused = closing_ && !final_.ok() ? final_ : Unavailable("the stream has ended");
    } else if (pending_.try_emplace(name, std::move(pending)).second) {  // else it stays as it was
      queue_.push_back(name);
      PumpWrites();
      return CallHandle(weak_from_this(), std::move(name), serial);
    } else {
      refused = InvalidArgument("request_id \"" + name + "\" is already in flight on this stream");
    }
  }
  Refuse(pending.callback, std::move(refused));
  return CallHandle();
}

void StreamOp::PumpWrites() {
  if (!started_ || writing_ || finish_sent_) return;
  if (!queue_.empty()) {
    const std::string id = std::move(queue_.front());
    queue_.pop_front();
    writing_ = true;
    Pending& next = pending_.at(id);  // present: queued requests leave pending_ and queue_ together
    next.sent = true;
    // No buffer hint: the next request may be cancelled, and then nothing would flush this one.
    call_->Write(next.call->ToByteBuffer(id), Expect(kWritten));
  } else if (no_more_ && !writes_done_sent_) {
    writes_done_sent_ = true;
    call_->WritesDone(Expect(kWritesDone));
  }
}

void StreamOp::FinishCall() {
  if (finish_sent_) return;
  finish_sent_ = true;
  call_->Finish(&grpc_status_, Expect(kFinished));
}

SharedOutputs StreamOp::OutputsOf(const std::string& id) {
  const MutexLock lock(mutex_);
  const auto found = pending_.find(id);
  return found == pending_.end() ? SharedOutputs() : found->second.outputs;
}

void StreamOp::HandleAnswer(grpc::ByteBuffer* buffer) {
  Result<DecodedResponse> decoded = DecodeResponse(
      buffer, options_.payload, [this](const std::string& id) { return OutputsOf(id); });
  decltype(pending_)::node_type answered;
  std::string server_id, server;
  {
    const OpLock lock(mutex_);
    server_id = server_id_;
    server = server_;
    if (decoded.ok()) {
      const auto found = pending_.find(decoded->result.request_id);
      if (found != pending_.end() && found->second.sent) {
        answered = pending_.extract(found);
      } else {
        failure_ = Internal("the server answered request_id \"" + decoded->result.request_id +
                            "\", which is not in flight on this stream");
      }
    } else {
      failure_ = decoded.status();
    }
    // Which request a malformed answer belongs to is unknown, so the stream cannot continue.
    if (!failure_.ok()) context_->TryCancel();
  }
  if (answered.empty() || answered.mapped().callback == nullptr) return;
  const StreamCallback callback = std::move(answered.mapped().callback);
  if (decoded->status.ok()) {
    decoded->status = answered.mapped().call->CheckAnswer(decoded->result);
  }
  answered = {};  // releases the caller's memory before the callback runs
  callback({std::move(decoded->status), std::move(decoded->result), decoded->payload_bytes,
            decoded->retry_after_ms, std::move(server_id), std::move(server)});
}

void StreamOp::EndPending() {
  std::unordered_map<std::string, Pending> pending;
  Status status;
  {
    const MutexLock lock(mutex_);
    pending = std::move(pending_);
    pending_.clear();
    queue_.clear();
    status = final_;
  }
  if (status.ok()) status = Internal("the server ended the stream before answering this request");
  for (auto& [id, request] : pending) {
    request.call = nullptr;
    if (request.callback != nullptr) Refuse(request.callback, status);
  }
}

void StreamOp::OnEvent(int slot, bool ok) {
  grpc::ByteBuffer answer;
  bool last = false;
  {
    const OpLock lock(mutex_);
    --expected_;
    assert(expected_ >= 0 && !ended_);
    switch (slot) {
      case kStarted:
        started_ = ok;
        if (ok) {
          call_->Read(&read_, Expect(kRead));
          PumpWrites();
        } else {
          FinishCall();
        }
        break;
      case kWritten:
        writing_ = false;
        if (ok) PumpWrites();  // a failed write also fails the read, which ends the call
        break;
      case kRead:
        if (ok) {
          answer.Swap(&read_);
          if (server_id_.empty()) {
            server_id_ = ServerIdOf(*context_);
            server_ = pool_->ServerOf(*context_);
          }
          call_->Read(&read_, Expect(kRead));  // before the answer is copied out
        } else {
          FinishCall();
        }
        break;
      case kFinished:
        final_ = failure_.ok() ? FromGrpc(grpc_status_) : failure_;
        closing_ = true;
        break;
      default:
        break;
    }
    last = closing_ && expected_ == 0;
  }
  if (answer.Valid()) HandleAnswer(&answer);
  if (!last) return;
  EndPending();
  std::shared_ptr<Operation> self;
  {
    const OpLock lock(mutex_);
    lease_.Release();
    // Destroyed here rather than with the last handle, whose thread is the user's.
    call_ = nullptr;
    context_.reset();
    ended_ = true;
    self = std::move(self_);
    ended_changed_.NotifyAll();
  }
  loop_->Remove(this);
}

Status StreamOp::Finish() {
  {
    const OpLock lock(mutex_, loop_);
    no_more_ = true;
    if (!ended_) PumpWrites();
  }
  const MutexLock lock(mutex_);
  while (!ended_) ended_changed_.Wait(mutex_);
  return final_;
}

void StreamOp::Cancel() {
  const MutexLock lock(mutex_);
  no_more_ = cancelled_ = true;
  if (self_ != nullptr) PostCancel();
}

void StreamOp::PostCancel() {
  loop_->Post([this, self = self_] { CancelCall(); });
}

void StreamOp::CancelCall() {
  const OpLock lock(mutex_);
  if (!ended_) context_->TryCancel();
}

void StreamOp::CancelRequest(const std::string& id, uint64_t serial) {
  const MutexLock lock(mutex_);
  if (self_ != nullptr) loop_->Post([this, self = self_, id, serial] { EndRequest(id, serial); });
}

void StreamOp::EndRequest(const std::string& id, uint64_t serial) {
  Pending ended;
  {
    const OpLock lock(mutex_);
    const auto found = pending_.find(id);
    if (found == pending_.end() || found->second.serial != serial) return;
    if (found->second.callback == nullptr) return;
    if (found->second.sent) {
      ended.callback = std::exchange(found->second.callback, nullptr);
      ended.call = std::move(found->second.call);
    } else {
      ended = std::move(found->second);
      pending_.erase(found);
      std::erase(queue_, id);
    }
  }
  ended.call = nullptr;
  Refuse(ended.callback, Status(Code::kCancelled, "the request was cancelled"));
}

void StreamOp::WaitForEnd() {
  const MutexLock lock(mutex_);
  while (!ended_) ended_changed_.Wait(mutex_);
}

}  // namespace attend::client
