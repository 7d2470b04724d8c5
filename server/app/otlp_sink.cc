// SPDX-License-Identifier: Apache-2.0

#include "server/app/otlp_sink.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>

#include <chrono>
#include <future>
#include <string_view>
#include <utility>
#include <vector>

#include "server/wire/grpc_status.h"

namespace attend {
namespace {

// An ExportTraceServiceResponse has a number and a text.
constexpr int kResponseBytesMax = 64 << 10;

constexpr std::string_view kTls = "https://";

std::shared_ptr<grpc::Channel> Connect(const std::string& address,
                                       const std::shared_ptr<grpc::ChannelCredentials>& how) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);  // the exporter's
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetMaxReceiveMessageSize(kResponseBytesMax);
  // One that is made anew does not take the socket of the one before.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(address, how, arguments);
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

Result<std::unique_ptr<OtlpSink>> OtlpSink::Make(const std::string& endpoint,
                                                 const OutgoingTls& files) {
  std::unique_ptr<OtlpSink> sink(new OtlpSink(endpoint, files));
  ATTEND_RETURN_IF_ERROR(sink->Reload());
  return sink;
}

Status OtlpSink::Reload() {
  std::shared_ptr<grpc::Channel> channel;
  if (endpoint_.starts_with(kTls)) {
    Result<OutgoingTls> texts = ReadOutgoingTls("otlp-tls", files_);
    if (!texts.ok()) return texts.status();
    grpc::SslCredentialsOptions options;
    options.pem_root_certs = std::move(texts->ca);
    options.pem_cert_chain = std::move(texts->cert);
    options.pem_private_key = std::move(texts->key);
    channel = Connect(endpoint_.substr(kTls.size()), grpc::SslCredentials(options));
  } else {
    channel = Connect(endpoint_, grpc::InsecureChannelCredentials());
  }
  const MutexLock lock(mutex_);
  channel_.swap(channel);
  return Status();
}

Result<std::string> OtlpSink::Send(const std::string& message, Duration timeout) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + timeout);
  std::shared_ptr<grpc::Channel> channel;
  {
    const MutexLock lock(mutex_);
    if (cancelled_) return Status(Code::kCancelled, "the server is ending");
    sending_ = &context;
    channel = channel_;
  }
  const grpc::Slice slice(message);
  const grpc::ByteBuffer request(&slice, 1);
  grpc::ByteBuffer response;
  // Shared, because the one that sets it may be the last to use it.
  const auto done = std::make_shared<std::promise<grpc::Status>>();
  grpc::GenericStub stub(channel);
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
