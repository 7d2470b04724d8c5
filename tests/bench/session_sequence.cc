// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/session_sequence.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace attend::bench {

using client::AttentionCall;
using client::HostTensor;
using client::Session;

HostTensor RandomBFloat16(std::mt19937_64& random, std::vector<int64_t> shape) {
  HostTensor tensor = Take(HostTensor::Make("t", DType::kBFloat16, std::move(shape)), "memory");
  auto* const values = reinterpret_cast<uint16_t*>(tensor.data.get());
  uint64_t bits = 0;
  for (int64_t n = 0; n < tensor.bytes / 2; ++n) {
    bits = n % 4 == 0 ? random() : bits >> 16;
    values[n] = static_cast<uint16_t>((bits & 0x80ff) | (bits & 0x100 ? 0x3f80 : 0x3f00));
  }
  return tensor;
}

void Fail(const std::string& what) {
  std::fprintf(stderr, "bench: %s\n", what.c_str());
  std::exit(1);
}

Sequence::Sequence(client::Client& client, const SequenceShape& shape, uint64_t seed)
    : shape_(shape), random_(seed), session_(Open(client)) {
  for (int n = 0; n < kTokens; ++n) tokens_.push_back(Call(1, 1));
  constexpr int64_t kPiece = 512;
  for (int64_t done = 0; done < shape.context; done += kPiece) {
    prompt_.push_back(Call(0, std::min(kPiece, shape.context - done)));
    Take(session_.Attend(0, prompt_.back()), "prompt");
  }
}

void Sequence::Truncate() {
  const Status status = session_.Truncate(shape_.context);
  if (!status.ok()) Fail("truncate: " + status.ToString());
  steps_ = 0;
}

template <class Of>
HostTensor Sequence::Joined(const std::vector<AttentionCall>& calls, const Of& of) const {
  HostTensor all = Take(
      HostTensor::Make("t", DType::kBFloat16, {1, shape_.heads_kv, shape_.context + 1, shape_.dim}),
      "memory");
  std::byte* to = all.data.get();
  for (int64_t h = 0; h < shape_.heads_kv; ++h) {
    for (const AttentionCall& call : calls) {
      const int64_t bytes = call.k.shape[2] * shape_.dim * 2;
      std::memcpy(to, static_cast<const std::byte*>(of(call).data) + h * bytes,
                  static_cast<size_t>(bytes));
      to += bytes;
    }
  }
  return all;
}

AttentionCall Sequence::Whole() const {
  std::vector<AttentionCall> calls = prompt_;
  calls.push_back(tokens_[0]);
  AttentionCall whole = tokens_[0];
  whole.k = Joined(
      calls, [](const AttentionCall& call) -> const auto& { return call.k; });
  whole.v = Joined(
      calls, [](const AttentionCall& call) -> const auto& { return call.v; });
  return whole;
}

Session Sequence::Open(client::Client& client) const {
  client::SessionOptions options;
  options.shapes = {{DType::kBFloat16, shape_.heads_kv, shape_.dim, shape_.dim}};
  return Take(Session::Create(client, options), "session");
}

AttentionCall Sequence::Call(int64_t rows_q, int64_t rows_k) {
  AttentionCall call;
  call.mask.kind = v1::Mask::KIND_CAUSAL_BOTTOM_RIGHT;
  call.q = RandomBFloat16(random_, {1, shape_.heads_q, rows_q, shape_.dim});
  call.k = RandomBFloat16(random_, {1, shape_.heads_kv, rows_k, shape_.dim});
  call.v = RandomBFloat16(random_, {1, shape_.heads_kv, rows_k, shape_.dim});
  return call;
}

}  // namespace attend::bench
