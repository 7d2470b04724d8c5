// SPDX-License-Identifier: Apache-2.0

#include "client/sharded_call.h"

#include <utility>

#include "client/call/merge_partial.h"
#include "kernels/util/mutex.h"

namespace attend::client {
namespace {

// The outcomes of one call's parts, filled in by their callbacks.
class Answers {
 public:
  explicit Answers(size_t parts) : outcomes_(parts), left_(parts) {}

  CallCallback For(const std::shared_ptr<Answers>& self, size_t part) {
    return [self, part](CallOutcome outcome) {
      const MutexLock lock(self->mutex_);
      self->outcomes_[part] = std::move(outcome);
      if (--self->left_ == 0) self->ended_.NotifyOne();
    };
  }
  std::vector<CallOutcome> Wait() {
    const MutexLock lock(mutex_);
    while (left_ > 0) ended_.Wait(mutex_);
    return std::move(outcomes_);
  }

 private:
  Mutex mutex_;
  CondVar ended_;
  std::vector<CallOutcome> outcomes_ ATTEND_GUARDED_BY(mutex_);
  size_t left_ ATTEND_GUARDED_BY(mutex_);
};

// Rounds a merged O, which is float32, to the dtype that the call asked for.
Result<HostTensor> Rounded(HostTensor o, DType dtype) {
  if (dtype == o.dtype) return o;
  Result<HostTensor> rounded = HostTensor::Make("o", dtype, o.shape);
  if (!rounded.ok()) return rounded.status();
  const auto* const from = reinterpret_cast<const float*>(o.data.get());
  auto* const to = reinterpret_cast<uint16_t*>(rounded->data.get());
  const int64_t count = o.bytes / DTypeBytes(o.dtype);
  if (dtype == DType::kFloat16) {
    for (int64_t i = 0; i < count; ++i) to[i] = FloatToHalf(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = FloatToBFloat16(from[i]);
  }
  return rounded;
}

// Whether `a` is the worse check: failed, or with the larger ratio of error to bound.
bool Worse(const RowsReport& a, const RowsReport& b) {
  if (a.failed() != b.failed()) return a.failed();
  if (a.ok != b.ok) return !a.ok;
  return a.max_abs_error * b.bound > b.max_abs_error * a.bound;
}

// Fills in what the merged answer reports besides its tensors.
void TellOf(const std::vector<CallOutcome>& parts, AttentionResult* whole) {
  const AttentionResult* slowest = &parts.front().result;
  for (const CallOutcome& part : parts) {
    const AttentionResult& each = part.result;
    if (each.timings.total_ns > slowest->timings.total_ns) slowest = &each;
    whole->sessions_ending |= each.sessions_ending;
    if (each.check && (!whole->check || Worse(*each.check, *whole->check))) {
      whole->check = each.check;
    }
  }
  whole->request_id = slowest->request_id;
  whole->timings = slowest->timings;
  whole->batch_requests = slowest->batch_requests;
  whole->kernel = slowest->kernel;
  whole->kernel_reason = slowest->kernel_reason;
  whole->device = slowest->device;
  whole->transport = slowest->transport;
}

}  // namespace

std::string TokensText(int64_t begin, int64_t end) {
  return "tokens [" + std::to_string(begin) + ", " + std::to_string(end) + ")";
}

Status OfTokens(int64_t begin, int64_t end, const std::string& server, const Status& status) {
  return Status(status.code(), TokensText(begin, end) + " on " +
                                   (server.empty() ? "the server" : server) + ": " +
                                   status.message());
}

Status CheckShardedCall(const AttentionCall& call) {
  if (call.layout == v1::LAYOUT_LHD) return InvalidArgument("layout is LHD, must be BHLD or BLHD");
  if (call.q.shape.size() != 4 || call.q.shape[0] != 1) {
    return InvalidArgument("q has the shape " + ShapeText(call.q.shape) + ", must have B = 1");
  }
  if (BringsRows(call) && (call.k.shape.size() != 4 || call.v.shape.size() != 4)) {
    return InvalidArgument("k and v have the shapes " + ShapeText(call.k.shape) + " and " +
                           ShapeText(call.v.shape) + ", must have four dimensions");
  }
  if (call.bias && call.bias->shape.size() != 4) {
    return InvalidArgument("bias has the shape " + ShapeText(call.bias->shape) +
                           ", must have four dimensions");
  }
  if (!call.q_lengths.empty() || !call.kv_lengths.empty()) {
    return InvalidArgument("q_lengths and kv_lengths must be empty for one sequence");
  }
  if (!call.sessions.empty() || call.backward) {
    return InvalidArgument("sessions and backward must be empty");
  }
  if (call.mask.key_offset != 0 || call.mask.keys_after != 0) {
    return InvalidArgument("mask.key_offset is " + std::to_string(call.mask.key_offset) +
                           " and keys_after " + std::to_string(call.mask.keys_after) +
                           ", must be 0: the shards' places are known");
  }
  if (BringsRows(call) &&
      call.k.shape[RowDimension(call.layout)] != call.v.shape[RowDimension(call.layout)]) {
    return InvalidArgument("k has the shape " + ShapeText(call.k.shape) + " and v " +
                           ShapeText(call.v.shape) + ", must have as many rows");
  }
  bool shared = call.outputs.any();
  Status wrong;
  ForTensors(call, [&](v1::TensorName name, const TensorRef& tensor) {
    shared = shared || tensor.shared.region != nullptr;
    if (tensor.shape.empty() || !wrong.ok()) return;
    const Result<int64_t> bytes = TensorBytes(NameOf(name), tensor.dtype, tensor.shape);
    if (!bytes.ok()) {
      wrong = bytes.status();
    } else if (*bytes != tensor.bytes || (*bytes > 0 && tensor.data == nullptr)) {
      wrong = InvalidArgument(std::string(NameOf(name)) + " has " + std::to_string(tensor.bytes) +
                              " bytes, its shape " + ShapeText(tensor.shape) + " needs " +
                              std::to_string(*bytes));
    }
  });
  ATTEND_RETURN_IF_ERROR(wrong);
  return shared ? InvalidArgument("shared memory is one server's, and a shard may be on any")
                : Status();
}

Result<AttentionResult> CallShards(const std::vector<ShardPart>& parts, int32_t layer, int64_t keys,
                                   const AttentionCall& call, const CallOptions& options) {
  const int64_t len_q = call.q.shape[RowDimension(call.layout)];
  // A single part with all rows needs no merge: it gets the call's own sinks and dtype, and its
  // answer has the bits of a plain Session's.
  const bool alone = parts.size() == 1 && parts[0].rows.size() == len_q;
  const auto answers = std::make_shared<Answers>(parts.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    Result<AttentionCall> cut = PartOf(call, keys, parts[i].keys, parts[i].rows);
    if (!cut.ok()) {
      answers->For(answers, i)({.status = cut.status()});
      continue;
    }
    if (alone) {
      cut->sinks = call.sinks;
      cut->o_float32 = call.o_float32;
      cut->return_lse = call.return_lse;
    }
    Session::AttendAsync({parts[i].session.get()}, layer, *std::move(cut), options,
                         answers->For(answers, i));
  }
  std::vector<CallOutcome> outcomes = answers->Wait();
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!outcomes[i].status.ok()) {
      return OfTokens(parts[i].keys.begin, parts[i].keys.end, parts[i].server, outcomes[i].status);
    }
  }
  if (alone) {
    outcomes[0].result.session_lengths = {keys};
    return std::move(outcomes[0].result);
  }
  std::vector<PartialRows> partial;
  for (size_t i = 0; i < parts.size(); ++i) {
    partial.push_back({&outcomes[i].result, parts[i].rows.begin});
  }
  Result<AttentionResult> merged = MergePartial(partial, len_q, call.sinks, call.layout);
  if (!merged.ok()) return merged;
  Result<HostTensor> o = Rounded(std::move(merged->o), AnswerDType(call));
  if (!o.ok()) return o.status();
  merged->o = *std::move(o);
  if (!call.return_lse) merged->lse.reset();
  TellOf(outcomes, &*merged);
  merged->session_lengths = {keys};
  return merged;
}

}  // namespace attend::client
