// SPDX-License-Identifier: Apache-2.0

#include "server/app/otlp_sink.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>

#include <chrono>
#include <future>
#include <vector>

#include "server/wire/grpc_status.h"

namespace attend {
namespace {

// An ExportTraceServiceResponse has a number and a text.
constexpr int kResponseBytesMax = 64 << 10;

std::shared_ptr<grpc::Channel> Connect(const std::string& endpoint) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);  // the exporter's
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetMaxReceiveMessageSize(kResponseBytesMax);
  return grpc::CreateCustomChannel(endpoint, grpc::InsecureChannelCredentials(), arguments);
}

std::string TextOf(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  std::string text;
  if (!buffer.Dump(&slices).ok()) return text;
  for (const grpc::Slice& slice : slices) {
    text.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return text;
}

}  // namespace

OtlpSink::OtlpSink(const std::string& endpoint) : channel_(Connect(endpoint)) {}

Result<std::string> OtlpSink::Send(const std::string& message, Duration timeout) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + timeout);
  {
    const MutexLock lock(mutex_);
    if (cancelled_) return Status(Code::kCancelled, "the server is ending");
    sending_ = &context;
  }
  const grpc::Slice slice(message);
  const grpc::ByteBuffer request(&slice, 1);
  grpc::ByteBuffer response;
  // Shared, because the one that sets it may be the last to use it.
  const auto done = std::make_shared<std::promise<grpc::Status>>();
  grpc::GenericStub stub(channel_);
  stub.UnaryCall(&context, kExportMethod, grpc::StubOptions(), &request, &response,
                 [done](grpc::Status status) { done->set_value(std::move(status)); });
  const grpc::Status status = done->get_future().get();
  {
    const MutexLock lock(mutex_);
    sending_ = nullptr;
  }
  if (!status.ok()) return FromGrpc(status);
  return TextOf(response);
}

void OtlpSink::Cancel() {
  const MutexLock lock(mutex_);
  cancelled_ = true;
  if (sending_ != nullptr) sending_->TryCancel();
}

}  // namespace attend
