// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/reflection.h"

#include <google/protobuf/arena.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>

#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "attend/v1/admin.pb.h"
#include "grpc/reflection/v1/reflection.pb.h"
#include "grpc/reflection/v1alpha/reflection.pb.h"
#include "server/memory/memory_reserve.h"
#include "server/rpc/call_log.h"
#include "server/rpc/open_stream.h"
#include "server/rpc/standing_caller.h"
#include "server/util/rejection.h"

namespace attend {
namespace {

namespace proto = grpc::reflection::v1alpha;
using google::protobuf::DescriptorPool;
using google::protobuf::FieldDescriptor;
using google::protobuf::FileDescriptor;

// Its existence is not secret; calling it needs the scope.
constexpr char kAdmin[] = "attend.v1.AdminService";
constexpr char kReflection[] = "grpc.reflection.v1alpha.ServerReflection";
constexpr char kReflectionV1[] = "grpc.reflection.v1.ServerReflection";
// Far longer than any name that could be requested.
constexpr size_t kReflectionBytesMax = size_t{64} << 10;

void NotFound(const std::string& what, proto::ServerReflectionResponse& response) {
  response.mutable_error_response()->set_error_code(static_cast<int32_t>(Code::kNotFound));
  response.mutable_error_response()->set_error_message(what + " not found");
}

// Adds the file after its dependencies.
void AddFile(const FileDescriptor& file, std::set<const FileDescriptor*>& added,
             proto::FileDescriptorResponse& response) {
  if (!added.insert(&file).second) return;
  for (int i = 0; i < file.dependency_count(); ++i) AddFile(*file.dependency(i), added, response);
  google::protobuf::FileDescriptorProto described;
  file.CopyTo(&described);
  described.SerializeToString(response.add_file_descriptor_proto());
}

void Describe(const std::string& what, const FileDescriptor* file,
              proto::ServerReflectionResponse& response) {
  if (file == nullptr) return NotFound(what, response);
  std::set<const FileDescriptor*> added;
  AddFile(*file, added, *response.mutable_file_descriptor_response());
}

void ListExtensions(const DescriptorPool& pool, const std::string& type,
                    proto::ServerReflectionResponse& response) {
  const google::protobuf::Descriptor* const message = pool.FindMessageTypeByName(type);
  if (message == nullptr) return NotFound(type, response);
  std::vector<const FieldDescriptor*> extensions;
  pool.FindAllExtensions(message, &extensions);
  proto::ExtensionNumberResponse* const numbers = response.mutable_all_extension_numbers_response();
  numbers->set_base_type_name(type);
  for (const FieldDescriptor* each : extensions) numbers->add_extension_number(each->number());
}

void ListServices(const std::vector<std::string>& services, proto::ListServiceResponse& response) {
  for (const std::string& name : services) response.add_service()->set_name(name);
}

void Describe(const proto::ServerReflectionRequest& request,
              const std::vector<std::string>& services, proto::ServerReflectionResponse& response) {
  using Request = proto::ServerReflectionRequest;
  const DescriptorPool& pool = *DescriptorPool::generated_pool();
  response.set_valid_host(request.host());
  *response.mutable_original_request() = request;
  switch (request.message_request_case()) {
    case Request::kFileByFilename:
      Describe(request.file_by_filename(), pool.FindFileByName(request.file_by_filename()),
               response);
      break;
    case Request::kFileContainingSymbol:
      Describe(request.file_containing_symbol(),
               pool.FindFileContainingSymbol(request.file_containing_symbol()), response);
      break;
    case Request::kFileContainingExtension: {
      const proto::ExtensionRequest& wanted = request.file_containing_extension();
      const auto* const type = pool.FindMessageTypeByName(wanted.containing_type());
      const FieldDescriptor* const found =
          type == nullptr ? nullptr : pool.FindExtensionByNumber(type, wanted.extension_number());
      Describe(wanted.containing_type(), found == nullptr ? nullptr : found->file(), response);
      break;
    }
    case Request::kAllExtensionNumbersOfType:
      ListExtensions(pool, request.all_extension_numbers_of_type(), response);
      break;
    case Request::kListServices:
      ListServices(services, *response.mutable_list_services_response());
      break;
    case Request::MESSAGE_REQUEST_NOT_SET:
      response.mutable_error_response()->set_error_code(
          static_cast<int32_t>(Code::kInvalidArgument));
      response.mutable_error_response()->set_error_message("message_request is not set");
      break;
  }
}

// Answers the requests of one stream, one at a time.
class Stream final : public SharedHandler, public OpenCall {
 public:
  Stream(ServiceContext& context, const std::vector<std::string>& services, const CallFacts& facts,
         WireCall&& wire, CountHold hold)
      : context_(context),
        services_(services),
        facts_(facts),
        wire_(std::move(wire)),
        hold_(std::move(hold)) {}

  void Begin() {
    const MutexLock lock(mutex_);
    begun_ = true;
    AdvanceLocked();
  }
  // OpenCall
  void EndWhenIdle() override { Stop(Draining()); }
  void Recheck() override {
    if (const Status may = caller_.Check(); !may.ok()) Stop(may);
  }

  // CallHandler
  void OnMessage(InMessage message) override {
    {
      const MutexLock lock(mutex_);
      if (finished_) return;  // it crossed the end of the call
      reading_ = false;
      answering_ = true;
    }
    const Status posted = OrOutOfMemory([&] {
      request_ = message.Text();
      return context_.queue.Post(facts_.caller.tenant, std::ssize(request_),
                                 [self = Ref(this)] { self->Answer(); });
    });
    if (!posted.ok()) Answered(posted);
  }
  void OnHalfClose() override { Stop(wire_.Cancelled() ? Cancelled() : Status()); }
  void OnWritten(bool ok) override { Answered(ok ? Status() : Cancelled()); }
  void OnCancel() override {}
  void OnDone() override {
    context_.streams.Remove(this);
    SharedHandler::OnDone();
  }

 private:
  static Status Cancelled() { return Status(Code::kCancelled, "the call was cancelled"); }
  void Answer() {
    OutMessage answer;
    const Status status = OrOutOfMemory([&] { return Respond(answer); });
    status.ok() ? wire_.Write(std::move(answer)) : Answered(status);
  }
  // Ends the stream with the first status passed, once no response is in progress.
  void Stop(const Status& status) {
    const MutexLock lock(mutex_);
    if (!stopped_) stopped_ = status;
    AdvanceLocked();
  }
  void Answered(const Status& status) {
    const MutexLock lock(mutex_);
    answering_ = false;
    if (!status.ok() && !stopped_) stopped_ = status;
    AdvanceLocked();
  }
  void AdvanceLocked() ATTEND_REQUIRES(mutex_) {
    if (finished_ || answering_) return;
    if (stopped_) return EndLocked(*stopped_);
    if (!std::exchange(reading_, true)) wire_.Read();
  }
  void EndLocked(const Status& status) ATTEND_REQUIRES(mutex_) {
    finished_ = true;
    // A drain refuses streams that begin after it; older ones have received all their responses.
    const bool served = begun_ && RejectionOf(status) == Rejection::kDraining;
    LogEnd(context_, served ? Because(Rejection::kCounted, status) : status,
           {served ? "reflection ended" : "reflection refused", request_bytes_, response_bytes_},
           wire_, facts_);
    hold_.Release();  // before the client learns of the end and opens another stream
    wire_.End(status);
  }
  // May throw std::bad_alloc.
  Status Respond(OutMessage& answer) {
    // Never refused by a rate, because it describes how to call the server.
    context_.limits.Came(facts_.caller.tenant, std::ssize(request_));
    ATTEND_RETURN_IF_ERROR(caller_.Check());
    if (request_.size() > kReflectionBytesMax) {
      return InvalidArgument("a reflection request has " + std::to_string(request_.size()) +
                             " bytes, must have at most " + std::to_string(kReflectionBytesMax));
    }
    request_bytes_ += std::ssize(request_);
    proto::ServerReflectionRequest request;
    if (!request.ParseFromString(request_)) {
      return InvalidArgument("the message is not a reflection request");
    }
    // On an arena, because Protobuf messages leak if an allocation fails.
    google::protobuf::Arena arena;
    auto* const response =
        google::protobuf::Arena::CreateMessage<proto::ServerReflectionResponse>(&arena);
    Describe(request, services_, *response);
    answer = OutMessage::Of(response->SerializeAsString());
    response_bytes_ += answer.bytes();
    context_.limits.Came(facts_.caller.tenant, answer.bytes());
    return Status();
  }

  ServiceContext& context_;
  const std::vector<std::string>& services_;
  const CallFacts facts_;
  const WireCall wire_;
  StandingCaller caller_{context_, wire_, facts_, Scope::kInfo};
  CountHold hold_;  // counts against the tenant's streams
  // Used by the thread that answers, or that ends the stream when none does.
  std::string request_;
  int64_t request_bytes_ = 0;
  int64_t response_bytes_ = 0;
  Mutex mutex_;
  bool reading_ ATTEND_GUARDED_BY(mutex_) = false;
  bool answering_ ATTEND_GUARDED_BY(mutex_) = false;  // a message was read and is not answered yet
  std::optional<Status> stopped_ ATTEND_GUARDED_BY(mutex_);
  bool begun_ ATTEND_GUARDED_BY(mutex_) = false;
  bool finished_ ATTEND_GUARDED_BY(mutex_) = false;
};

}  // namespace

ReflectionService::ReflectionService(ServiceContext& context, std::vector<std::string> services)
    : context_(context), services_(std::move(services)) {
  for (const char* const open : {"grpc.health.v1.Health", kAdmin, kReflection, kReflectionV1}) {
    services_.emplace_back(open);
  }
}

void ReflectionService::AddTo(CallTable& table) {
  for (const char* const version : {kReflectionV1, kReflection}) {
    const std::string method = std::string("/") + version + "/ServerReflectionInfo";
    table.Add(method, CallTable::kSmall, [this, method](ServerCall& call) {
      WireCall wire(call);
      const auto make = [&](const Caller& caller, CountHold hold) {
        return Stream::Own(std::make_shared<Stream>(context_, services_,
                                                    FactsOf(context_, method, caller, wire),
                                                    std::move(wire), std::move(hold)));
      };
      return BeginStream(context_, method, wire, make, Scope::kInfo);
    });
  }
}

}  // namespace attend
