// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/reflection.h"

#include <google/protobuf/arena.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>
#include <grpcpp/grpcpp.h>

#include <new>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "attend/v1/admin.grpc.pb.h"
#include "server/memory/memory_reserve.h"
#include "server/rpc/call_caller.h"
#include "server/rpc/open_stream.h"
#include "server/wire/grpc_status.h"

namespace attend {
namespace {

namespace proto = grpc::reflection::v1alpha;
using google::protobuf::DescriptorPool;
using google::protobuf::FieldDescriptor;
using google::protobuf::FileDescriptor;

constexpr char kMethod[] = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";

// Nothing that there is to ask for has a name that comes near it.
constexpr size_t kRequestBytesMax = size_t{64} << 10;

void NotFound(const std::string& what, proto::ServerReflectionResponse& response) {
  response.mutable_error_response()->set_error_code(grpc::StatusCode::NOT_FOUND);
  response.mutable_error_response()->set_error_message(what + " not found");
}

// The file, after those that it needs.
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

void Answer(const proto::ServerReflectionRequest& request, const std::vector<std::string>& services,
            proto::ServerReflectionResponse& response) {
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
      response.mutable_error_response()->set_error_code(grpc::StatusCode::INVALID_ARGUMENT);
      response.mutable_error_response()->set_error_message("the request asks for nothing");
      break;
  }
}

// Answers one stream's requests, one after the other.
class Stream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  explicit Stream(const std::vector<std::string>& services) : services_(services) {
    StartRead(&bytes_);
  }
  void OnReadDone(bool ok) override {
    const grpc::Status status = ok ? Respond() : grpc::Status::OK;
    if (ok && status.ok()) return StartWrite(&bytes_);
    Finish(status);
  }
  void OnWriteDone(bool ok) override {
    if (ok) return StartRead(&bytes_);
    Finish(grpc::Status::CANCELLED);
  }
  void OnDone() override { delete this; }

 private:
  // Puts the answer in the request's place.
  grpc::Status Respond() try {
    const OnNoMemory no_memory(OnNoMemory::kThrow);
    if (bytes_.Length() > kRequestBytesMax) {
      return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT,
                          "a reflection request has " + std::to_string(bytes_.Length()) +
                              " bytes, must have at most " + std::to_string(kRequestBytesMax));
    }
    proto::ServerReflectionRequest request;
    const grpc::Status parsed =
        grpc::SerializationTraits<proto::ServerReflectionRequest>::Deserialize(&bytes_, &request);
    if (!parsed.ok()) {
      return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT,
                          "the message is not a reflection request");
    }
    // On an arena: Protobuf's messages lose what they hold where an allocation fails.
    google::protobuf::Arena arena;
    auto* const response =
        google::protobuf::Arena::CreateMessage<proto::ServerReflectionResponse>(&arena);
    Answer(request, services_, *response);
    const grpc::Slice answer(response->SerializeAsString());
    bytes_ = grpc::ByteBuffer(&answer, 1);
    return grpc::Status::OK;
  } catch (const std::bad_alloc&) {
    return grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "no memory for the answer");
  }

  const std::vector<std::string>& services_;
  grpc::ByteBuffer bytes_;
};

}  // namespace

ReflectionService::ReflectionService(ServiceContext& context, std::vector<std::string> services)
    : context_(context), services_(std::move(services)) {
  services_.push_back("grpc.health.v1.Health");
  // What it has is no secret; who may call it is another question.
  services_.push_back(v1::AdminService::service_full_name());
  services_.push_back(proto::ServerReflection::service_full_name());
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>*
ReflectionService::ServerReflectionInfo(grpc::CallbackServerContext* call) {
  try {
    const OnNoMemory no_memory(OnNoMemory::kThrow);
    const Result<Caller> caller = CallerOf(context_, *call, kMethod, Scope::kInfo);
    if (!caller.ok()) return new EndedStream(ToGrpc(caller.status()));
    return new Stream(services_);
  } catch (const std::bad_alloc&) {
    return new EndedStream(NoMemory());
  }
}

}  // namespace attend
