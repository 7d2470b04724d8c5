// SPDX-License-Identifier: Apache-2.0
//
// The message is assembled by hand around the generated class, so that tensors are never copied
// into a Protobuf message. Sizes are summed first, because an outer message's length precedes its
// contents; then text, prefixes and small tensors are written into head pieces, and large tensors
// become pieces of the output block.

#include "server/wire/reply_codec.h"

#include <google/protobuf/arena.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "server/util/thresholds.h"
#include "server/wire/protobuf_wire.h"
#include "server/wire/status_text.h"

namespace attend {
namespace {

bool IsCopied(const RawTensor& tensor) { return tensor.bytes <= thresholds::kReplyCopiedBytesMax; }

void SetSource(Transport transport, const RegionPlace* shared, v1::Tensor* tensor) {
  if (shared != nullptr && shared->region != nullptr) {
    tensor->mutable_shared_memory()->set_region(shared->region->token);
    tensor->mutable_shared_memory()->set_offset(static_cast<uint64_t>(shared->offset));
  } else if (transport == Transport::kChunked) {
    tensor->mutable_chunked();
  } else {
    tensor->mutable_inline_bytes();
  }
}

void FillCheck(const RowsReport& report, v1::CheckReport* check) {
  check->set_ok(report.ok);
  check->set_rows_checked(report.rows_checked);
  check->set_rows_total(report.rows_total);
  check->set_rows_wide(report.rows_wide);
  check->set_rows_unjudged(report.rows_unjudged);
  check->set_undecided(report.undecided);
  check->set_max_abs_error(report.max_abs_error);
  check->set_mean_abs_error(report.mean_abs_error);
  check->set_bound(report.bound);
  check->set_detail(report.detail);
}

// The same for a tensor in the layout; for a packed one, `rows` is the total over all sequences.
void FillTensor(DType dtype, Layout layout, int64_t batch, int64_t heads, int64_t rows, int64_t dim,
                v1::Tensor* tensor) {
  switch (layout) {
    case Layout::kBhld:
      return FillTensor(dtype, {batch, heads, rows, dim}, tensor);
    case Layout::kBlhd:
      return FillTensor(dtype, {batch, rows, heads, dim}, tensor);
    case Layout::kLhd:
      return FillTensor(dtype, {rows, heads, dim}, tensor);
  }
}

void FillOutputTensors(const Request& request, v1::AttendResponse* response) {
  const SharedTensors* const shared = request.source.shared();
  const auto outputs = OutputsOf(request);
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].wanted) continue;
    v1::Tensor& tensor = ResponseTensor(*response, static_cast<Output>(i));
    FillOutput(request, static_cast<Output>(i), &tensor);
    SetSource(request.transport, shared != nullptr ? &shared->outputs[i] : nullptr, &tensor);
  }
  if (request.backward) response->mutable_gradients();
  if (const CacheHold* const cache = request.source.cache()) {
    for (const CacheHold::Sequence& each : cache->sequences()) {
      response->add_session_lengths(each.length);
    }
    response->set_sessions_ending(request.sessions_ending);
  }
}

uint8_t* WriteFields(const AnswerParts& parts, uint8_t* out) {
  out = parts.fields.SerializeWithCachedSizesToArray(out);
  if (parts.text.empty()) return out;
  out = wire::WritePrefix(parts.text_tag, static_cast<int64_t>(parts.text.size()), out);
  return std::copy(parts.text.begin(), parts.text.end(), out);
}

}  // namespace

OutMessage AssembleAnswer(const AnswerParts& parts, HostBlock block) {
  OutMessage answer;
  std::shared_ptr<const HostBlock> held;  // created only if a tensor is not copied
  const auto text_bytes = static_cast<int64_t>(parts.text.size());
  int64_t fields_bytes = static_cast<int64_t>(parts.fields.ByteSizeLong());
  if (text_bytes > 0) fields_bytes += wire::PrefixBytes(parts.text_tag, text_bytes) + text_bytes;
  int64_t head_bytes = fields_bytes;
  int64_t all_bytes = fields_bytes;
  const size_t count = parts.tensors.size();
  for (const RawTensor& tensor : parts.tensors) {
    all_bytes += wire::PrefixBytes(parts.raw_tag, tensor.bytes) + tensor.bytes;
  }
  if (parts.outer_tag != 0) head_bytes += wire::PrefixBytes(parts.outer_tag, all_bytes);

  bool first = true;
  for (size_t next = 0; first || next < count;) {
    // One piece: the fields (in the first piece), then prefixes and small tensors up to the next
    // large one.
    size_t end = next;
    while (end < count) {
      const RawTensor& tensor = parts.tensors[end];
      head_bytes += wire::PrefixBytes(parts.raw_tag, tensor.bytes);
      if (!IsCopied(tensor)) break;
      head_bytes += tensor.bytes;
      ++end;
    }
    std::string head(static_cast<size_t>(head_bytes), '\0');
    uint8_t* out = reinterpret_cast<uint8_t*>(head.data());
    if (first && parts.outer_tag != 0) out = wire::WritePrefix(parts.outer_tag, all_bytes, out);
    if (first) out = WriteFields(parts, out);
    for (; next < end; ++next) {
      const RawTensor& tensor = parts.tensors[next];
      out = wire::WritePrefix(parts.raw_tag, tensor.bytes, out);
      if (tensor.bytes > 0) std::memcpy(out, tensor.data, static_cast<size_t>(tensor.bytes));
      out += tensor.bytes;
    }
    if (next < count) wire::WritePrefix(parts.raw_tag, parts.tensors[next].bytes, out);
    MessagePiece piece = OutMessage::PieceOf(std::move(head));
    if (first) {
      answer.first = std::move(piece);
    } else {
      answer.rest.push_back(std::move(piece));
    }
    if (next < count) {
      if (held == nullptr) held = std::make_shared<const HostBlock>(std::move(block));
      const RawTensor& tensor = parts.tensors[next++];
      const char* const data = static_cast<const char*>(tensor.data);
      answer.rest.push_back({{data, static_cast<size_t>(tensor.bytes)}, held});
    }
    head_bytes = 0;
    first = false;
  }
  return answer;
}

void FillTensor(DType dtype, std::initializer_list<int64_t> shape, v1::Tensor* tensor) {
  tensor->set_dtype(static_cast<v1::DType>(dtype));
  tensor->mutable_shape()->Add(shape.begin(), shape.end());
  const int64_t* const last = shape.end() - 1;
  const int64_t bytes =
      std::accumulate(shape.begin(), last, RowBytes(dtype, *last), std::multiplies<int64_t>());
  tensor->set_byte_length(static_cast<uint64_t>(bytes));
}

void FillOutput(const Request& request, Output output, v1::Tensor* tensor) {
  const Problem& p = request.attention.problem;
  const int64_t rows_q = p.packed ? p.total_q : p.len_q;
  const int64_t rows_k = p.packed ? p.total_k : p.len_k;
  const auto rows = [&](DType dtype, int64_t heads, int64_t count, int64_t dim) {
    FillTensor(dtype, request.layout, p.batch, heads, count, dim, tensor);
  };
  switch (output) {
    case Output::kO:
      return rows(p.o_dtype(), p.heads_q, rows_q, p.dim_v);
    case Output::kLse:
      if (p.packed) return FillTensor(DType::kFloat32, {p.heads_q, rows_q}, tensor);
      return FillTensor(DType::kFloat32, {p.batch, p.heads_q, rows_q}, tensor);
    case Output::kDQ:
      return rows(p.dtype, p.heads_q, rows_q, p.dim);
    case Output::kDK:
      return rows(p.dtype, p.heads_kv, rows_k, p.dim);
    case Output::kDV:
      return rows(p.dtype, p.heads_kv, rows_k, p.dim_v);
    case Output::kDBias: {
      const std::array<int64_t, 4>& s = request.backward->bias_shape;
      return FillTensor(DType::kFloat32, {s[0], s[1], s[2], s[3]}, tensor);
    }
    case Output::kDSinks:
      return FillTensor(DType::kFloat32, {p.heads_q}, tensor);
  }
}

v1::Tensor& ResponseTensor(v1::AttendResponse& response, Output output) {
  switch (output) {
    case Output::kO:
      return *response.mutable_o();
    case Output::kLse:
      return *response.mutable_lse();
    case Output::kDQ:
      return *response.mutable_gradients()->mutable_d_q();
    case Output::kDK:
      return *response.mutable_gradients()->mutable_d_k();
    case Output::kDV:
      return *response.mutable_gradients()->mutable_d_v();
    case Output::kDBias:
      return *response.mutable_gradients()->mutable_d_bias();
    case Output::kDSinks:
      break;
  }
  return *response.mutable_gradients()->mutable_d_sinks();
}

void FillResponse(const Request& request, int64_t total_ns, v1::AttendResponse* response) {
  response->set_request_id(request.request_id);
  FillOutputTensors(request, response);
  v1::Timings* timings = response->mutable_timings();
  timings->set_receive_ns(NanosecondsBetween(request.received, request.enqueued));
  timings->set_queue_ns(NanosecondsBetween(request.enqueued, request.started));
  timings->set_copy_in_ns(request.copy_in_ns);
  timings->set_kernel_ns(request.kernel_ns);
  timings->set_copy_out_ns(request.copy_out_ns);
  timings->set_check_ns(request.check_ns);
  timings->set_total_ns(total_ns);
  response->set_batch_requests(request.batch_requests);
  const std::string_view kernel = KernelName(request.selection.kernel);
  response->set_kernel(kernel.data(), kernel.size());
  response->set_device(request.device_name);
  response->set_transport(std::string(TransportName(request.transport)));
  if (request.report.has_value()) FillCheck(*request.report, response->mutable_check());
}

OutMessage EncodeReply(std::unique_ptr<Request> request, int64_t total_ns) {
  alignas(8) char block[thresholds::kReplyArenaBytes];
  google::protobuf::ArenaOptions options;
  options.initial_block = block;
  options.initial_block_size = sizeof(block);
  google::protobuf::Arena arena(options);
  auto* response = google::protobuf::Arena::CreateMessage<v1::AttendResponse>(&arena);
  FillResponse(*request, total_ns, response);
  const SharedTensors* const shared = request->source.shared();
  const auto outputs = OutputsOf(*request);
  std::array<RawTensor, kOutputsMax> tensors;
  size_t count = 0;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const bool placed = shared != nullptr && shared->outputs[i].region != nullptr;
    if (outputs[i].wanted && !placed) tensors[count++] = {outputs[i].data, outputs[i].bytes};
  }
  const std::string_view reason = request->selection.why;
  HostBlock output = std::move(request->output);
  request.reset();  // frees the input block and shared regions before the answer is sent
  constexpr uint64_t kReason = wire::BytesTag(v1::AttendResponse::kKernelReasonFieldNumber);
  return AssembleAnswer({*response, wire::kRawTag, {tensors.data(), count}, 0, kReason, reason},
                        std::move(output));
}

void FillRefusal(const CacheRefusal& refusal, v1::RequestStatus& status) {
  status.mutable_session_lengths()->Add(refusal.lengths.begin(), refusal.lengths.end());
  status.set_missing_bytes(refusal.missing_bytes);
}

OutMessage EncodeFailure(const std::string& request_id, const Status& status,
                         const CacheRefusal& refusal, int64_t retry_after_ms) {
  v1::AttendResponse response;
  response.set_request_id(request_id);
  response.mutable_status()->set_code(static_cast<int32_t>(status.code()));
  response.mutable_status()->set_message(CutMessage(status.message()));
  response.mutable_status()->set_retry_after_ms(retry_after_ms);
  FillRefusal(refusal, *response.mutable_status());
  return OutMessage::Of(response.SerializeAsString());
}

}  // namespace attend
