// SPDX-License-Identifier: Apache-2.0

#include "client/local/local_call.h"

#include <charconv>
#include <utility>

#include "client/call/tree_mask.h"
#include "kernels/c/params_of.h"

namespace attend::client {
namespace {

// A status of the C library, whose codes equal Code's.
Status Called(int32_t code) {
  if (code == ATTEND_OK) return Status();
  return Status(static_cast<Code>(code), attend_last_error());
}

int64_t Bytes(const auto& values) {
  return static_cast<int64_t>(values.size() * sizeof(values[0]));
}

}  // namespace

Result<int32_t> ParseDevice(const std::string& name) {
  int32_t count = 0;
  ATTEND_RETURN_IF_ERROR(Called(attend_device_count(&count)));
  if (name == "cpu") return int32_t{ATTEND_CPU};
  if (name == "auto") return count > 0 ? 0 : int32_t{ATTEND_CPU};
  int32_t ordinal = 0;
  const char* const end = name.data() + name.size();
  const auto read = name.starts_with("cuda:") ? std::from_chars(name.data() + 5, end, ordinal)
                                              : std::from_chars_result{nullptr, std::errc()};
  if (read.ptr != end || read.ec != std::errc() || ordinal < 0) {
    return InvalidArgument("device \"" + name + "\": must be auto, cpu or cuda:N");
  }
  if (ordinal < count) return ordinal;
  const std::string why = attend_last_error();
  return Status(Code::kFailedPrecondition, name + ": there are " + std::to_string(count) + " GPUs" +
                                               (count == 0 && !why.empty() ? ": " + why : ""));
}

Result<std::unique_ptr<LocalCall>> LocalCall::Make(int32_t device, const AttentionCall& call) {
  if (call.backward) {
    return Status(Code::kUnimplemented, "backward: gradients are not measured in this process");
  }
  Result<AttentionCall> written = WithTreeAsBias(call);
  if (!written.ok()) return written.status();
  std::unique_ptr<LocalCall> local(new LocalCall(device, *std::move(written)));
  ATTEND_RETURN_IF_ERROR(local->Prepare());
  return local;
}

LocalCall::~LocalCall() {
  for (void* const memory : memory_) attend_free(device_, memory);
}

template <class T>
Status LocalCall::MirrorIn(T** pointer, int64_t bytes) {
  if (*pointer == nullptr || bytes == 0) return Status();
  void* data = nullptr;
  ATTEND_RETURN_IF_ERROR(Called(attend_malloc(device_, bytes, &data)));
  memory_.push_back(data);
  inputs_.push_back({data, *pointer, bytes});
  *pointer = static_cast<T*>(data);
  return Status();
}

Status LocalCall::MirrorAll() {
  ATTEND_RETURN_IF_ERROR(MirrorIn(&params_.q.data, call_.q.bytes));
  ATTEND_RETURN_IF_ERROR(MirrorIn(&params_.k.data, call_.k.bytes));
  ATTEND_RETURN_IF_ERROR(MirrorIn(&params_.v.data, call_.v.bytes));
  if (call_.bias) ATTEND_RETURN_IF_ERROR(MirrorIn(&params_.bias, call_.bias->bytes));
  ATTEND_RETURN_IF_ERROR(MirrorIn(&params_.alibi_slopes, Bytes(call_.alibi_slopes)));
  ATTEND_RETURN_IF_ERROR(MirrorIn(&params_.sinks, Bytes(call_.sinks)));
  ATTEND_RETURN_IF_ERROR(MirrorIn(&params_.q_lengths, Bytes(call_.q_lengths)));
  ATTEND_RETURN_IF_ERROR(MirrorIn(&params_.kv_lengths, Bytes(call_.kv_lengths)));
  ATTEND_RETURN_IF_ERROR(MirrorIn(&params_.q_offsets, Bytes(call_.cu_q)));
  ATTEND_RETURN_IF_ERROR(MirrorIn(&params_.kv_offsets, Bytes(call_.cu_kv)));
  const size_t read = inputs_.size();
  ATTEND_RETURN_IF_ERROR(MirrorIn(&params_.o.data, result_.o.bytes));
  if (result_.lse) ATTEND_RETURN_IF_ERROR(MirrorIn(&params_.lse, result_.lse->bytes));
  outputs_.assign(inputs_.begin() + static_cast<std::ptrdiff_t>(read), inputs_.end());
  inputs_.resize(read);
  ATTEND_RETURN_IF_ERROR(Called(attend_workspace_bytes(&params_, &params_.workspace_bytes)));
  ATTEND_RETURN_IF_ERROR(
      Called(attend_malloc(device_, params_.workspace_bytes, &params_.workspace)));
  memory_.push_back(params_.workspace);
  return Called(attend_memset(device_, params_.workspace, 0, params_.workspace_bytes, nullptr));
}

Status LocalCall::Prepare() {
  Result<HostTensor> o = HostTensor::Make("o", AnswerDType(call_), AnswerShape(call_));
  if (!o.ok()) return o.status();
  result_.o = std::move(*o);
  if (call_.return_lse) {
    Result<HostTensor> lse = HostTensor::Make("lse", DType::kFloat32, LseShape(call_));
    if (!lse.ok()) return lse.status();
    result_.lse = std::move(*lse);
  }
  const Result<Attention> attention =
      Describe(call_, &result_.o, result_.lse ? &*result_.lse : nullptr);
  if (!attention.ok()) return attention.status();
  params_ = ParamsOf(*attention);
  params_.device = device_;
  if (!call_.kernel.empty()) params_.kernel = call_.kernel.c_str();
  if (device_ != ATTEND_CPU) ATTEND_RETURN_IF_ERROR(MirrorAll());
  const char* kernel = "";
  ATTEND_RETURN_IF_ERROR(Called(attend_select(&params_, &kernel, nullptr)));
  result_.kernel = kernel;
  return Status();
}

Status LocalCall::Copy(const std::vector<Mirror>& mirrors, int32_t kind) {
  for (const Mirror& mirror : mirrors) {
    void* const host = const_cast<void*>(mirror.host);
    const bool in = kind == ATTEND_HOST_TO_DEVICE;
    ATTEND_RETURN_IF_ERROR(
        Called(attend_memcpy(device_, in ? mirror.device : host, in ? host : mirror.device,
                             mirror.bytes, kind, nullptr)));
  }
  return mirrors.empty() ? Status() : Called(attend_synchronize(device_, nullptr));
}

Result<PhaseTimings> LocalCall::Run(const NowNs& now) {
  const int64_t begin = now();
  ATTEND_RETURN_IF_ERROR(Copy(inputs_, ATTEND_HOST_TO_DEVICE));
  const int64_t copied = now();
  ATTEND_RETURN_IF_ERROR(Called(attend_run(&params_, nullptr)));
  if (device_ != ATTEND_CPU) ATTEND_RETURN_IF_ERROR(Called(attend_synchronize(device_, nullptr)));
  const int64_t computed = now();
  ATTEND_RETURN_IF_ERROR(Copy(outputs_, ATTEND_DEVICE_TO_HOST));
  const int64_t end = now();
  PhaseTimings timings;
  timings.copy_in_ns = copied - begin;
  timings.kernel_ns = computed - copied;
  timings.copy_out_ns = end - computed;
  timings.total_ns = end - begin;
  return timings;
}

}  // namespace attend::client
