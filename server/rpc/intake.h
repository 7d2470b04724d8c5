// SPDX-License-Identifier: Apache-2.0
//
// The way of one message from gRPC's buffers to the engine's queue, the same for unary calls and
// streams; and its beginning and end for requests whose bytes come in chunks. Called on gRPC's
// threads, which it never makes wait: the bytes of large messages are copied by the copy pool, on
// whose threads the way then goes on.

#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "server/engine/engine.h"
#include "server/memory/copy_pool.h"
#include "server/memory/receive_memory.h"
#include "server/memory/upload_budget.h"
#include "server/metrics/metrics.h"
#include "server/regions/region_registry.h"
#include "server/request/request.h"
#include "server/rpc/call.h"
#include "server/wire/request_codec.h"

namespace attend {

// Where a chunked request's tensors go, in the order q, k, v, bias.
struct TensorPlaces {
  int tensors = 0;
  std::array<char*, kTensorsMax> data{};
  std::array<int64_t, kTensorsMax> bytes{};
};

class Intake {
 public:
  struct Limits {
    int64_t message_bytes_max = 0;
    int64_t answer_bytes_max = 0;
    // Of messages that requests keep until they have run; others are copied.
    int64_t held_bytes_max = 0;
  };

  // All must outlive the intake and every call in it. `regions` is null if shared memory is off,
  // `receive_memory` if messages arrive in memory that no device reads.
  Intake(Engine& engine, CopyPool& copies, Metrics& metrics, const Clock& clock,
         const Limits& limits, const RegionRegistry* regions, const ReceiveMemory* receive_memory);

  // Takes the message to the engine, or ends the request with the reason why not; either way the
  // request ends by one call of its responder, which is `call`. Of `request` the id, the responder,
  // the deadline and the time of arrival are set.
  void Accept(Call& call, std::unique_ptr<Request> request, grpc::ByteBuffer message);

  // Admits a request by its header and takes its memory, on a device too if it can be staged. The
  // same fields of `request` are set as for Accept. Not on gRPC's threads.
  Status AcceptHeader(const RequestMessage& header, Request& request, TensorPlaces& places);
  // Takes a request with all its bytes to the engine, or ends it; either way it ends by one call of
  // its responder, which is `call`.
  void Submit(Call& call, std::unique_ptr<Request> request);
  // Counts a refusal and returns its status.
  Status Reject(Rejection reason, Status status);

 private:
  struct Work;       // one message while it is taken apart
  struct LargeWork;  // the same, when threads of the copy pool go on with it
  struct HeldMessage;

  // These two end the request or hand it on, unless they throw std::bad_alloc and leave it. True:
  // the copy pool goes on, and lets go of the call.
  bool Take(Call& call, std::unique_ptr<Request>& request, grpc::ByteBuffer& message);
  bool TakeHere(Call& call, std::unique_ptr<Request>& request, Work& work);
  void DecodeLarge(Call& call, const std::shared_ptr<LargeWork>& large);
  // Goes on with a request that was decoded, when its tensors have been copied.
  // Throws only while the request is still large's.
  void CopyLarge(Call& call, const std::shared_ptr<LargeWork>& large);
  // Leaves the tensors where they arrived, if whoever computes the request can read them there.
  bool Scatter(Work& work, Request& request) const;
  Status CheckEarly(const Call& call, const Request& request, const grpc::ByteBuffer& message);
  Status Decode(Request& request, Work& work, google::protobuf::Arena& arena);
  // The small fields, whatever way the bytes come.
  Status TakeFields(const RequestMessage& message, Request& request, Validated& validated,
                    MemoryPlan& plan);
  Status FindShared(const v1::AttendRequest& message, const Validated& validated, Request& request);
  Status Admit(Request& request, const Validated& validated, const MemoryPlan& plan);
  Status RejectRefusal(Rejection exhausted, Status status);

  Engine& engine_;
  CopyPool& copies_;
  Metrics& metrics_;
  const Clock& clock_;
  const Limits limits_;
  const RegionRegistry* const regions_;
  const ReceiveMemory* const receive_memory_;
  const std::shared_ptr<std::atomic<int64_t>> held_messages_;  // bytes
  UploadShare uploads_;
};

}  // namespace attend
