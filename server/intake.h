// SPDX-License-Identifier: Apache-2.0
//
// The way of one message from gRPC's buffers to the engine's queue, the same for unary calls and
// streams. Called on gRPC's threads, which it never makes wait: the bytes of large messages are
// copied by the copy pool, on whose threads the way then goes on.

#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "server/codec.h"
#include "server/copy_pool.h"
#include "server/engine.h"
#include "server/metrics.h"
#include "server/request.h"

namespace attend {

// A call as intake sees it. Reference-counted: gRPC may end a call while intake still looks at it.
class Call : public Responder {
 public:
  void Ref() { references_.fetch_add(1, std::memory_order_relaxed); }
  void Unref() {
    if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

  // Nobody waits for this call's answers any more. Once true, stays true.
  bool cancelled() const { return cancelled_.load(std::memory_order_seq_cst); }
  // The request is about to enter the queue of `device`.
  virtual void OnAdmitted(uint64_t id, int device) = 0;

 protected:
  ~Call() override = default;
  void SetCancelled() { cancelled_.store(true, std::memory_order_seq_cst); }

 private:
  std::atomic<int> references_{1};
  std::atomic<bool> cancelled_{false};
};

class Intake {
 public:
  struct Limits {
    int64_t message_bytes_max = 0;
    int64_t answer_bytes_max = 0;
  };

  // All must outlive the intake and every call in it.
  Intake(Engine& engine, CopyPool& copies, Metrics& metrics, const Clock& clock,
         const Limits& limits);

  // Takes the message to the engine, or ends the request with the reason why not; either way the
  // request ends by one call of its responder, which is `call`. Of `request` the id, the responder,
  // the deadline and the time of arrival are set.
  void Accept(Call& call, std::unique_ptr<Request> request, grpc::ByteBuffer message);

 private:
  struct Work;       // one message while it is taken apart
  struct LargeWork;  // the same, when threads of the copy pool go on with it

  void AcceptSmall(Call& call, std::unique_ptr<Request> request, Work& work);
  void AcceptLarge(Call& call, std::unique_ptr<Request> request, Work& work);
  Status CheckEarly(const Call& call, const Request& request, const grpc::ByteBuffer& message);
  Status Decode(Request& request, Work& work, google::protobuf::Arena& arena);
  Status Admit(Request& request, const Work& work);
  void Submit(Call& call, std::unique_ptr<Request> request);
  Status Reject(Rejection reason, Status status);
  Status RejectRefusal(Rejection exhausted, Status status);

  Engine& engine_;
  CopyPool& copies_;
  Metrics& metrics_;
  const Clock& clock_;
  const Limits limits_;
};

}  // namespace attend
