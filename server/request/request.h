// SPDX-License-Identifier: Apache-2.0
//
// One request on its way through the server. A single std::unique_ptr<Request> passes its ownership
// on: codec, queue, batch, completion, then the responder. It ends with exactly one call of
// Finish().

#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/contract/problem.h"
#include "kernels/contract/select.h"
#include "kernels/contract/stop_flag.h"
#include "kernels/reference/check_rows.h"
#include "kernels/util/clock.h"
#include "kernels/util/status.h"
#include "server/auth/caller.h"
#include "server/limits/tenant_limits.h"
#include "server/memory/host_pool.h"
#include "server/memory/upload_budget.h"
#include "server/request/input_source.h"
#include "server/request/output_tensors.h"
#include "server/request/placement.h"
#include "server/util/rejection.h"

namespace attend {

// Values equal attend.v1.Layout.
enum class Layout : int32_t { kBhld = 1, kBlhd = 2, kLhd = 3 };

// Whether the reference check is to see the answer, and for whom.
enum class AnswerCheck {
  kNone,
  kAsked,    // the client asked for it: without it, its request fails
  kSampled,  // Engine::Place chose the request; what keeps it from being checked is no failure
  kSkipped,  // was kSampled; when it was submitted, the checker had no room
};

// Kept by a protocol other than attend.v1 of a request for its answer.
struct ProtocolState {
  virtual ~ProtocolState() = default;
  // The request's message is not read any more: what was kept for that may go, since memory of
  // messages is not counted while requests wait.
  virtual void EndDecoding() {}
};

// Bytes of tensors that are copied from and to files which the client shares.
struct FileBytes {
  int64_t input = 0;
  int64_t output = 0;
};

// Told to a client, beside its status, of a request that was refused.
struct Refusal : CacheRefusal {
  int64_t retry_after_ms = 0;  // when it may come again; 0: not known, the server estimates it
};

struct Request;

// Where an answer goes. Finish is called exactly once, from any thread, and takes the request.
class Responder {
 public:
  virtual ~Responder() = default;
  virtual void Finish(std::unique_ptr<Request> request) = 0;
  // The answer is no longer wanted. Once true, stays true.
  virtual bool unwanted() const { return false; }
  // The client's address; only until Finish has been called. Empty if there is none.
  virtual std::string Peer() const { return {}; }
};

struct Request {
  // Set by the codec and the service.
  uint64_t id = 0;         // the server's own, unique while it runs: cancellation, logs
  std::string request_id;  // the client's, or made from id
  Layout layout = Layout::kBhld;
  Attention attention;                   // pointers lead into the spans
  std::optional<BackwardPass> backward;  // set: the gradients are asked for; in the spans too
  HostBlock input;        // every tensor and array that the kernel reads, unless they are elsewhere
  InputSource source;     // where they are
  HostBlock output;       // what the answer has (output_tensors.h), each 256-byte aligned
  SpanList input_spans;   // the bytes that are read, wherever they are
  SpanList output_spans;  // and written
  UploadBudget::Hold upload;  // chunked: until the bytes are complete
  std::optional<Pass> asked;  // the pass that the call takes, then what the message asks for
  std::string kernel;         // asked for by name; empty = the server's choice
  AnswerCheck check = AnswerCheck::kNone;
  bool lse_for_check = false;  // LSE is computed for its check alone, the answer has none
  int32_t priority = 0;
  int tenant = 0;                             // index into the engine's tenants; the caller's
  Scopes scopes = Scopes::OfUsers();          // what the caller may do
  std::shared_ptr<const std::string> caller;  // its name for logs; null: not authenticated
  LimitHold limits;                           // what it holds of its tenant's, until it ends
  TimePoint deadline = kNever;
  Transport transport = Transport::kInline;
  int64_t message_bytes = 0;  // of the request's messages on the wire
  FileBytes file_bytes;
  std::unique_ptr<ProtocolState> protocol;  // null: attend.v1
  int64_t elements = 1;  // what it counts in its batch's size, where a protocol counts sequences
  uint64_t answer_place = 0;  // among a stream's answers, if they have an order
  // Whether Engine::Submit may run the request on the caller's thread and end it before it returns;
  // only if the responder can be called then.
  bool may_end_in_submit = false;
  // The thread that submits more requests at once, and then calls Engine::PlanNow. On that thread
  // Submit leaves a request that is not large in its queue, so that all of them form a batch.
  std::optional<std::thread::id> planner;
  Responder* responder = nullptr;

  Placement placement;  // set by Engine::Place

  // Set by Engine::Submit.
  int device = 0;  // index into the engine's devices
  Selection selection;

  // Set on the way.
  double flops = 0;
  double kernel_cost = 0;   // by the selected kernel (kernels/contract/cost.h)
  int64_t batch_bytes = 0;  // counts towards the batch's byte limit
  int64_t cost = 0;         // what its tenant is charged, see Batcher::Cost
  bool in_parts = false;    // its device computes it in parts (Backend::RunsInParts)
  bool large = false;       // in parts, waiting, above a budget: runs alone
  Duration expected{0};     // device time that it takes (schedule/estimator.h); 0: not known
  bool tried = false;       // it is let through although it is expected to take too long
  uint64_t sequence = 0;    // of its arrival in the queue
  TimePoint received;       // message complete; chunked: header complete
  TimePoint enqueued;       // accepted by the queue
  TimePoint started;        // handed to a lane
  TimePoint completed;      // lane done
  int64_t batch_requests = 0;
  int64_t batch_elements = 0;  // of all its batch's requests
  int64_t copy_in_ns = 0;
  int64_t kernel_ns = 0;
  int64_t copy_out_ns = 0;
  int64_t check_ns = 0;
  std::string device_name;
  std::optional<RowsReport> report;  // if checked
  bool sessions_ending = false;      // it is on sessions, and the server drains
  Status status;                     // the outcome
  Refusal refusal;                   // with it

  // Ends its running kernel or check early. Set only by StopRunning, under the lock of the
  // scheduler or checker that runs it.
  StopFlag stop;
  Code stop_code = Code::kOk;  // with it: why

  Pass pass() const { return backward ? Pass::kBackward : Pass::kForward; }
  // Once submitted, such a request has a place with the checker until it ends.
  bool to_be_checked() const {
    return check == AnswerCheck::kAsked || check == AnswerCheck::kSampled;
  }
};

// A running request, described for people.
struct BusyRequest {
  uint64_t id = 0;
  std::string request_id;
  std::string peer;
  std::string doing;
};

inline BusyRequest Busy(const Request& request, std::string doing) {
  return {request.id, request.request_id,
          request.responder == nullptr ? std::string() : request.responder->Peer(),
          std::move(doing)};
}

// Stops the request, unless it was already stopped.
inline void StopRunning(Request& request, Code code) {
  if (request.stop.set()) return;
  request.stop_code = code;
  request.stop.Set();
}

// DEADLINE_EXCEEDED if a request arrives when its deadline has passed.
inline Status CheckArrival(TimePoint deadline, TimePoint now) {
  if (deadline == kNever || deadline > now) return Status();
  return Because(Rejection::kDeadlinePassed,
                 Status(Code::kDeadlineExceeded, "the deadline had passed on arrival"));
}

// Why a client's cancellation ends its request: gRPC ends a call at its deadline as if the client
// had cancelled it.
inline Code CancelCode(const Request& request, TimePoint now) {
  return request.deadline <= now ? Code::kDeadlineExceeded : Code::kCancelled;
}

// Whether a cancellation that comes now is a client's deadline that passes. Clients count from when
// they send, the server from when it reads, so theirs pass earlier, under load by some 10 ms.
inline bool CancelledLate(const Request& request, TimePoint now) {
  if (request.deadline == kNever) return false;
  constexpr Duration kLeast = std::chrono::milliseconds(20);
  const Duration allowed = request.deadline - request.received;
  return request.deadline - now <= std::max(kLeast, allowed / 4);
}

// The status of a request that ended early, by what it did then ("the request ran") and still did
// ("the request was still running").
inline Status EndedStatus(Code code, const std::string& did, const std::string& still_did) {
  switch (code) {
    case Code::kDeadlineExceeded:
      return Status(code, "the deadline passed while " + did);
    case Code::kUnavailable:
      return Unavailable("the server is stopping, and " + still_did);
    default:
      return Status(code, "cancelled by the client while " + did);
  }
}

// The status of a stopped request.
inline Status StoppedStatus(Code code) {
  return EndedStatus(code, "the request ran", "the request was still running");
}

inline std::array<OutputTensor, kOutputsMax> OutputsOf(const Request& request) {
  return OutputsOf(request.attention, request.backward, request.lse_for_check);
}

// Tensor bytes in the messages of a successful answer.
inline int64_t AnswerBytes(const Request& request) {
  const SharedTensors* const shared = request.source.shared();
  int64_t bytes = (shared == nullptr ? 0 : -shared->output_bytes) - request.file_bytes.output;
  for (const OutputTensor& each : OutputsOf(request)) {
    bytes += each.bytes;
  }
  return bytes;
}

// Ends the request with `status` (OK: its results are in `output`).
inline void Finish(std::unique_ptr<Request> request, Status status) {
  request->status = std::move(status);
  Responder* const responder = request->responder;
  responder->Finish(std::move(request));
}

}  // namespace attend
