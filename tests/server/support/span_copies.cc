// SPDX-License-Identifier: Apache-2.0

#include "tests/server/support/span_copies.h"

#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cpu/append_keys.h"
#include "kernels/reference/reference_gradients.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

constexpr uintptr_t kAlignment = 256;

uintptr_t Address(const void* data) { return reinterpret_cast<uintptr_t>(data); }

class Copies {
 public:
  Copies(const SpanList& spans, const SpanList& in_place) : spans_(spans), in_place_(in_place) {
    for (const HostSpan& span : spans) {
      blocks_.push_back(test::MakeBlock(span.bytes + static_cast<int64_t>(kAlignment)));
      places_.push_back(blocks_.back().get() + Address(span.data) % kAlignment);
    }
  }

  void Fill() {
    for (int n = 0; n < spans_.size(); ++n) std::memset(places_[n], 0xFF, Bytes(n));
  }
  void CopyIn() {
    for (int n = 0; n < spans_.size(); ++n) std::memcpy(places_[n], spans_[n].data, Bytes(n));
  }
  // Bytes that are elsewhere.
  void CopyIn(const HostPiece& piece) {
    for (int n = 0; n < spans_.size(); ++n) {
      const uintptr_t offset = Address(piece.to) - Address(spans_[n].data);
      if (offset > Bytes(n) || static_cast<size_t>(piece.bytes) > Bytes(n) - offset) continue;
      std::memcpy(places_[n] + offset, piece.from, static_cast<size_t>(piece.bytes));
      return;
    }
    if (fault_.empty()) fault_ = "a gathered piece lies in none of the spans";
  }
  void CopyOut() {
    for (int n = 0; n < spans_.size(); ++n) std::memcpy(spans_[n].data, places_[n], Bytes(n));
  }

  template <class T>
  void Move(const char* name, T** pointer) {
    if (*pointer == nullptr || in_place_.Contains(*pointer, 1)) return;
    for (const bool at_end : {false, true}) {
      for (int n = 0; n < spans_.size(); ++n) {
        const uintptr_t offset = Address(*pointer) - Address(spans_[n].data);
        if (offset > Bytes(n) || (offset == Bytes(n)) != at_end) continue;
        *pointer = reinterpret_cast<T*>(places_[n] + offset);
        return;
      }
    }
    if (in_place_.Contains(*pointer, 0)) return;
    if (fault_.empty()) fault_ = std::string(name) + " lies in none of the spans";
  }

  std::string fault() const {
    for (int n = 0; n < spans_.size(); ++n) {
      for (int m = 0; m < n; ++m) {
        const bool apart = Address(spans_[n].data) >= Address(spans_[m].data) + Bytes(m) ||
                           Address(spans_[m].data) >= Address(spans_[n].data) + Bytes(n);
        if (!apart) return "spans overlap";
      }
    }
    return fault_;
  }

 private:
  size_t Bytes(int n) const { return static_cast<size_t>(spans_[n].bytes); }

  const SpanList& spans_;
  const SpanList& in_place_;
  std::vector<test::Block> blocks_;
  std::vector<std::byte*> places_;
  std::string fault_;
};

}  // namespace

Status ComputeInCopies(const WorkItem& item, const std::function<void(const Attention&)>& compute) {
  Attention a = item.attention;
  std::optional<Gradients> gradients = item.gradients;
  Copies in(item.inputs, item.in_place);
  in.Move("q", &a.q.data);
  in.Move("k", &a.k.data);
  in.Move("v", &a.v.data);
  in.Move("bias", &a.bias.data);
  in.Move("alibi_slopes", &a.alibi_slopes);
  in.Move("sinks", &a.sinks);
  in.Move("q_lengths", &a.q_lengths);
  in.Move("kv_lengths", &a.kv_lengths);
  in.Move("q_offsets", &a.q_offsets);
  in.Move("kv_offsets", &a.kv_offsets);
  KeyAppend append = item.append;
  in.Move("k to be appended", &append.k.data);
  in.Move("v to be appended", &append.v.data);
  Copies out(item.outputs, item.in_place);
  Copies& answer = gradients ? in : out;  // of the forward pass
  answer.Move("o", &a.o.data);
  answer.Move("lse", &a.lse);
  if (gradients) {
    in.Move("d_o", &gradients->d_o.data);
    in.Move("d_lse", &gradients->d_lse);
    out.Move("d_q", &gradients->d_q.data);
    out.Move("d_k", &gradients->d_k.data);
    out.Move("d_v", &gradients->d_v.data);
    out.Move("d_bias", &gradients->d_bias.data);
    out.Move("d_sinks", &gradients->d_sinks);
  }
  if (!in.fault().empty()) return Internal("input: " + in.fault());
  if (!out.fault().empty()) return Internal("output: " + out.fault());
  in.CopyIn();
  for (const HostPiece& piece : item.gathered) in.CopyIn(piece);
  if (!in.fault().empty()) return Internal("input: " + in.fault());
  const Problem& p = a.problem;
  const auto moved = [&](const void* data) { return !item.in_place.Contains(data, 1); };
  int64_t written = moved(a.o.data) ? BytesO(p) : 0;
  if (p.return_lse && moved(a.lse)) written += ElementsLse(p) * static_cast<int64_t>(sizeof(float));
  !gradients&& written == item.outputs.bytes() ? out.Fill() : out.CopyIn();
  if (append.rows > 0) AppendKeys(a, append);
  gradients ? CpuReferenceGradients(a, *gradients) : compute(a);
  out.CopyOut();
  return Status();
}

}  // namespace attend::test
