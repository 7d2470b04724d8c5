// SPDX-License-Identifier: Apache-2.0
//
// Takes a message from the transport to the engine's queue, in the same way for unary calls and
// streams. For chunked requests it performs the first and the last step. Runs on the transport's
// loops and never blocks them: large messages are copied by the copy threads, which then continue
// the work.

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

// The destinations of a chunked request's tensors, in the order of kInputNames.
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

  // All arguments must outlive the reader and its calls. `tenants` holds the tenants' limits. Null:
  // `regions` if shared memory is off, `receive_memory` if messages arrive in memory that no device
  // can read, `sessions` if no device has memory for them.
  RequestReader(Engine& engine, WorkerThreads& workers, const Clock& clock, const Limits& limits,
                TenantLimits& tenants, const RegionRegistry* regions,
                const ReceiveMemory* receive_memory, SessionTable* sessions);

  // Takes the message to the engine, or ends the request with an error. Either way the request ends
  // by one call of its responder, `call`. The request's id, responder, deadline and time of arrival
  // must be set. `format` must outlive the call.
  void Accept(const std::shared_ptr<Call>& call, const MessageFormat& format,
              std::unique_ptr<Request> request, InMessage&& message);

  int64_t message_bytes_max() const { return limits_.message_bytes_max; }
  // Like CallHandler::Place, for a call of the tenant.
  std::shared_ptr<MessagePlaces> Place(const MessageFormat& format, int tenant,
                                       std::span<const MessagePiece> begun, int64_t bytes) const;

  // Admits a request by its header and allocates its memory, on a device too if it can be staged.
  // The same fields of `request` must be set as for Accept. May throw std::bad_alloc. Not on a
  // loop.
  Status AcceptHeader(const RequestMessage& header, Request& request, TensorPlaces& places);
  // Takes a request with all its bytes to the engine, or ends it. Either way it ends by one call of
  // its responder, `call`. A large tree is first written out on a worker thread.
  void Submit(const std::shared_ptr<Call>& call, std::unique_ptr<Request> request);

 private:
  struct Work;       // a message while it is being decoded
  struct LargeWork;  // the same, continued by a copy thread

  // These end the request or pass it on. If they throw std::bad_alloc, the caller keeps it.
  void Take(const std::shared_ptr<Call>& call, const MessageFormat& format,
            std::unique_ptr<Request>& request, InMessage&& message);
  void TakeHere(const std::shared_ptr<Call>& call, std::unique_ptr<Request>& request, Work& work);
  // Passes the work and its request on to `next`, for copy threads to continue with.
  template <class Next>
  static void PassOn(Work&& work, std::unique_ptr<Request>& request, const Next& next);
  // Continues on a worker thread.
  void TakeLarge(const std::shared_ptr<Call>& call, const std::shared_ptr<LargeWork>& large);
  // Copies the tensors of a decoded request.
  Status CopyHere(Work& work, Request& request);
  // Copies the tensors of a decoded request on the copy threads, then continues with it. Throws
  // only while `large` still owns the request.
  void CopyLarge(const std::shared_ptr<Call>& call, const std::shared_ptr<LargeWork>& large);
  // Queues a complete request.
  void Enqueue(Call& call, std::unique_ptr<Request> request);
  Status CheckEarly(const Call& call, const Request& request);
  Status Decode(Request& request, Work& work, google::protobuf::Arena& arena);
  // Processes the small fields, however the tensor bytes arrive.
  Status TakeFields(const MessageFormat& format, const RequestMessage& message, Request& request,
                    Validated& validated, MemoryPlan& plan);
  // EnterTenant takes the request's place among its tenant's; ChargeTenant charges it once it is
  // placed.
  Status EnterTenant(Request& request);
  Status ChargeTenant(const Validated& validated, Request& request);
  // Adds the retry time to a refusal by a limit.
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
