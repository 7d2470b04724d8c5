// SPDX-License-Identifier: Apache-2.0

#include "tests/server/support/health_client.h"

#include <google/protobuf/unknown_field_set.h>

#include <future>

namespace attend::test {
namespace {

using google::protobuf::UnknownField;
using google::protobuf::UnknownFieldSet;

std::string ToString(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  (void)buffer.Dump(&slices);
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

grpc::ByteBuffer ToBuffer(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

std::string StringField(int number, const std::string& value) {
  UnknownFieldSet fields;
  fields.AddLengthDelimited(number, value);
  std::string bytes;
  fields.SerializeToString(&bytes);
  return bytes;
}

Health HealthOf(const std::string& message) {
  UnknownFieldSet fields;
  if (!fields.ParseFromString(message)) return Health::kFailed;
  for (int i = 0; i < fields.field_count(); ++i) {
    const UnknownField& field = fields.field(i);
    if (field.number() == 1) return static_cast<Health>(field.varint());
  }
  return Health::kUnknown;
}

}  // namespace

Health CheckHealth(const std::shared_ptr<grpc::Channel>& channel, const std::string& service) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  const grpc::ByteBuffer request = ToBuffer(StringField(1, service));
  grpc::ByteBuffer answer;
  std::promise<grpc::Status> done;
  stub.UnaryCall(&context, "/grpc.health.v1.Health/Check", grpc::StubOptions(), &request, &answer,
                 [&done](grpc::Status status) { done.set_value(std::move(status)); });
  const grpc::Status status = done.get_future().get();
  return status.ok() ? HealthOf(ToString(answer)) : Health::kFailed;
}

BytesStream::BytesStream(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                         const std::string& request)
    : stub_(std::make_unique<grpc::GenericStub>(channel)) {
  stream_ = stub_->PrepareCall(&context_, method, &queue_);
  stream_->StartCall(this);
  WaitForTag();
  stream_->WriteLast(ToBuffer(request), grpc::WriteOptions(), this);
  WaitForTag();
}

BytesStream::~BytesStream() {
  context_.TryCancel();
  grpc::Status status;
  stream_->Finish(&status, this);
  WaitForTag();
  queue_.Shutdown();
  while (WaitForTag()) {
  }
}

bool BytesStream::WaitForTag() {
  void* tag = nullptr;
  bool ok = false;
  return queue_.Next(&tag, &ok) && ok;
}

bool BytesStream::Read(std::string* message) {
  grpc::ByteBuffer buffer;
  stream_->Read(&buffer, this);
  if (!WaitForTag()) return false;
  *message = ToString(buffer);
  return true;
}

std::vector<std::string> ListServices(const std::shared_ptr<grpc::Channel>& channel) {
  constexpr int kListServices = 7;          // of ServerReflectionRequest
  constexpr int kListServicesResponse = 6;  // of ServerReflectionResponse
  BytesStream stream(channel, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                     StringField(kListServices, "*"));
  std::vector<std::string> names;
  std::string message;
  UnknownFieldSet response;
  if (!stream.Read(&message) || !response.ParseFromString(message)) return names;
  for (int i = 0; i < response.field_count(); ++i) {
    if (response.field(i).number() != kListServicesResponse) continue;
    UnknownFieldSet list;
    list.ParseFromString(response.field(i).length_delimited());
    for (int j = 0; j < list.field_count(); ++j) {
      UnknownFieldSet service;
      service.ParseFromString(list.field(j).length_delimited());
      if (service.field_count() > 0) names.push_back(service.field(0).length_delimited());
    }
  }
  return names;
}

}  // namespace attend::test
