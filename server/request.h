// SPDX-License-Identifier: Apache-2.0
//
// One call on its way through the server. There is one std::unique_ptr<Request>; whoever holds it
// owns the request: codec, queue, batch, completion, then the responder. It ends by exactly one
// call of Finish().

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "kernels/backend.h"
#include "kernels/check_rows.h"
#include "kernels/problem.h"
#include "kernels/select.h"
#include "kernels/status.h"
#include "server/clock.h"
#include "server/host_pool.h"
#include "server/upload_share.h"

namespace attend {

// Values equal attend.v1.Layout.
enum class Layout : int32_t { kBhld = 1, kBlhd = 2, kLhd = 3 };

// How tensors came in; a metrics label and a field of the answer.
enum class Transport : int32_t { kInline = 0, kChunked = 1 };
inline constexpr int kTransportCount = 2;
constexpr const char* TransportName(Transport transport) {
  return transport == Transport::kInline ? "inline" : "chunked";
}

struct Request;

// Where an answer goes. Finish is called exactly once, from any thread, and takes the request.
class Responder {
 public:
  virtual ~Responder() = default;
  virtual void Finish(std::unique_ptr<Request> request) = 0;
};

struct Request {
  // Set by the codec and the service.
  uint64_t id = 0;         // the server's own, unique while it runs: cancellation, logs
  std::string request_id;  // the client's, or made from id
  Layout layout = Layout::kBhld;
  Attention attention;       // pointers lead into `input` and `output`
  HostBlock input;           // every tensor and array that the kernel reads
  HostBlock output;          // O, then LSE if asked for, each 256-byte aligned
  SpanList input_spans;      // the bytes that `attention` reads, wherever they lie
  SpanList output_spans;     // and writes
  UploadShare::Hold upload;  // chunked: until the bytes are complete
  std::string kernel;        // asked for by name; empty = the server's choice
  bool check = false;        // by the client's wish, or (set by Engine::Submit) the server's
  int32_t priority = 0;
  int tenant = 0;  // index into the engine's tenants
  TimePoint deadline = kNever;
  Transport transport = Transport::kInline;
  int64_t message_bytes = 0;  // of the request's messages on the wire
  Responder* responder = nullptr;

  // Set by Engine::Admit's result.
  int device = 0;  // index into the engine's devices
  Selection selection;

  // Set on the way.
  double flops = 0;
  int64_t batch_bytes = 0;  // what it takes of a batch's bytes
  int64_t cost = 0;         // what its tenant is charged, see Batcher::Cost
  bool large = false;       // above a batch's budget: runs alone
  uint64_t sequence = 0;    // of its arrival in the queue
  TimePoint received;       // message complete; chunked: header complete
  TimePoint enqueued;       // accepted by the queue
  TimePoint started;        // handed to a lane
  TimePoint completed;      // lane done
  int64_t batch_requests = 0;
  int64_t copy_in_ns = 0;
  int64_t kernel_ns = 0;
  int64_t copy_out_ns = 0;
  int64_t check_ns = 0;
  std::string device_name;
  std::optional<RowsReport> report;  // if checked
  Status status;                     // the outcome
};

// Ends the request with `status` (OK: its results stand in `output`).
inline void Finish(std::unique_ptr<Request> request, Status status) {
  request->status = std::move(status);
  Responder* const responder = request->responder;
  responder->Finish(std::move(request));
}

}  // namespace attend
