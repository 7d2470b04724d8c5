// SPDX-License-Identifier: Apache-2.0
//
// A dump is written to a temporary directory and renamed when complete. It holds every tensor
// inline, whatever the request's transport: K and V of sessions are gathered from their pages, so
// that replay needs no session.

#include "server/app/dump.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <array>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "server/util/thresholds.h"
#include "server/wire/protobuf_wire.h"
#include "server/wire/reply_codec.h"

namespace attend {
namespace {

namespace fs = std::filesystem;

// Attempts to find a free directory name.
constexpr int kNamesMax = 100;

struct Bytes {
  const void* data = nullptr;
  int64_t bytes = 0;
};

// A tensor of the request, with the shape and dtype of an output.
void FillLike(const Request& request, Output output, v1::Tensor* tensor) {
  FillOutput(request, output, tensor);
  tensor->mutable_inline_bytes();
}

// The bias's own shape, derived from its strides: stride 0 means that the dimension is 1 (or B, Hq
// or Lq is 1, which is the same).
void FillBias(const Attention& a, v1::Tensor* bias) {
  const Problem& p = a.problem;
  FillTensor(a.bias.dtype,
             {a.bias.stride_b != 0 ? p.batch : 1, a.bias.stride_h != 0 ? p.heads_q : 1,
              a.bias.stride_q != 0 ? p.len_q : 1, p.len_k},
             bias);
  bias->mutable_inline_bytes();
}

// The backward pass's tensors besides those of its attention.
void FillBackward(const Request& request, v1::BackwardPass* message) {
  FillLike(request, Output::kO, message->mutable_o());
  FillLike(request, Output::kO, message->mutable_d_o());
  FillLike(request, Output::kLse, message->mutable_lse());
  if (request.backward->gradients.d_lse != nullptr) {
    FillLike(request, Output::kLse, message->mutable_d_lse());
  }
  for (int i = static_cast<int>(Output::kDQ); i < kOutputsMax; ++i) {
    if (!request.backward->wanted[static_cast<size_t>(i)]) continue;
    message->add_wanted(
        static_cast<v1::TensorName>(v1::TENSOR_NAME_D_Q + i - static_cast<int>(Output::kDQ)));
  }
}

void FillMask(const Mask& mask, v1::Mask* message) {
  const bool top_left = mask.alignment == Alignment::kTopLeft;
  if (mask.unrestricted() && !top_left) return;
  if (mask.right == 0) {
    message->set_kind(top_left ? v1::Mask::KIND_CAUSAL_TOP_LEFT
                               : v1::Mask::KIND_CAUSAL_BOTTOM_RIGHT);
  } else {
    message->set_kind(top_left ? v1::Mask::KIND_WINDOW_TOP_LEFT
                               : v1::Mask::KIND_WINDOW_BOTTOM_RIGHT);
    if (mask.right > 0) message->set_window_right(mask.right);
  }
  if (mask.left >= 0) message->set_window_left(mask.left);
}

template <class T>
void FillArray(const T* values, int64_t count, google::protobuf::RepeatedField<T>* field) {
  if (values != nullptr) field->Add(values, values + count);
}

Status Failed(const std::string& what, const std::string& path, const std::string& why) {
  return Internal("cannot " + what + " " + path + ": " + why);
}

// Writes a message and its raw entries without copying their bytes.
Status WriteMessage(const std::string& path, const google::protobuf::Message& fields,
                    std::span<const Bytes> raw) {
  errno = 0;
  std::ofstream out(path, std::ios::binary);
  fields.SerializeToOstream(&out);
  for (const Bytes& entry : raw) {
    std::array<uint8_t, wire::kRawPrefixBytesMax> prefix;
    const uint8_t* const end = wire::WriteRawPrefix(entry.bytes, prefix.data());
    out.write(reinterpret_cast<const char*>(prefix.data()), end - prefix.data());
    out.write(static_cast<const char*>(entry.data), entry.bytes);
  }
  out.close();
  return out ? Status() : Failed("write", path, std::strerror(errno));
}

// JSON has no NaN or infinity.
nlohmann::json Number(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

std::string ReportJson(const Request& request, uint64_t seed) {
  const RowsReport& report = *request.report;
  nlohmann::ordered_json json;
  json["id"] = request.id;
  json["request_id"] = request.request_id;
  json["problem"] = Describe(request.attention.problem);
  json["kernel"] = std::string(KernelName(request.selection.kernel));
  json["kernel_reason"] = std::string(request.selection.why);
  json["device"] = request.device_name;
  json["seed"] = seed;
  json["rows_checked"] = report.rows_checked;
  json["rows_total"] = report.rows_total;
  json["rows_wide"] = report.rows_wide;
  json["rows_unjudged"] = report.rows_unjudged;
  json["max_abs_error"] = Number(report.max_abs_error);
  json["mean_abs_error"] = Number(report.mean_abs_error);
  json["bound"] = Number(report.bound);
  json["max_lse_error"] = Number(report.max_lse_error);
  json["lse_bound"] = Number(report.lse_bound);
  json["detail"] = report.detail;
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

std::string SafeName(const std::string& request_id) {
  constexpr size_t kCharactersMax = 64;
  std::string name;
  for (const char c : request_id.substr(0, kCharactersMax)) {
    const bool plain = std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_';
    name += plain ? c : '_';
  }
  return name;
}

// K or V gathered from pages, as a request without sessions would have sent it.
Result<std::vector<char>> Gathered(const Request& request, const ConstTensorView& view,
                                   int64_t dim) {
  const Attention& a = request.attention;
  const Problem& p = a.problem;
  const int64_t row_bytes = dim * DTypeBytes(p.dtype);
  std::vector<char> dense(static_cast<size_t>(p.batch * p.heads_kv * p.len_k * row_bytes));
  std::vector<HostPiece> pieces;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = SequenceOf(a, b);
    for (int64_t h = 0; h < p.heads_kv; ++h) {
      for (int64_t j = 0, run = 1; j < s.k_len; j += run) {
        const bool heads_first = request.layout == Layout::kBhld;
        if (heads_first) run = EvenKeys(p, j, s.k_len - j);
        const int64_t row =
            heads_first ? (b * p.heads_kv + h) * p.len_k + j : (b * p.len_k + j) * p.heads_kv + h;
        pieces.push_back({static_cast<const char*>(view.data) +
                              KeyElement(a, view, s, b, h, j) * DTypeBytes(p.dtype),
                          dense.data() + row * row_bytes, run * row_bytes});
      }
    }
  }
  ATTEND_RETURN_IF_ERROR(request.source.cache()->arena().Copy(pieces));
  return dense;
}

// `kept` owns the gathered tensors.
Result<std::vector<Bytes>> InputTensors(const Request& request,
                                        std::vector<std::vector<char>>& kept) {
  const Attention& a = request.attention;
  const Problem& p = a.problem;
  const int64_t size = DTypeBytes(p.dtype);
  std::vector<Bytes> tensors = {{a.q.data, ElementsQ(p) * size},
                                {a.k.data, ElementsK(p) * size},
                                {a.v.data, ElementsV(p) * size}};
  if (p.page_rows > 0) {
    const int64_t bytes = tensors[1].bytes + tensors[2].bytes;
    if (bytes > thresholds::kCheckedKeysBytesMax) {
      return ResourceExhausted("the sessions' K and V have " + std::to_string(bytes) +
                               " bytes, a dump may have at most " +
                               std::to_string(thresholds::kCheckedKeysBytesMax));
    }
    for (const auto& [view, dim, tensor] :
         {std::tuple{&a.k, p.dim, &tensors[1]}, std::tuple{&a.v, p.dim_v, &tensors[2]}}) {
      Result<std::vector<char>> dense = Gathered(request, *view, dim);
      if (!dense.ok()) return dense.status();
      kept.push_back(*std::move(dense));
      *tensor = {kept.back().data(), std::ssize(kept.back())};
    }
  }
  return tensors;
}

}  // namespace

void FillRequest(const Request& request, v1::AttendRequest* message) {
  const Attention& a = request.attention;
  const Problem& p = a.problem;
  message->set_request_id(request.request_id);
  message->set_layout(static_cast<v1::Layout>(request.layout));
  FillLike(request, Output::kDQ, message->mutable_q());
  FillLike(request, Output::kDK, message->mutable_k());
  FillLike(request, Output::kDV, message->mutable_v());
  if (p.has_bias) FillBias(a, message->mutable_bias());
  FillArray(a.q_lengths, p.batch, message->mutable_q_lengths());
  FillArray(a.kv_lengths, p.batch, message->mutable_kv_lengths());
  FillArray(a.q_offsets, p.batch + 1, message->mutable_cu_q());
  FillArray(a.kv_offsets, p.batch + 1, message->mutable_cu_kv());
  message->set_scale(p.scale);
  FillMask(p.mask, message->mutable_mask());
  message->mutable_mask()->set_key_offset(p.key_offset);
  message->mutable_mask()->set_keys_after(p.keys_after);
  message->set_softcap(p.softcap);
  FillArray(a.alibi_slopes, (a.alibi_stride_b != 0 ? p.batch : 1) * p.heads_q,
            message->mutable_alibi_slopes());
  FillArray(a.sinks, p.heads_q, message->mutable_sinks());
  message->set_dropout_p(static_cast<float>(p.dropout) / kDropoutOne);
  if (p.dropout > 0) message->set_dropout_seed(a.dropout.seed);
  message->set_return_lse(p.return_lse && !request.lse_for_check && !request.backward);
  if (request.backward) FillBackward(request, message->mutable_backward());
  if (p.o_float32) message->set_o_dtype(v1::DTYPE_FLOAT32);
  message->set_kernel(request.kernel);
  message->set_check(request.to_be_checked());
  message->set_priority(request.priority);
}

Dumper::Dumper(Options options, const Clock& clock, Logger& logger)
    : options_(std::move(options)), clock_(clock), logger_(logger) {}

Status Dumper::WriteFiles(const Request& request, const std::string& temporary) const {
  const Attention& a = request.attention;
  v1::AttendRequest message;
  FillRequest(request, &message);
  std::vector<std::vector<char>> kept;
  Result<std::vector<Bytes>> inputs = InputTensors(request, kept);
  if (!inputs.ok()) return inputs.status();
  std::vector<Bytes>& tensors = *inputs;
  if (a.problem.has_bias) {
    tensors.push_back({a.bias.data, static_cast<int64_t>(message.bias().byte_length())});
  }
  if (request.backward) {
    tensors.push_back({a.o.data, BytesO(a.problem)});
    tensors.push_back({a.lse, BytesLse(a.problem)});
    tensors.push_back({request.backward->gradients.d_o.data, BytesO(a.problem)});
    if (const float* const d_lse = request.backward->gradients.d_lse) {
      tensors.push_back({d_lse, BytesLse(a.problem)});
    }
  }
  ATTEND_RETURN_IF_ERROR(WriteMessage(temporary + "/request.binpb", message, tensors));

  v1::AttendResponse response;
  FillResponse(request, NanosecondsBetween(request.received, request.completed), &response);
  response.set_kernel_reason(std::string(request.selection.why));
  // The file holds all tensors inline, whatever their transport was.
  std::vector<Bytes> outputs;
  const auto tensors_out = OutputsOf(request);
  for (size_t i = 0; i < tensors_out.size(); ++i) {
    if (!tensors_out[i].wanted) continue;
    ResponseTensor(response, static_cast<Output>(i)).mutable_inline_bytes();
    outputs.push_back({tensors_out[i].data, tensors_out[i].bytes});
  }
  ATTEND_RETURN_IF_ERROR(WriteMessage(temporary + "/response.binpb", response, outputs));

  errno = 0;
  const std::string path = temporary + "/report.json";
  std::ofstream report(path);
  report << ReportJson(request, options_.check_seed);
  report.close();
  return report ? Status() : Failed("write", path, std::strerror(errno));
}

std::string Dumper::TakePlace(const Request& request) {
  const MutexLock lock(mutex_);
  const TimePoint now = clock_.Now();
  const bool shared = request.transport == Transport::kSharedMemory;
  const int64_t shared_max = (options_.dumps_max + 1) / 2;
  if (dumps_ >= options_.dumps_max) {
    return fmt::format("{} were written, the limit (--check-dump-max)", dumps_);
  }
  if (shared && shared_dumps_ >= shared_max) {
    return fmt::format(
        "{} with tensors in shared memory were written, the limit (half of --check-dump-max)",
        shared_dumps_);
  }
  const auto [last, first] =
      last_.try_emplace(std::pair(request.transport, request.selection.kernel), now);
  if (!first && now - last->second < options_.interval) {
    return "the last one of this transport and kernel was written less than "
           "--check-dump-interval ago";
  }
  last->second = now;
  ++dumps_;
  if (shared) ++shared_dumps_;
  return {};
}

Result<std::string> Dumper::WriteDirectory(const Request& request) const {
  // The date in the name is for people; no logic depends on it.
  const auto now = std::chrono::floor<std::chrono::milliseconds>(std::chrono::system_clock::now());
  const auto millis = now.time_since_epoch().count() % 1000;
  const std::string name = fmt::format("{:%Y%m%dT%H%M%S}.{:03}Z-{}",
                                       fmt::gmtime(std::chrono::system_clock::to_time_t(now)),
                                       millis, SafeName(request.request_id));
  const fs::path directory = options_.directory;
  const fs::path temporary = directory / fmt::format(".{}-{}.partial", name, request.id);
  std::error_code error;
  fs::create_directories(temporary, error);
  // A tenant's tensors: no other user of the host may read them.
  if (!error) fs::permissions(temporary, fs::perms::owner_all, error);
  if (error) return Failed("make", temporary.string(), error.message());
  Status status = WriteFiles(request, temporary.string());
  // The client chose the id, so two dumps of one millisecond may have the same name. rename() fails
  // on a directory that is not empty; the second dump then tries another name.
  fs::path final = directory / name;
  for (int again = 0; status.ok(); ++again) {
    fs::rename(temporary, final, error);
    if (!error) return final.string();
    const bool taken = error == std::errc::directory_not_empty || error == std::errc::file_exists;
    if (!taken || again == kNamesMax) {
      status = Failed("rename to", final.string(), error.message());
    }
    final = directory / fmt::format("{}-{}", name, request.id + again);
  }
  fs::remove_all(temporary, error);
  return status;
}

void Dumper::Write(const Request& request) {
  const auto log = [&](LogLevel level, std::string_view event, std::string_view name,
                       const std::string& value) {
    logger_.Log(level, event,
                {{"id", request.id}, {"request_id", request.request_id}, {name, value}});
  };
  if (const std::string why = TakePlace(request); !why.empty()) {
    counts_.left_out.fetch_add(1, std::memory_order_relaxed);
    return log(LogLevel::warn, "check dump left out", "reason", why);
  }
  const Result<std::string> written = WriteDirectory(request);
  (written.ok() ? counts_.written : counts_.failed).fetch_add(1, std::memory_order_relaxed);
  if (written.ok()) return log(LogLevel::warn, "check dump written", "path", *written);
  log(LogLevel::err, "check dump failed", "error", written.status().message());
}

}  // namespace attend
