// SPDX-License-Identifier: Apache-2.0

#include "tests/client/support/fake_server.h"

#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/security/server_credentials.h>

#include <chrono>
#include <thread>
#include <vector>

#include "client/wire/message_codec.h"
#include "kernels/reference/check_rows.h"
#include "kernels/reference/cpu_reference.h"

namespace attend::client {
namespace {

void Fill(const HostTensor& from, v1::Tensor* to, v1::AttendResponse* response) {
  to->set_dtype(static_cast<v1::DType>(from.dtype));
  to->mutable_shape()->Add(from.shape.begin(), from.shape.end());
  to->mutable_inline_bytes();
  response->add_raw(from.data.get(), static_cast<size_t>(from.bytes));
}

}  // namespace

Status Answer(const v1::AttendRequest& request, v1::AttendResponse* response) {
  // Not owned: the request outlives this call.
  const std::shared_ptr<const v1::AttendRequest> borrowed(&request, [](const void*) {});
  const Result<AttentionCall> call = CallFromRequest(borrowed);
  if (!call.ok()) return call.status();
  const Result<Attention> shape = Describe(*call, nullptr, nullptr);
  if (!shape.ok()) return shape.status();
  const Problem& p = shape->problem;
  std::vector<int64_t> o_shape = call->q.shape;
  o_shape.back() = p.dim_v;
  HostTensor o = *HostTensor::Make("o", p.o_dtype(), o_shape);
  HostTensor lse = *HostTensor::Make("lse", DType::kFloat32,
                                     p.packed ? std::vector<int64_t>{p.heads_q, p.total_q}
                                              : std::vector<int64_t>{p.batch, p.heads_q, p.len_q});
  const Result<Attention> attention = Describe(*call, &o, &lse);
  if (!attention.ok()) return attention.status();
  PoisonOutput(*attention);
  CpuReference(*attention);
  response->set_request_id(request.request_id());
  Fill(o, response->mutable_o(), response);
  if (request.return_lse()) Fill(lse, response->mutable_lse(), response);
  response->mutable_timings()->set_kernel_ns(1000);
  response->mutable_timings()->set_total_ns(2000);
  response->set_batch_requests(1);
  response->set_kernel("cpu_reference");
  response->set_device("cpu");
  response->set_transport("inline");
  if (request.check()) {
    const RowsReport report = CheckAllRows(*attention);
    response->mutable_check()->set_ok(report.ok);
    response->mutable_check()->set_rows_checked(report.rows_checked);
    response->mutable_check()->set_rows_total(report.rows_total);
    response->mutable_check()->set_bound(report.bound);
    response->mutable_check()->set_detail(report.detail);
  }
  return Status();
}

FakeServer::FakeServer(int receive_bytes_max) {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.SetMaxReceiveMessageSize(receive_bytes_max);
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
  server_->GetHealthCheckService()->SetServingStatus("attend.v1.AttentionService", true);
  address_ = "127.0.0.1:" + std::to_string(port);
}

FakeServer::~FakeServer() { Stop(); }

void FakeServer::Stop() {
  if (server_) server_->Shutdown(std::chrono::system_clock::now());
  if (server_) server_->Wait();
  server_.reset();
}

grpc::Status FakeServer::UntilCancelled(grpc::ServerContext* context) {
  while (!context->IsCancelled()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  ++cancelled_;
  return grpc::Status::CANCELLED;
}

grpc::Status FakeServer::RunBefore(int64_t number, grpc::ServerContext* context) {
  Before before;
  {
    const std::lock_guard lock(mutex_);
    before = before_;
  }
  return before ? before(number, context) : grpc::Status::OK;
}

void FakeServer::RunAfter(v1::AttendResponse* response) {
  After after;
  {
    const std::lock_guard lock(mutex_);
    after = after_;
  }
  if (after) after(response);
}

grpc::Status FakeServer::Attend(grpc::ServerContext* context, const v1::AttendRequest* request,
                                v1::AttendResponse* response) {
  const int64_t number = calls_++;
  {
    const std::lock_guard lock(mutex_);
    peers_.insert(context->peer());
  }
  const grpc::Status allowed = RunBefore(number, context);
  if (!allowed.ok()) return allowed;
  const Status status = Answer(*request, response);
  if (!status.ok()) {
    return grpc::Status(static_cast<grpc::StatusCode>(status.code()), status.message());
  }
  RunAfter(response);
  return grpc::Status::OK;
}

grpc::Status FakeServer::AttendStream(
    grpc::ServerContext* context,
    grpc::ServerReaderWriter<v1::AttendResponse, v1::AttendRequest>* stream) {
  {
    const std::lock_guard lock(mutex_);
    peers_.insert(context->peer());
  }
  std::vector<v1::AttendResponse> waiting;
  const auto flush = [&] {
    for (auto response = waiting.rbegin(); response != waiting.rend(); ++response) {
      RunAfter(&*response);
      if (!stream->Write(*response)) return false;
    }
    waiting.clear();
    return true;
  };
  v1::AttendRequest request;
  while (stream->Read(&request)) {
    const int64_t number = calls_++;
    v1::AttendResponse response;
    grpc::Status status = RunBefore(number, context);
    if (status.ok()) {
      const Status answered = Answer(request, &response);
      status = grpc::Status(static_cast<grpc::StatusCode>(answered.code()), answered.message());
    }
    if (!status.ok()) {
      response.Clear();
      response.set_request_id(request.request_id());
      response.mutable_status()->set_code(status.error_code());
      response.mutable_status()->set_message(status.error_message());
      response.mutable_status()->set_retry_after_ms(7);
    }
    waiting.push_back(std::move(response));
    if (static_cast<int64_t>(waiting.size()) >= stream_batch_ && !flush()) break;
  }
  flush();
  return grpc::Status::OK;
}

grpc::Status FakeServer::AttendChunked(grpc::ServerContext* context, ChunkedStream* stream) {
  ++calls_;
  Chunked chunked;
  {
    const std::lock_guard lock(mutex_);
    chunked = chunked_;
  }
  if (!chunked) return grpc::Status(grpc::StatusCode::UNIMPLEMENTED, "no chunks here");
  return chunked(context, stream);
}

grpc::Status FakeServer::GetServerInfo(grpc::ServerContext* context,
                                       const v1::GetServerInfoRequest*,
                                       v1::GetServerInfoResponse* response) {
  ++infos_;
  if (info_held_) return UntilCancelled(context);
  response->set_version("fake");
  response->mutable_limits()->set_head_dim_max(256);
  response->mutable_limits()->set_request_bytes_max(request_bytes_max_);
  const std::lock_guard lock(mutex_);
  response->mutable_tenants()->Add(tenants_.begin(), tenants_.end());
  if (!socket_.empty()) response->mutable_shared_memory()->set_socket(socket_);
  return info_;
}

}  // namespace attend::client
