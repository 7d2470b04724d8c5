// SPDX-License-Identifier: Apache-2.0
//
// One request on its way through the server. Ownership passes along as a single
// std::unique_ptr<Request>: codec, queue, batch, completion, responder. A request ends with exactly
// one call of Finish().

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
#include "kernels/contract/tree.h"
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

// Whether the answer goes through the reference check, and on whose behalf.
enum class AnswerCheck {
  kNone,
  kAsked,    // the client asked for it: if it cannot be checked, the request fails
  kSampled,  // sampled by Engine::Place: if it cannot be checked, that is no failure
  kSkipped,  // was kSampled, but the checker had no room when it was submitted
};

// State that a protocol other than attend.v1 keeps from a request for its answer.
struct ProtocolState {
  virtual ~ProtocolState() = default;
  // The request's message is no longer read. Frees state that was kept for decoding, because
  // message memory is not counted while requests wait.
  virtual void EndDecoding() {}
};

// Bytes of tensors copied from and to files that the client shares.
struct FileBytes {
  int64_t input = 0;
  int64_t output = 0;
};

// Sent to the client with the status of a refused request.
struct Refusal : CacheRefusal {
  int64_t retry_after_ms = 0;  // when to retry; 0: not known, the server estimates it
};

struct Request;

// The destination of an answer. Finish is called exactly once, from any thread, and takes ownership
// of the request.
class Responder {
 public:
  virtual ~Responder() = default;
  virtual void Finish(std::unique_ptr<Request> request) = 0;
  // Whether the answer is no longer wanted. Once true, stays true.
  virtual bool unwanted() const { return false; }
  // The client's address, empty if unknown. May be called only until Finish has been called.
  virtual std::string Peer() const { return {}; }
};

struct Request {
  // Set by the codec and the service.
  uint64_t id = 0;         // assigned by the server, unique in the process: cancellation, logs
  std::string request_id;  // the client's, or derived from id
  Layout layout = Layout::kBhld;
  Attention attention;                   // its pointers point into the spans
  std::optional<BackwardPass> backward;  // set for a request for gradients; its pointers too
  TreeView tree;           // a draft's tree; attention.bias is where it is written out
  int64_t tree_bytes = 0;  // of that bias, until it is written; else 0
  HostBlock input;         // every tensor and array that the kernel reads, unless placed elsewhere
  InputSource source;      // where the inputs are
  HostBlock output;        // the response's tensors (output_tensors.h), each 256-byte aligned
  SpanList input_spans;    // the bytes read, wherever they are
  SpanList output_spans;   // the bytes written
  UploadBudget::Hold upload;  // chunked: held until all bytes have arrived
  std::optional<Pass> asked;  // the pass of the RPC method, then that of the message
  std::string kernel;         // requested by name; empty: the server chooses
  AnswerCheck check = AnswerCheck::kNone;
  bool lse_for_check = false;  // LSE is computed only for the check and not returned
  int32_t priority = 0;
  int tenant = 0;                             // index into the engine's tenants
  Scopes scopes = Scopes::OfUsers();          // what the caller may do
  std::shared_ptr<const std::string> caller;  // the caller's name for logs; null: not authenticated
  LimitHold limits;  // its share of the tenant's limits, held until it ends
  TimePoint deadline = kNever;
  Transport transport = Transport::kInline;
  int64_t message_bytes = 0;  // size of the request's messages on the wire
  FileBytes file_bytes;
  std::unique_ptr<ProtocolState> protocol;  // null: attend.v1
  int64_t elements = 1;       // its count in the batch size, where a protocol counts sequences
  uint64_t answer_place = 0;  // position among a stream's answers, if they are ordered
  // Whether Engine::Submit may run the request on the calling thread and finish it before
  // returning. Requires that the responder may be called there.
  bool may_end_in_submit = false;
  // The thread that submits several requests in a row and then calls Engine::PlanNow. On that
  // thread Submit leaves a request that is not large in its queue, so that they all form one batch.
  std::optional<std::thread::id> planner;
  Responder* responder = nullptr;

  Placement placement;  // set by Engine::Place

  // Set by Engine::Submit.
  int device = 0;  // index into the engine's devices
  Selection selection;

  // Set on the way through the server.
  double flops = 0;
  double kernel_cost = 0;   // for the selected kernel (kernels/contract/cost.h)
  int64_t batch_bytes = 0;  // counts against the batch's byte budget
  int64_t cost = 0;         // charged to its tenant, see Batcher::Cost
  bool in_parts = false;    // its device computes it in parts (Backend::RunsInParts)
  bool large = false;       // in parts and above a budget while it waits: runs alone
  Duration expected{0};     // expected device time (schedule/estimator.h); 0: not known
  bool tried = false;       // admitted as a probe although it is expected to take too long
  uint64_t sequence = 0;    // order of arrival in the queue
  TimePoint received;       // message complete; chunked: header complete
  TimePoint enqueued;       // accepted by the queue
  TimePoint started;        // handed to a lane
  TimePoint completed;      // lane done
  int64_t batch_requests = 0;
  int64_t batch_elements = 0;  // over all requests of its batch
  int64_t copy_in_ns = 0;
  int64_t kernel_ns = 0;
  int64_t copy_out_ns = 0;
  int64_t check_ns = 0;
  std::string device_name;
  std::optional<RowsReport> report;  // if checked
  bool sessions_ending = false;      // it uses sessions, and the server is draining
  Status status;                     // the outcome
  Refusal refusal;                   // details of a refusal

  // Stops its running kernel or check early. Set only by StopRunning, under the lock of the
  // scheduler or checker that runs it.
  StopFlag stop;
  Code stop_code = Code::kOk;  // the reason, if stopped

  Pass pass() const { return backward ? Pass::kBackward : Pass::kForward; }
  // Whether the answer is to be checked. From submission until it ends, such a request occupies a
  // place in the checker's queue.
  bool to_be_checked() const {
    return check == AnswerCheck::kAsked || check == AnswerCheck::kSampled;
  }
};

// A running request, described for logs.
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

// DEADLINE_EXCEEDED if the deadline has already passed when the request arrives.
inline Status CheckArrival(TimePoint deadline, TimePoint now) {
  if (deadline == kNever || deadline > now) return Status();
  return Because(Rejection::kDeadlinePassed,
                 Status(Code::kDeadlineExceeded, "the deadline had passed on arrival"));
}

// The code for a request cancelled by the client. The transport reports a call at its deadline as
// if the client had cancelled it.
inline Code CancelCode(const Request& request, TimePoint now) {
  return request.deadline <= now ? Code::kDeadlineExceeded : Code::kCancelled;
}

// Whether a cancellation now most likely means that the client's deadline passed. Clients count
// from sending, the server from reading, so the client's deadline passes first: by some 10 ms under
// load.
inline bool CancelledLate(const Request& request, TimePoint now) {
  if (request.deadline == kNever) return false;
  constexpr Duration kLeast = std::chrono::milliseconds(20);
  const Duration allowed = request.deadline - request.received;
  return request.deadline - now <= std::max(kLeast, allowed / 4);
}

// The status of a request that ended early. `did` ("the request ran") and `still_did` ("the request
// was still running") describe its state.
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

// The status of a request that was stopped while it ran.
inline Status StoppedStatus(Code code) {
  return EndedStatus(code, "the request ran", "the request was still running");
}

inline std::array<OutputTensor, kOutputsMax> OutputsOf(const Request& request) {
  return OutputsOf(request.attention, request.backward, request.lse_for_check);
}

// Tensor bytes in the messages of a successful response.
inline int64_t AnswerBytes(const Request& request) {
  const SharedTensors* const shared = request.source.shared();
  int64_t bytes = (shared == nullptr ? 0 : -shared->output_bytes) - request.file_bytes.output;
  for (const OutputTensor& each : OutputsOf(request)) {
    bytes += each.bytes;
  }
  return bytes;
}

// Ends the request with `status`. If OK, its results are in `output`.
inline void Finish(std::unique_ptr<Request> request, Status status) {
  request->status = std::move(status);
  Responder* const responder = request->responder;
  responder->Finish(std::move(request));
}

}  // namespace attend
