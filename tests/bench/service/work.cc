// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/service/work.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "attend/v1/attention.pb.h"
#include "kernels/reference/check_rows.h"
#include "server/wire/protobuf_wire.h"
#include "tests/bench/service/pass_through_backend.h"

namespace attend::bench {
namespace {

// Multiply-adds of a full check: a fraction of a second, enough for every row of small problems.
constexpr double kCheckWork = 1 << 27;

client::AttentionCall MakeCall(const std::shared_ptr<const test::OwnedAttention>& owned) {
  const Attention& a = owned->attention;
  const Problem& p = a.problem;
  const auto tensor = [&](int64_t heads, int64_t rows, int64_t dim, const void* data) {
    client::TensorRef ref(p.dtype, {p.batch, heads, rows, dim}, data,
                          p.batch * heads * rows * dim * DTypeBytes(p.dtype));
    ref.owner = owned;
    return ref;
  };
  client::AttentionCall call;
  call.q = tensor(p.heads_q, p.len_q, p.dim, a.q.data);
  call.k = tensor(p.heads_kv, p.len_k, p.dim, a.k.data);
  call.v = tensor(p.heads_kv, p.len_k, p.dim_v, a.v.data);
  return call;
}

// Calls `piece` with the pieces of the last `bytes` bytes of the message, until it returns false.
template <class Piece>
bool ForTail(const grpc::ByteBuffer& message, int64_t bytes, const Piece& piece) {
  std::vector<grpc::Slice> slices;
  if (!message.Dump(&slices).ok()) return false;
  int64_t skip = static_cast<int64_t>(message.Length()) - bytes;
  for (const grpc::Slice& slice : slices) {
    const int64_t size = static_cast<int64_t>(slice.size());
    const int64_t from = std::min(skip, size);
    skip -= from;
    if (size > from && !piece(slice.begin() + from, size - from)) return false;
  }
  return true;
}

// Returns an error if the answer cannot be parsed or reports a failure, otherwise "".
std::string ParseAnswer(const grpc::ByteBuffer& answer, v1::AttendResponse* response) {
  grpc::Slice slice;
  if (!answer.DumpToSingleSlice(&slice).ok() ||
      !response->ParseFromArray(slice.begin(), static_cast<int>(slice.size()))) {
    return "the answer cannot be parsed";
  }
  if (!response->has_status() || response->status().code() == 0) return "";
  return "code " + std::to_string(response->status().code()) + ", " + response->status().message();
}

}  // namespace

Work::Work(std::string name, const test::ProblemSpec& spec, Truth truth, uint64_t seed)
    : name_(std::move(name)),
      truth_(truth),
      owned_(std::make_shared<test::OwnedAttention>(test::MakeAttention(spec, seed))),
      output_bytes_(ElementsO(spec.problem) * DTypeBytes(spec.problem.dtype)),
      call_(MakeCall(owned_)) {
  Result<client::EncodedCall> encoded = client::EncodedCall::Make(call_);
  if (encoded.ok()) encoded_ = std::make_shared<client::EncodedCall>(std::move(*encoded));
}

grpc::ByteBuffer Work::Message(const std::string& request_id) const {
  return encoded_ == nullptr ? grpc::ByteBuffer() : encoded_->ToByteBuffer(request_id);
}

std::string Work::CheckOutput(const void* o) const {
  Attention attention = owned_->attention;
  if (truth_ == Truth::kMarks) {
    const char* bytes = static_cast<const char*>(o);
    const bool same = std::memcmp(bytes, attention.q.data, kMarkBytes) == 0 &&
                      std::memcmp(bytes + kMarkBytes, attention.k.data, kMarkBytes) == 0 &&
                      std::memcmp(bytes + 2 * kMarkBytes, attention.v.data, kMarkBytes) == 0;
    return same ? "" : "the tensors did not reach the device";
  }
  attention.o.data = const_cast<void*>(o);  // only read
  attention.problem.return_lse = false;     // not requested
  const std::vector<RowId> rows = SampleRows(attention, test::FreshSeed(), kCheckWork);
  const RowsReport report = CheckRows(attention, rows);
  return report.ok ? "" : "wrong answer: " + report.detail;
}

std::string Work::CheckFully(const grpc::ByteBuffer& answer, std::string* o) const {
  v1::AttendResponse response;
  const std::string failed = ParseAnswer(answer, &response);
  if (!failed.empty()) return failed;
  if (response.raw_size() != 1 || response.raw(0).size() != static_cast<size_t>(output_bytes_)) {
    return "O has a wrong size";
  }
  *o = std::move(*response.mutable_raw(0));
  return CheckOutput(o->data());
}

Status Work::Admit(grpc::ByteBuffer& answer) {
  std::string o;
  std::string wrong = CheckFully(answer, &o);
  if (!wrong.empty()) return Internal(name_ + ": " + wrong);
  if (truth_ == Truth::kMarks) o.resize(3 * kMarkBytes);  // the rest is undefined
  uint8_t prefix[wire::kRawPrefixBytesMax];
  prefix_bytes_ = wire::WriteRawPrefix(output_bytes_, prefix) - prefix;
  pattern_ = std::string(reinterpret_cast<const char*>(prefix), prefix_bytes_) + o;
  answer_bytes_ = static_cast<int64_t>(answer.Length());
  return Status();
}

bool Work::EndsAsPattern(const grpc::ByteBuffer& answer, bool bytes_too) const {
  const size_t looked_at = bytes_too ? pattern_.size() : static_cast<size_t>(prefix_bytes_);
  const int64_t tail_bytes = prefix_bytes_ + output_bytes_;
  if (static_cast<int64_t>(answer.Length()) < tail_bytes) return false;
  size_t at = 0;
  const bool same = ForTail(answer, tail_bytes, [&](const uint8_t* data, int64_t bytes) {
    const size_t compared = std::min(static_cast<size_t>(bytes), looked_at - at);
    if (std::memcmp(data, pattern_.data() + at, compared) != 0) return false;
    at += compared;
    return true;
  });
  return same && at == looked_at;
}

std::string Work::CheckAnswer(const grpc::ByteBuffer& answer, bool bytes_too) const {
  // The message ends with the pattern, as raw has the highest field number and holds only O.
  if (EndsAsPattern(answer, bytes_too)) return "";
  std::string o;
  return CheckFully(answer, &o);
}

std::string Work::CheckPlacedAnswer(const grpc::ByteBuffer& answer, const void* o,
                                    bool bytes_too) const {
  v1::AttendResponse response;
  const std::string failed = ParseAnswer(answer, &response);
  if (!failed.empty()) return failed;
  if (!response.o().has_shared_memory() || response.raw_size() != 0) return "O is not in its place";
  const size_t compared = pattern_.size() - static_cast<size_t>(prefix_bytes_);
  if (!bytes_too || std::memcmp(o, pattern_.data() + prefix_bytes_, compared) == 0) return "";
  return CheckOutput(o);
}

}  // namespace attend::bench
