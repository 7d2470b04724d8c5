// SPDX-License-Identifier: Apache-2.0
//
// Takes one message from the transport to the engine's queue, the same way for unary calls and
// streams. For requests whose bytes come in chunks, it does the first and the last step. It is
// called on the transport's loops and never blocks them: the copy threads copy large messages and
// then go on with the work.

#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "server/engine/engine.h"
#include "server/memory/receive_memory.h"
#include "server/memory/upload_budget.h"
#include "server/regions/region_registry.h"
#include "server/request/request.h"
#include "server/rpc/call.h"
#include "server/rpc/gathering.h"
#include "server/util/weight_share.h"
#include "server/util/worker_threads.h"
#include "server/wire/early_input.h"
#include "server/wire/message_format.h"
#include "server/wire/message_slices.h"
#include "server/wire/request_codec.h"

namespace attend {

// Where a chunked request's tensors go, in the order of kInputNames.
struct TensorPlaces {
  std::array<bool, kTensorsMax> present{};
  std::array<char*, kTensorsMax> data{};
  std::array<int64_t, kTensorsMax> bytes{};
};

class RequestReader {
 public:
  struct Limits {
    int64_t message_bytes_max = 0;
    int64_t answer_bytes_max = 0;
    // Bytes of messages that requests may keep until they have run; further ones are copied.
    int64_t held_bytes_max = 0;
    TenantWeights tenant_weights;
  };

  // All arguments must outlive the reader and every call in it. `tenants`: what each may take.
  // `regions` is null if shared memory
  // is off, `receive_memory` if messages arrive in memory that no device reads, `sessions` if no
  // device has memory for them.
  RequestReader(Engine& engine, WorkerThreads& workers, const Clock& clock, const Limits& limits,
                TenantLimits& tenants, const RegionRegistry* regions,
                const ReceiveMemory* receive_memory, SessionTable* sessions);

  // Takes the message to the engine, or ends the request with the reason why not. Either way the
  // request ends by one call of its responder, which is `call`. The request's id, responder,
  // deadline and time of arrival must be set. `format` must outlive the call.
  void Accept(Call& call, const MessageFormat& format, std::unique_ptr<Request> request,
              InMessage&& message);

  // As CallHandler::Place, for a call of that tenant.
  std::shared_ptr<MessagePlaces> Place(const MessageFormat& format, int tenant,
                                       std::span<const MessagePiece> begun, int64_t bytes) const;

  // Admits a request by its header and allocates its memory, on a device too if it can be staged.
  // The same fields of `request` must be set as for Accept. May throw std::bad_alloc. Not on a
  // loop.
  Status AcceptHeader(const RequestMessage& header, Request& request, TensorPlaces& places);
  // Takes a request that has all its bytes to the engine, or ends it. Either way it ends by one
  // call of its responder, which is `call`.
  void Submit(Call& call, std::unique_ptr<Request> request);

 private:
  struct Work;       // one message while it is decoded
  struct LargeWork;  // the same, once a copy thread goes on with it

  // These two end the request or hand it on, unless they throw std::bad_alloc and leave it. True:
  // a copy thread goes on, and releases the call.
  bool Take(Call& call, const MessageFormat& format, std::unique_ptr<Request>& request,
            InMessage&& message);
  bool TakeHere(Call& call, std::unique_ptr<Request>& request, Work& work);
  void DecodeLarge(Call& call, const std::shared_ptr<LargeWork>& large);
  // Copies the tensors of a decoded request.
  Status CopyHere(Work& work, Request& request);
  // Copies the tensors of a decoded request, and then goes on with it. Throws only while `large`
  // still owns the request.
  void CopyLarge(Call& call, const std::shared_ptr<LargeWork>& large);
  Status CheckEarly(const Call& call, const Request& request);
  Status Decode(Request& request, Work& work, google::protobuf::Arena& arena);
  // Takes the small fields, however the tensor bytes come.
  Status TakeFields(const MessageFormat& format, const RequestMessage& message, Request& request,
                    Validated& validated, MemoryPlan& plan);
  // The request takes its place among its tenant's, and is charged once it is placed.
  Status EnterTenant(Request& request);
  Status ChargeTenant(const Validated& validated, Request& request);
  // Says of a refusal by a limit when to come again.
  static Status OfTenant(Status status, Request& request);
  Status FindShared(const v1::AttendRequest& message, const Validated& validated, Request& request);
  Status Admit(const RequestMessage& message, Request& request, const Validated& validated,
               const MemoryPlan& plan);

  Engine& engine_;
  WorkerThreads& workers_;
  const Clock& clock_;
  const Limits limits_;
  TenantLimits& tenants_;
  const RegionRegistry* const regions_;
  SessionTable* const sessions_;
  const Gathering gathering_;
  UploadBudget uploads_;
  const EarlyInputs early_;
};

}  // namespace attend
