// SPDX-License-Identifier: Apache-2.0
//
// The steps from message to queue: checks that need only the size; a scan of the wire format for
// the small fields; validation; admission and memory; then the tensor bytes, which are kept in
// place, copied here if they are few, or copied by the copy threads. Everything that can refuse a
// request comes before its bytes are copied. Exactly one owner holds the request at any time, so a
// std::bad_alloc anywhere still ends it exactly once.

#include "server/rpc/request_reader.h"

#include <exception>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "kernels/util/trace_range.h"
#include "server/memory/copy_pieces.h"
#include "server/memory/memory_reserve.h"
#include "server/util/rejection.h"
#include "server/util/thresholds.h"
#include "server/wire/session_uses.h"
#include "server/wire/shared_tensors.h"
#include "server/wire/tensor_copies.h"
#include "server/wire/validate_backward.h"

namespace attend {
namespace {

// Requests whose messages are still arriving may hold 1 / kEarlyShare of the memory budget.
constexpr int64_t kEarlyShare = 8;

// Ends the request where an exception may not be thrown.
void End(std::unique_ptr<Request> request, Status status) {
  const OnNoMemory wait(OnNoMemory::kWait);
  Finish(std::move(request), std::move(status));
}

// Called early, so that any error carries the client's request id.
void NameRequest(std::string id, Request& request) {
  if (id.size() > kRequestIdBytesMax) id.resize(kRequestIdBytesMax);
  request.request_id = id.empty() ? "server-" + std::to_string(request.id) : std::move(id);
}

}  // namespace

struct RequestReader::Work {
  explicit Work(const MessageFormat& of) : format(of) {}

  const MessageFormat& format;
  MessageSlices slices;
  RequestMessage message;
  Validated validated;
  MemoryPlan plan;

  std::shared_ptr<MessagePlaces> places;  // owns message.early

  void Take(InMessage&& bytes) {
    places = std::move(bytes.places);
    message.early = static_cast<EarlyInput*>(places.get());
    slices.Take(std::move(bytes));
    message.slices = slices.spans();
  }
  // Its tensors are in the request's block, except the few bytes that arrived with its fields.
  bool placed() const { return message.early != nullptr && message.early->taken(); }
  // Makes the message outlive the function it was passed to.
  void Own() {
    slices.Own();
    message.slices = slices.spans();
  }
  // Returns the memory to the transport before the request runs.
  void ReleaseSlices() {
    message.slices = {};
    slices.Release();
  }
};

struct RequestReader::LargeWork : Work {
  explicit LargeWork(Work&& work) : Work(std::move(work)) {}
  google::protobuf::Arena arena;
  std::unique_ptr<Request> request;
};

RequestReader::RequestReader(Engine& engine, WorkerThreads& workers, const Clock& clock,
                             const Limits& limits, TenantLimits& tenants,
                             const RegionRegistry* regions, const ReceiveMemory* receive_memory,
                             SessionTable* sessions)
    : engine_(engine),
      workers_(workers),
      clock_(clock),
      limits_(limits),
      tenants_(tenants),
      regions_(regions),
      sessions_(sessions),
      gathering_(receive_memory, limits.held_bytes_max),
      uploads_(engine.host_pool().budget_bytes(), limits.tenant_weights),
      early_(engine.host_pool(), engine.host_pool().budget_bytes() / kEarlyShare) {}

std::shared_ptr<MessagePlaces> RequestReader::Place(const MessageFormat& format, int tenant,
                                                    std::span<const MessagePiece> begun,
                                                    int64_t bytes) const {
  const bool gathered = gathering_.is_on() && bytes <= thresholds::kGatheredBytesMax;
  const bool may = &format == &AttendFormat() && bytes <= limits_.message_bytes_max && !gathered &&
                   !MemoryIsShort() && !engine_.draining();
  std::shared_ptr<MessagePlaces> places;
  if (may) TryAllocating([&] { places = early_.Make(tenant, begun, bytes); });
  return places;
}

void RequestReader::Accept(const std::shared_ptr<Call>& call, const MessageFormat& format,
                           std::unique_ptr<Request> request, InMessage&& message) {
  const TraceRange range("attend: take a message");
  request->may_end_in_submit = true;
  request->planner = std::this_thread::get_id();
  try {
    const OnNoMemory no_memory(OnNoMemory::kThrow);
    Take(call, format, request, std::move(message));
  } catch (const std::bad_alloc&) {
    if (request != nullptr) Finish(std::move(request), OutOfMemory());
  }
}

void RequestReader::Take(const std::shared_ptr<Call>& call, const MessageFormat& format,
                         std::unique_ptr<Request>& request, InMessage&& message) {
  Work work(format);
  request->message_bytes = message.size();  // counted whatever becomes of it
  Status status = CheckEarly(*call, *request);
  if (status.ok()) {
    work.Take(std::move(message));
    status = format.Scan(work.message, *request);
    if (!status.ok()) NameRequest(std::move(request->request_id), *request);
  }
  if (!status.ok()) return End(std::move(request), std::move(status));
  if (work.message.scan.array_bytes <= thresholds::kOwnThreadArrayBytesMax) {
    return TakeHere(call, request, work);
  }
  // This many array elements take long.
  PassOn(std::move(work), request, [&](const std::shared_ptr<LargeWork>& large) {
    workers_.Post([this, call, large] { TakeLarge(call, large); });
  });
}

template <class Next>
void RequestReader::PassOn(Work&& work, std::unique_ptr<Request>& request, const Next& next) {
  work.Own();
  const auto large = std::make_shared<LargeWork>(std::move(work));
  large->request = std::move(request);
  try {
    next(large);
  } catch (const std::bad_alloc&) {
    request = std::move(large->request);
    throw;
  }
}

void RequestReader::TakeLarge(const std::shared_ptr<Call>& call,
                              const std::shared_ptr<LargeWork>& large) {
  Status status = OrOutOfMemory([&] {
    const Status decoded = Decode(*large->request, *large, large->arena);
    if (decoded.ok()) CopyLarge(call, large);
    return decoded;
  });
  if (!status.ok()) Finish(std::move(large->request), std::move(status));
}

void RequestReader::TakeHere(const std::shared_ptr<Call>& call, std::unique_ptr<Request>& request,
                             Work& work) {
  alignas(8) char block[thresholds::kRequestArenaBytes];
  google::protobuf::ArenaOptions options;
  options.initial_block = block;
  options.initial_block_size = sizeof(block);
  google::protobuf::Arena arena(options);
  Status status = Decode(*request, work, arena);
  if (!status.ok()) {
    End(std::move(request), std::move(status));
  } else if (!work.slices.lent() && gathering_.MayKeep(*request) &&
             gathering_.Keep(work.slices,
                             TensorPieces(work.message, work.validated, work.plan, *request),
                             *request)) {
    Submit(call, std::move(request));
  } else if (work.placed() || StaysOnThread(request->message_bytes + request->file_bytes.input)) {
    status = CopyHere(work, *request);
    work.ReleaseSlices();
    if (!status.ok()) {
      End(std::move(request), std::move(status));
    } else {
      Submit(call, std::move(request));
    }
  } else {
    // Tensors are found by the scan alone, so the arena may be destroyed.
    work.message.fields = nullptr;
    PassOn(std::move(work), request,
           [&](const std::shared_ptr<LargeWork>& large) { CopyLarge(call, large); });
  }
}

Status RequestReader::CopyHere(Work& work, Request& request) {
  CopyTensors(work.message, work.validated, work.plan, request);
  if (request.file_bytes.input == 0) return Status();
  for (const FilePiece& file : TensorFiles(work.message, work.validated, work.plan, request)) {
    ATTEND_RETURN_IF_ERROR(file.Copy());
  }
  return Status();
}

void RequestReader::CopyLarge(const std::shared_ptr<Call>& call,
                              const std::shared_ptr<LargeWork>& large) {
  const std::vector<HostPiece> pieces =
      TensorPieces(large->message, large->validated, large->plan, *large->request);
  std::vector<FilePiece> files;
  if (large->request->file_bytes.input > 0) {
    files = TensorFiles(large->message, large->validated, large->plan, *large->request);
  }
  CopyPieces(workers_, pieces, files, [this, call, large](const Status& copied) {
    large->ReleaseSlices();
    if (copied.ok()) {
      Submit(call, std::move(large->request));
    } else {
      End(std::move(large->request), copied);
    }
  });
}

Status RequestReader::CheckEarly(const Call& call, const Request& request) {
  if (call.cancelled()) return Status(Code::kCancelled, "the call was cancelled");
  const int64_t bytes = request.message_bytes;
  if (bytes > limits_.message_bytes_max) {
    return Because(
        Rejection::kTooLarge,
        InvalidArgument("the message has " + std::to_string(bytes) + " bytes, must have at most " +
                        std::to_string(limits_.message_bytes_max) + " (--max-request-bytes)"));
  }
  ATTEND_RETURN_IF_ERROR(CheckArrival(request.deadline, clock_.Now()));
  return MemoryIsShort() ? OutOfMemory() : Status();
}

Status RequestReader::Decode(Request& request, Work& work, google::protobuf::Arena& arena) {
  Status status = work.format.Parse(arena, work.slices, work.message, request);
  if (!status.ok()) {
    NameRequest(std::move(request.request_id), request);
    return status;
  }
  return TakeFields(work.format, work.message, request, work.validated, work.plan);
}

Status RequestReader::AcceptHeader(const RequestMessage& header, Request& request,
                                   TensorPlaces& places) {
  if (MemoryIsShort()) return OutOfMemory();
  Validated validated;
  MemoryPlan plan;
  ATTEND_RETURN_IF_ERROR(TakeFields(AttendFormat(), header, request, validated, plan));
  char* const input = static_cast<char*>(request.input.data());
  std::vector<HostSpan> tensors;
  places.present = validated.present;
  places.bytes = validated.tensor_bytes;
  for (int i = 0; i < kTensorsMax; ++i) {
    if (!validated.present[i]) continue;
    places.data[i] = input == nullptr ? nullptr : input + plan.tensors[i];
    tensors.push_back({places.data[i], places.bytes[i]});
  }
  const OnNoMemory wait(OnNoMemory::kWait);  // a device's copies are started in several steps
  if (input != nullptr) engine_.Stage(request, tensors);
  return Status();
}

Status RequestReader::TakeFields(const MessageFormat& format, const RequestMessage& message,
                                 Request& request, Validated& validated, MemoryPlan& plan) {
  const v1::AttendRequest& fields = *message.fields;
  NameRequest(fields.request_id(), request);  // before anything can fail
  request.kernel = fields.kernel();
  if (fields.check()) request.check = AnswerCheck::kAsked;
  request.priority = fields.priority();
  // Submit checks again, for requests on their way.
  if (engine_.draining()) return fields.sessions_size() > 0 ? SessionsAreEnding() : Draining();
  ATTEND_RETURN_IF_ERROR(EnterTenant(request));

  const bool chunked = request.transport == Transport::kChunked;
  ATTEND_RETURN_IF_ERROR(HoldSessions(fields, sessions_, request));
  const CacheHold* const cache = request.source.cache();
  ATTEND_RETURN_IF_ERROR(CheckPass(fields, request.asked));
  ATTEND_RETURN_IF_ERROR(Validate(fields, message.arrays(), validated, cache));
  ATTEND_RETURN_IF_ERROR(CheckSources(message, request.transport, validated));
  if (!chunked) ATTEND_RETURN_IF_ERROR(CheckRaw(message, validated));
  Result<MemoryPlan> planned = PlanMemory(message, validated, cache);
  if (!planned.ok()) return planned.status();
  plan = *planned;
  ATTEND_RETURN_IF_ERROR(format.CheckPlaces(validated, request));
  ATTEND_RETURN_IF_ERROR(FindShared(fields, validated, request));
  if (engine_.MayCheck(request)) {
    ATTEND_RETURN_IF_ERROR(PlanLseForCheck(validated, plan, request));
  }
  ATTEND_RETURN_IF_ERROR(Admit(message, request, validated, plan));
  PlaceArrays(message, validated, plan, request);
  ATTEND_RETURN_IF_ERROR(engine_.Place(request));
  ATTEND_RETURN_IF_ERROR(engine_.CheckInTime(request));
  ATTEND_RETURN_IF_ERROR(ChargeTenant(validated, request));
  // Last, so that no session loses pages to a refused request.
  return ReservePages(plan, request);
}

Status RequestReader::FindShared(const v1::AttendRequest& message, const Validated& validated,
                                 Request& request) {
  Status status = FindSharedTensors(message, validated, regions_, request);
  if (status.ok()) {
    if (request.source.shared() != nullptr) {
      request.transport = request.source.shared()->device == SharedRegion::kHost
                              ? Transport::kSharedMemory
                              : Transport::kCudaIpc;
    }
    return status;
  }
  // Draining drops every region; the client must learn that it may retry elsewhere.
  return status.code() == Code::kNotFound && engine_.draining() ? Draining() : status;
}

void RequestReader::Submit(const std::shared_ptr<Call>& call, std::unique_ptr<Request> request) {
  request->upload.Release();
  if (StaysOnThread(request->tree_bytes)) {
    WriteTreeBias(*request);
    return Enqueue(*call, std::move(request));
  }
  std::shared_ptr<std::unique_ptr<Request>> large;
  const Status posted = OrOutOfMemory([&] {
    large = std::make_shared<std::unique_ptr<Request>>();
    std::swap(*large, request);
    workers_.Post([this, call, large] {
      if (!call->cancelled()) WriteTreeBias(**large);
      Enqueue(*call, std::move(*large));
    });
    return Status();
  });
  if (!posted.ok()) End(std::move(request == nullptr ? *large : request), posted);
}

void RequestReader::Enqueue(Call& call, std::unique_ptr<Request> request) {
  const uint64_t id = request->id;
  if (request->protocol != nullptr) request->protocol->EndDecoding();
  Status status = OrOutOfMemory([&] {
    call.OnQueueing(id);
    if (call.cancelled()) return Status(Code::kCancelled, "the call was cancelled");
    return engine_.Submit(request);
  });
  const OnNoMemory wait(OnNoMemory::kWait);
  if (!status.ok()) {
    if (request == nullptr) std::terminate();  // it was accepted, and can no longer be ended here
    return Finish(std::move(request), std::move(status));
  }
  // A cancellation before the request was queued found nothing to cancel.
  if (call.cancelled()) engine_.Cancel(id);
}

}  // namespace attend
