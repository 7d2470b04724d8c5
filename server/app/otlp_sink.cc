// SPDX-License-Identifier: Apache-2.0
//
// Reload replaces the channel under the lock; a Send in progress keeps the old one alive. Send
// waits for its callback, and Cancel, from any thread, cancels the context of the Send in progress.

#include "server/app/otlp_sink.h"

#include <grpc/support/log.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/security/credentials.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <string_view>
#include <utility>

#include "kernels/util/utf8.h"
#include "opentelemetry/trace_service.pb.h"

namespace attend {
namespace {

namespace otlp = opentelemetry::proto::collector::trace::v1;
using Stub =
    grpc::TemplatedGenericStub<otlp::ExportTraceServiceRequest, otlp::ExportTraceServiceResponse>;
using Attributes = google::protobuf::RepeatedPtrField<otlp::KeyValue>;

constexpr char kExportMethod[] = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";

// An ExportTraceServiceResponse has a number and a text.
constexpr int kResponseBytesMax = 64 << 10;
constexpr size_t kTextBytesMax = 256;
constexpr uint32_t kSampledFlag = 1;

constexpr std::string_view kTls = "https://";

std::shared_ptr<grpc::Channel> Connect(const std::string& address,
                                       const std::shared_ptr<grpc::ChannelCredentials>& how) {
  // Silences gRPC's own log lines on stderr; a call's status has the error.
  [[maybe_unused]] static const bool silent =
      (gpr_set_log_function([](gpr_log_func_args*) {}), true);
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);  // the exporter retries
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetMaxReceiveMessageSize(kResponseBytesMax);
  // Otherwise a new channel would reuse the old one's connection.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(address, how, arguments);
}

// Big-endian.
std::string IdBytes(std::initializer_list<uint64_t> words) {
  std::string bytes;
  for (const uint64_t word : words) {
    for (int shift = 56; shift >= 0; shift -= 8) bytes += static_cast<char>(word >> shift);
  }
  return bytes;
}

otlp::AnyValue* Add(const char* key, Attributes* to) {
  otlp::KeyValue* const attribute = to->Add();
  attribute->set_key(key);
  return attribute->mutable_value();
}

// Does nothing if the text is empty.
void AddText(const char* key, std::string_view text, Attributes* to) {
  if (!text.empty()) Add(key, to)->set_string_value(ToUtf8(text, kTextBytesMax));
}

uint64_t UnixNanoseconds(SpanTime time) {
  const auto since = std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch());
  return static_cast<uint64_t>(std::max<int64_t>(0, since.count()));
}

void SetSpan(const TraceParent& trace, uint64_t id, uint64_t parent, std::string_view name,
             SpanTime begin, SpanTime end, otlp::Span* span) {
  span->set_trace_id(IdBytes({trace.trace_high, trace.trace_low}));
  span->set_span_id(IdBytes({id}));
  if (parent != 0) span->set_parent_span_id(IdBytes({parent}));
  span->set_name(ToUtf8(name, kTextBytesMax));
  span->set_start_time_unix_nano(UnixNanoseconds(begin));
  span->set_end_time_unix_nano(UnixNanoseconds(std::max(begin, end)));
  span->set_flags(kSampledFlag);
}

// The call's own span, with OpenTelemetry's attribute names where they exist.
void SetCall(const CallSpan& call, otlp::Span* span) {
  std::string_view name = call.method;
  if (name.starts_with('/')) name.remove_prefix(1);
  SetSpan(call.own, call.own.span, call.parent, name, call.begin, call.end, span);
  span->set_kind(otlp::Span::SPAN_KIND_SERVER);
  Attributes* const to = span->mutable_attributes();
  AddText("rpc.system", "grpc", to);
  if (const size_t slash = name.rfind('/'); slash != std::string_view::npos) {
    AddText("rpc.service", name.substr(0, slash), to);
    AddText("rpc.method", name.substr(slash + 1), to);
  }
  Add("rpc.grpc.status_code", to)->set_int_value(static_cast<int64_t>(call.code));
  AddText("attend.request_id", call.request_id, to);
  AddText("attend.tenant", call.tenant, to);
  AddText("attend.transport", call.transport, to);
  AddText("attend.dtype", call.dtype, to);
  AddText("attend.kernel", call.kernel, to);
  AddText("attend.device", call.device, to);
  if (call.batch_requests > 0) {
    Add("attend.batch_requests", to)->set_int_value(call.batch_requests);
  }
  Add("attend.bytes_in", to)->set_int_value(call.bytes_in);
  Add("attend.bytes_out", to)->set_int_value(call.bytes_out);
  if (call.code == Code::kOk) return;
  span->mutable_status()->set_message(ToUtf8(call.error, kTextBytesMax));
  span->mutable_status()->set_code(otlp::Status::STATUS_CODE_ERROR);
}

otlp::ExportTraceServiceRequest RequestOf(const SpanResource& resource,
                                          std::span<const CallSpan> calls) {
  otlp::ExportTraceServiceRequest request;
  otlp::ResourceSpans* const whole = request.add_resource_spans();
  Attributes* const about = whole->mutable_resource()->mutable_attributes();
  AddText("service.name", "attend-server", about);
  AddText("service.version", resource.version, about);
  AddText("service.instance.id", resource.instance, about);
  otlp::ScopeSpans* const spans = whole->add_scope_spans();
  spans->mutable_scope()->set_name("attend");
  spans->mutable_scope()->set_version(resource.version);
  for (const CallSpan& call : calls) {
    SetCall(call, spans->add_spans());
    for (const CallSpan::Phase& phase : std::span(call.phases).first(call.phase_count)) {
      otlp::Span* const span = spans->add_spans();
      SetSpan(call.own, phase.span, call.own.span, phase.name, phase.begin, phase.end, span);
      span->set_kind(otlp::Span::SPAN_KIND_INTERNAL);
    }
  }
  return request;
}

Status FromGrpc(const grpc::Status& status) {
  switch (status.error_code()) {
    case grpc::StatusCode::ABORTED:
    case grpc::StatusCode::DATA_LOSS:
    case grpc::StatusCode::DO_NOT_USE:
      // Codes that this project does not use; the message keeps the meaning.
      return Status(Code::kUnknown, "gRPC status " + std::to_string(status.error_code()) + ": " +
                                        status.error_message());
    default:
      return Status(static_cast<Code>(status.error_code()), status.error_message());
  }
}

}  // namespace

struct OtlpSink::Connection {
  std::shared_ptr<grpc::Channel> channel;
  grpc::ClientContext* sending = nullptr;
};

OtlpSink::OtlpSink(const std::string& endpoint, const OutgoingTls& files,
                   const SpanResource& resource)
    : endpoint_(endpoint),
      files_(files),
      resource_(resource),
      connection_(std::make_unique<Connection>()) {}

OtlpSink::~OtlpSink() = default;

Result<std::unique_ptr<OtlpSink>> OtlpSink::Make(const std::string& endpoint,
                                                 const OutgoingTls& files,
                                                 const SpanResource& resource) {
  std::unique_ptr<OtlpSink> sink(new OtlpSink(endpoint, files, resource));
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
  connection_->channel.swap(channel);
  return Status();
}

Result<PartialSuccess> OtlpSink::Send(std::span<const CallSpan> calls, Duration timeout) {
  const otlp::ExportTraceServiceRequest request = RequestOf(resource_, calls);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + timeout);
  std::shared_ptr<grpc::Channel> channel;
  {
    const MutexLock lock(mutex_);
    if (cancelled_) return Status(Code::kCancelled, "the server is shutting down");
    connection_->sending = &context;
    channel = connection_->channel;
  }
  otlp::ExportTraceServiceResponse response;
  // Shared: the callback may still be in set_value when Send returns.
  const auto done = std::make_shared<std::promise<grpc::Status>>();
  Stub stub(channel);
  stub.UnaryCall(&context, kExportMethod, grpc::StubOptions(), &request, &response,
                 [done](grpc::Status status) { done->set_value(std::move(status)); });
  const grpc::Status status = done->get_future().get();
  {
    const MutexLock lock(mutex_);
    connection_->sending = nullptr;
  }
  if (!status.ok()) return FromGrpc(status);
  const otlp::ExportTracePartialSuccess& partial = response.partial_success();
  return PartialSuccess{partial.rejected_spans(), ToUtf8(partial.error_message(), kTextBytesMax)};
}

void OtlpSink::Cancel() {
  const MutexLock lock(mutex_);
  cancelled_ = true;
  if (connection_->sending != nullptr) connection_->sending->TryCancel();
}

}  // namespace attend
