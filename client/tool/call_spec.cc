// SPDX-License-Identifier: Apache-2.0

#include "client/tool/call_spec.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

#include "client/call/random.h"
#include "client/call/tree_mask.h"
#include "client/tool/file_io.h"
#include "kernels/contract/tree.h"

namespace attend::client {
namespace {

template <class Number>
bool ParseNumber(std::string_view text, Number* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc() && end == text.data() + text.size() && !text.empty();
}

Status BadWord(std::string_view word, const std::string& why) {
  return InvalidArgument("shape word \"" + std::string(word) + "\": " + why);
}

template <class Value>
struct Word {
  const char* name;
  Value CallSpec::*field;
};
// Longer names first, so that "Hkv2" is not read as H.
constexpr Word<int64_t> kSizes[] = {
    {"Hkv", &CallSpec::heads_kv}, {"Hq", &CallSpec::heads_q}, {"Lq", &CallSpec::len_q},
    {"Lk", &CallSpec::len_k},     {"Dv", &CallSpec::dim_v},   {"B", &CallSpec::batch},
    {"H", &CallSpec::heads_q},    {"L", &CallSpec::len_q},    {"D", &CallSpec::dim},
};

constexpr Word<bool> kFlags[] = {
    {"ragged", &CallSpec::ragged},     {"causal", &CallSpec::causal},
    {"top-left", &CallSpec::top_left}, {"bias", &CallSpec::bias},
    {"alibi", &CallSpec::alibi},       {"sinks", &CallSpec::sinks},
    {"lse", &CallSpec::lse},           {"backward", &CallSpec::backward},
    {"bits", &CallSpec::bits},
};

// Whether `word` is a size; `status` then tells whether its value is valid.
bool ParseSize(std::string_view word, CallSpec* spec, Status* status) {
  for (const auto& size : kSizes) {
    if (!word.starts_with(size.name)) continue;
    std::string_view number = word.substr(std::string_view(size.name).size());
    if (number.starts_with("=")) number.remove_prefix(1);
    int64_t value = 0;
    if (number.empty() || (number[0] != '-' && (number[0] < '0' || number[0] > '9'))) continue;
    if (!ParseNumber(number, &value) || value < 0) {
      *status = BadWord(word, "must be a number of at least 0");
    }
    spec->*size.field = value;
    return true;
  }
  return false;
}

Status ParseWindow(std::string_view word, std::string_view value, CallSpec* spec) {
  const size_t colon = value.find(':');
  int64_t& left = spec->call.mask.window_left.emplace();
  int64_t& right = spec->call.mask.window_right.emplace();
  if (colon == std::string_view::npos || !ParseNumber(value.substr(0, colon), &left) ||
      !ParseNumber(value.substr(colon + 1), &right) || left < -1 || right < -1) {
    return BadWord(word, "must be window=LEFT:RIGHT, each at least 0, or -1 for no bound");
  }
  return Status();
}

Status ParseValue(std::string_view word, std::string_view key, std::string_view value,
                  CallSpec* spec) {
  if (key == "dtype") {
    const Result<DType> dtype = ParseDType(value);
    if (!dtype.ok()) return dtype.status();
    spec->dtype = *dtype;
  } else if (key == "layout") {
    const std::optional<v1::Layout> layout = ParseLayout(value);
    if (!layout) return BadWord(word, "layout must be bhld, blhd or lhd");
    spec->call.layout = *layout;
  } else if (key == "window") {
    return ParseWindow(word, value, spec);
  } else if (key == "kernel") {
    spec->call.kernel = value;
  } else if (key == "softcap") {
    if (!ParseNumber(value, &spec->call.softcap) || !(spec->call.softcap >= 0)) {
      return BadWord(word, "must be a number of at least 0");
    }
  } else if (key == "scale") {
    if (float& scale = spec->call.scale.emplace();
        !ParseNumber(value, &scale) || !std::isfinite(scale)) {
      return BadWord(word, "must be a finite number");
    }
  } else if (key == "tree") {
    if (!ParseNumber(value, &spec->tree) || spec->tree < 1 || spec->tree > kTreeTokensMax) {
      return BadWord(word, "must be a number in [1, 1024]");
    }
  } else if (key == "dropout") {
    double dropout = 0;
    if (!ParseNumber(value, &dropout)) return BadWord(word, "must be a number");
    spec->call.dropout_p = static_cast<float>(dropout);
    return DropoutSteps("dropout", dropout).status();
  } else if (key == "weight") {
    if (!ParseNumber(value, &spec->weight) || !(spec->weight > 0) || spec->weight > 1e9) {
      return BadWord(word, "must be a number above 0");
    }
  } else {
    return BadWord(word, std::string("unknown; known are Hq, Lq and ") + kCallWords);
  }
  return Status();
}

Status ParseWord(std::string_view word, CallSpec* spec) {
  for (const auto& flag : kFlags) {
    if (word == flag.name) {
      spec->*flag.field = true;
      return Status();
    }
  }
  Status status;
  if (ParseSize(word, spec, &status)) return status;
  const size_t equals = word.find('=');
  const std::string_view value =
      equals == std::string_view::npos ? std::string_view() : word.substr(equals + 1);
  return ParseValue(word, word.substr(0, equals), value, spec);
}

// {"B": 1, "causal": true} as "B=1,causal".
Result<std::string> WordsOf(const nlohmann::json& object) {
  std::string text;
  for (const auto& [key, value] : object.items()) {
    if (value.is_boolean()) {
      if (value.get<bool>()) text += (text.empty() ? "" : ",") + key;
      continue;
    }
    if (!value.is_number() && !value.is_string()) {
      return InvalidArgument("\"" + key + "\" must be a number, a string or a boolean");
    }
    text += (text.empty() ? "" : ",") + key + "=" +
            (value.is_string() ? value.get<std::string>() : value.dump());
  }
  return text;
}

Result<TensorRef> RandomTensor(const char* name, DType dtype, std::vector<int64_t> shape,
                               Random& random) {
  Result<HostTensor> tensor = HostTensor::Make(name, dtype, std::move(shape));
  if (!tensor.ok()) return tensor.status();
  const int64_t elements = tensor->bytes / DTypeBytes(dtype);
  for (int64_t i = 0; i < elements; ++i) {
    StoreElement(tensor->data.get(), dtype, i, random.AboutNormal());
  }
  return TensorRef(*tensor);
}

// Each bit is set with probability 1/2.
Result<TensorRef> RandomBits(const char* name, std::vector<int64_t> shape, Random& random) {
  Result<HostTensor> tensor = HostTensor::Make(name, DType::kBit, std::move(shape));
  if (!tensor.ok()) return tensor.status();
  for (int64_t at = 0; at < tensor->bytes; ++at) {
    tensor->data[static_cast<std::ptrdiff_t>(at)] = static_cast<std::byte>(random.Below(256));
  }
  return TensorRef(*tensor);
}

std::vector<int64_t> Lengths(const CallSpec& spec, int64_t longest, Random& random) {
  std::vector<int64_t> lengths(static_cast<size_t>(spec.batch), longest);
  if (spec.ragged && longest > 0) {
    for (int64_t& length : lengths) length = 1 + random.Below(longest);
  }
  return lengths;
}

std::vector<int64_t> Cumulative(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> cu = {0};
  for (const int64_t length : lengths) cu.push_back(cu.back() + length);
  return cu;
}

std::vector<int64_t> ShapeOf(v1::Layout layout, int64_t b, int64_t h, int64_t l, int64_t d) {
  if (layout == v1::LAYOUT_LHD) return {l, h, d};
  if (layout == v1::LAYOUT_BLHD) return {b, l, h, d};
  return {b, h, l, d};
}

Status FillTerms(const CallSpec& spec, int64_t longest_q, int64_t longest_k, Random& random,
                 AttentionCall* call) {
  call->mask.kind = MaskKind(spec.causal, spec.call.mask.window_left.has_value(), spec.top_left);
  if (spec.causal) call->mask.window_right.reset();
  call->return_lse = spec.lse && !spec.backward;
  if (spec.alibi) {
    for (int64_t h = 0; h < spec.heads_q; ++h) {
      call->alibi_slopes.push_back(
          std::exp2(-8.0f * static_cast<float>(h + 1) / static_cast<float>(spec.heads_q)));
    }
  }
  if (spec.sinks) {
    for (int64_t h = 0; h < spec.heads_q; ++h) call->sinks.push_back(random.AboutNormal());
  }
  if (call->dropout_p > 0) call->dropout_seed = random.Bits();
  if (spec.bias || spec.bits) {
    std::vector<int64_t> shape = {1, spec.heads_q, longest_q, longest_k};
    Result<TensorRef> bias = spec.bits ? RandomBits("bias", std::move(shape), random)
                                       : RandomTensor("bias", spec.dtype, std::move(shape), random);
    if (!bias.ok()) return bias.status();
    call->bias = std::move(*bias);
  }
  return Status();
}

// Drafts of shorter sequences have fewer tokens.
Status FillTree(const CallSpec& spec, const std::vector<int64_t>& lengths_q,
                const std::vector<int64_t>& lengths_k, Random& random, AttentionCall* call) {
  std::vector<int64_t> parents;
  for (int64_t i = 0; i < spec.tree; ++i) parents.push_back(random.Below(i + 1) - 1);
  Result<HostTensor> tree = TreeFromParents(parents);
  if (!tree.ok()) return tree.status();
  call->tree = *tree;
  for (size_t b = 0; b < lengths_q.size(); ++b) {
    call->tree_lengths.push_back(std::min({spec.tree, lengths_q[b], lengths_k[b]}));
  }
  return Status();
}

}  // namespace

std::optional<v1::Layout> ParseLayout(std::string_view name) {
  if (name == "bhld") return v1::LAYOUT_BHLD;
  if (name == "blhd") return v1::LAYOUT_BLHD;
  return name == "lhd" ? std::optional(v1::LAYOUT_LHD) : std::nullopt;
}

v1::Mask::Kind MaskKind(bool causal, bool windowed, bool top_left) {
  if (causal) return top_left ? v1::Mask::KIND_CAUSAL_TOP_LEFT : v1::Mask::KIND_CAUSAL_BOTTOM_RIGHT;
  if (top_left) return v1::Mask::KIND_WINDOW_TOP_LEFT;
  return windowed ? v1::Mask::KIND_WINDOW_BOTTOM_RIGHT : v1::Mask::KIND_NONE;
}

Result<CallSpec> ParseCallSpec(const std::string& text) {
  CallSpec spec;
  spec.text = text;
  std::string_view rest = text;
  while (!rest.empty()) {
    const size_t comma = rest.find(',');
    const std::string_view word = rest.substr(0, comma);
    if (word.empty()) return InvalidArgument("shape \"" + text + "\" has an empty word");
    ATTEND_RETURN_IF_ERROR(ParseWord(word, &spec));
    rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
    if (comma != std::string_view::npos && rest.empty()) {
      return InvalidArgument("shape \"" + text + "\" has an empty word");
    }
  }
  if (text.empty()) return InvalidArgument("shape is empty");
  if (spec.heads_kv == 0) spec.heads_kv = spec.heads_q;
  if (spec.len_k == 0 && text.find("Lk") == std::string::npos) spec.len_k = spec.len_q;
  if (spec.dim_v == 0) spec.dim_v = spec.dim;
  if (spec.causal && spec.call.mask.window_right.value_or(0) > 0) {
    return InvalidArgument("shape \"" + text + "\": causal allows no window to the right");
  }
  if (spec.bias + spec.bits + (spec.tree > 0) > 1) {
    return InvalidArgument("shape \"" + text + "\": bias, bits and tree exclude each other");
  }
  if (spec.tree > 0 && spec.backward) {
    return InvalidArgument("shape \"" + text + "\": tree and backward exclude each other");
  }
  return spec;
}

Result<std::vector<CallSpec>> ReadMix(const std::string& path) {
  const Result<std::string> text = ReadWholeFile(path);
  if (!text.ok()) return text.status();
  nlohmann::json mix = nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false);
  if (mix.is_object() && mix.contains("shapes")) mix = nlohmann::json(mix["shapes"]);
  if (!mix.is_array() || mix.empty()) {
    return InvalidArgument(path + ": must be a JSON array of shapes, or an object with one");
  }
  std::vector<CallSpec> specs;
  for (const auto& entry : mix) {
    const std::string where = path + ": shape " + std::to_string(specs.size()) + ": ";
    if (!entry.is_object() && !entry.is_string()) {
      return InvalidArgument(where + "must be an object or a string");
    }
    const Result<std::string> words =
        entry.is_string() ? Result<std::string>(entry.get<std::string>()) : WordsOf(entry);
    if (!words.ok()) return InvalidArgument(where + words.status().message());
    Result<CallSpec> spec = ParseCallSpec(*words);
    if (!spec.ok()) return InvalidArgument(where + spec.status().message());
    specs.push_back(std::move(*spec));
  }
  return specs;
}

Status TakeInputBytes(const CallSpec& spec, int64_t calls, int64_t* bytes_max) {
  using Shape = std::vector<int64_t>;
  int64_t all = 0;
  for (const auto& [name, shape] :
       {std::pair{"q", Shape{calls, spec.batch, spec.heads_q, spec.len_q, spec.dim}},
        std::pair{"k", Shape{calls, spec.batch, spec.heads_kv, spec.len_k, spec.dim}},
        std::pair{"v", Shape{calls, spec.batch, spec.heads_kv, spec.len_k, spec.dim_v}},
        std::pair{"bias", Shape{spec.bias ? calls : 0, spec.heads_q, spec.len_q, spec.len_k}},
        std::pair{"bits", Shape{spec.bits ? calls : 0, spec.heads_q, spec.len_q, spec.len_k}},
        std::pair{"o and d_o", Shape{spec.backward ? calls : 0, 2 * spec.batch, spec.heads_q,
                                     spec.len_q, spec.dim_v}}}) {
    const DType dtype = name == std::string_view("bits") ? DType::kBit : spec.dtype;
    const Result<int64_t> bytes = TensorBytes(name, dtype, shape);
    if (!bytes.ok() || __builtin_add_overflow(all, *bytes, &all)) {
      return InvalidArgument("the bytes of its inputs overflow 64 bits");
    }
  }
  if (all > *bytes_max) {
    return InvalidArgument("its inputs, " + std::to_string(calls) + " of each, take " +
                           BytesText(all) + ", more than the " + BytesText(*bytes_max) +
                           " of memory available for them");
  }
  *bytes_max -= all;
  return Status();
}

Result<AttentionCall> MakeRandomCall(const CallSpec& spec, uint64_t seed) {
  Random random(seed);
  AttentionCall call = spec.call;
  if (spec.batch > 1 << 20) {
    return InvalidArgument("B is " + std::to_string(spec.batch) + ", must be at most 1048576");
  }
  const std::vector<int64_t> lengths_q = Lengths(spec, spec.len_q, random);
  const std::vector<int64_t> lengths_k = Lengths(spec, spec.len_k, random);
  int64_t rows_q = spec.len_q, rows_k = spec.len_k;
  int64_t longest_q = spec.len_q, longest_k = spec.len_k;
  if (call.layout == v1::LAYOUT_LHD) {
    call.cu_q = Cumulative(lengths_q);
    call.cu_kv = Cumulative(lengths_k);
    rows_q = call.cu_q.back();
    rows_k = call.cu_kv.back();
    longest_q = lengths_q.empty() ? 0 : *std::max_element(lengths_q.begin(), lengths_q.end());
    longest_k = lengths_k.empty() ? 0 : *std::max_element(lengths_k.begin(), lengths_k.end());
  } else if (spec.ragged) {
    call.q_lengths = lengths_q;
    call.kv_lengths = lengths_k;
  }
  for (const auto& [name, heads, rows, dim, target] :
       {std::tuple{"q", spec.heads_q, rows_q, spec.dim, &call.q},
        std::tuple{"k", spec.heads_kv, rows_k, spec.dim, &call.k},
        std::tuple{"v", spec.heads_kv, rows_k, spec.dim_v, &call.v}}) {
    Result<TensorRef> tensor =
        RandomTensor(name, spec.dtype, ShapeOf(call.layout, spec.batch, heads, rows, dim), random);
    if (!tensor.ok()) return tensor.status();
    *target = std::move(*tensor);
  }
  if (spec.tree > 0) ATTEND_RETURN_IF_ERROR(FillTree(spec, lengths_q, lengths_k, random, &call));
  ATTEND_RETURN_IF_ERROR(FillTerms(spec, longest_q, longest_k, random, &call));
  if (!spec.backward) return call;
  BackwardCall& backward = call.backward.emplace();
  backward.d_bias = spec.bias;  // a bit mask has none
  backward.d_sinks = spec.sinks;
  Result<TensorRef> d_o = RandomTensor("d_o", spec.dtype, AnswerShape(call), random);
  if (!d_o.ok()) return d_o.status();
  backward.d_o = std::move(*d_o);
  return call;
}

}  // namespace attend::client
