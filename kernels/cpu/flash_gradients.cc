// SPDX-License-Identifier: Apache-2.0
//
// The scheduler of the backward pass. It cuts each KV head's keys into slabs, which threads take,
// longest first. A slab adds to its own dK and dV and, one band of query rows at a time, makes its
// part of dQ; after each band the parts are summed in slab order. Cuts depend on the problem alone,
// so bits do not depend on threads. KV heads run in waves that fit the memory for partial sums.
// After each band, rows whose delta's rounding spoils dQ or dK are corrected.

#include "kernels/cpu/flash_gradients.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>
#include <vector>

#include "kernels/contract/attention_slice.h"
#include "kernels/contract/decode_rule.h"
#include "kernels/cpu/flash_gradients_measure.h"
#include "kernels/cpu/flash_gradients_plan.h"
#include "kernels/cpu/flash_gradients_tile.h"
#include "kernels/cpu/floats.h"
#include "kernels/cpu/parallel.h"
#include "kernels/reference/reference_gradients.h"

namespace attend {
namespace {

using cpu_flash::CeilDiv;
using cpu_flash::Floats;
using cpu_flash::GradientFunctions;
using cpu_flash::GradientScratch;
using cpu_flash::GradientStep;
using cpu_flash::GradientTask;
using cpu_flash::KeyHead;
using cpu_flash::kGradientKeys;
using cpu_flash::kGradientRows;
using cpu_flash::PaddedDim;
using cpu_flash::PaddedKeys;
using cpu_flash::PaddedRows;
using cpu_flash::RowError;
using cpu_flash::RowState;
using cpu_flash::RowTerms;
using cpu_flash::ThreadScratch;
using cpu_flash::WorkOf;

// Memory for a wave's partial sums.
constexpr int64_t kWaveFloats = (int64_t{256} << 20) / sizeof(float);

// Most KV heads listed at once, however small.
constexpr size_t kWaveHeads = 4096;

// Keys and rows of a task of the separate dBias pass.
constexpr int64_t kBiasKeys = 6 * kGradientKeys;
constexpr int64_t kBiasRows = 4 * kGradientRows;

void ZeroRows(const TensorView& to, DType dtype, int64_t dim, int64_t b, int64_t h, int64_t first,
              int64_t rows) {
  if (to.data == nullptr) return;
  const auto bytes = static_cast<size_t>(dim * DTypeBytes(dtype));
  for (int64_t row = first; row < first + rows; ++row) {
    const int64_t at = b * to.stride_b + h * to.stride_h + row * to.stride_l;
    std::memset(static_cast<char*>(to.data) + at * DTypeBytes(dtype), 0, bytes);
  }
}

// Whether several KV heads or sequences add to the same elements of dBias.
bool SharesBias(const Problem& p, const TensorView& d_bias) {
  return (p.batch > 1 && d_bias.stride_b == 0) || (p.heads_kv > 1 && d_bias.stride_h == 0);
}

// The gradients of one KV head of one sequence, without dSinks, which sequences share.
Gradients SliceOf(const Attention& a, const Gradients& g, int64_t b, int64_t h_kv, bool bias) {
  const Problem& p = a.problem;
  const int64_t h = h_kv * p.group();
  const auto move = [&](auto* view, DType dtype, int64_t head) {
    if (view->data == nullptr) return;
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(view->data)>>,
                                    const char, char>;
    view->data = static_cast<Byte*>(view->data) +
                 (b * view->stride_b + head * view->stride_h) * DTypeBytes(dtype);
  };
  Gradients part = g;
  move(&part.d_o, p.o_dtype(), h);
  move(&part.d_q, p.dtype, h);
  move(&part.d_k, p.dtype, h_kv);
  move(&part.d_v, p.dtype, h_kv);
  move(&part.d_bias, DType::kFloat32, h);
  if (part.d_lse != nullptr) part.d_lse += b * a.lse_stride_b + h * a.lse_stride_h;
  if (!bias) part.d_bias.data = nullptr;
  part.d_sinks = nullptr;
  return part;
}

class Backward {
 public:
  Backward(const Attention& a, const Gradients& g, const StopFlag* stop, bool amx)
      : a_(a),
        g_(g),
        p_(a.problem),
        stop_(stop),
        functions_(cpu_flash::ChooseGradientFunctions()),
        amx_(amx && functions_.tiles),
        bias_(g.d_bias.data != nullptr),
        bias_shared_(bias_ && SharesBias(a.problem, g.d_bias)) {}

  void Run() {
    if (bias_) ZeroBias();
    if (!HasPart(p_)) {  // the dS of a part need not add up to dLSE
      measured_ = cpu_flash::MeasureRows(a_, g_, functions_, stop_);
      finds_errors_ = p_.o_dtype() != DType::kFloat32 || !measured_.empty();
    }
    if (g_.d_q.data != nullptr || g_.d_k.data != nullptr || g_.d_v.data != nullptr ||
        (bias_ && !bias_shared_)) {
      RunHeads();
    }
    if (bias_shared_) RunBias();
    if (g_.d_sinks == nullptr) return;
    ParallelInOrder(
        p_.heads_q,
        [&](int64_t h) {
          g_.d_sinks[h] = static_cast<float>(functions_.sum_sink(a_, g_, measured(), h, stop_));
        },
        stop_);
  }

 private:
  // A thread's unit of work.
  struct Item {
    size_t head;
    int64_t n;  // a slab, or the first row of a tile
    double work;
  };

  // Rows of a KV head whose gradients are corrected. `keys`: dK as well as dQ.
  struct Correction {
    size_t head;
    bool keys;
    std::vector<int32_t> rows;
  };

  void ZeroBias();
  void RunHeads();
  void RunWave();
  void RunBand(int64_t band);
  void CorrectBand(int64_t band);
  std::vector<Correction> FindErrors(int64_t band) const;
  void StoreBand(int64_t band);
  void StoreKeys();
  void RunBias();
  void AddBias(int64_t b, int64_t h_kv, const KeyRange& keys, int64_t row, int64_t rows);
  void Redo();

  template <class Body>
  void ForEach(std::vector<Item>* items, const Body& body) {
    const auto longer = [](const Item& x, const Item& y) { return x.work > y.work; };
    std::stable_sort(items->begin(), items->end(), longer);
    ParallelInOrder(
        static_cast<int64_t>(items->size()),
        [&](int64_t n) { body((*items)[static_cast<size_t>(n)]); }, stop_);
  }

  // Whether a sequence runs in tiles. Few rows would leave most of one empty.
  bool TakesTiles(const Sequence& s) const { return amx_ && s.q_len > kDecodeRows / p_.group(); }
  GradientTask TaskOf(size_t n, int64_t band, int64_t slab);
  uint8_t* ComputedOf(size_t n) { return computed_.data() + computed_at_[n]; }
  cpu_flash::PartialQueries PartsOf(size_t n, const GradientTask& first_slab) {
    return {first_slab.d_q,        heads_[n].part, first_slab.states,
            heads_[n].band_rows(), ComputedOf(n),  heads_[n].slabs};
  }
  RowTerms* measured() { return measured_.empty() ? nullptr : measured_.data(); }

  const Attention& a_;
  const Gradients& g_;
  const Problem& p_;
  const StopFlag* const stop_;
  const GradientFunctions functions_;
  const bool amx_;
  bool finds_errors_ = false;  // some row's delta may be off
  const bool bias_;
  const bool bias_shared_;  // a separate pass adds it up
  std::atomic<bool> bias_careful_{false};
  std::atomic<bool> bias_special_{false};
  std::vector<RowTerms> measured_;  // of all rows, if any was measured
  // The current wave.
  std::vector<KeyHead> heads_;
  std::vector<std::atomic<bool>> careful_;  // by KV head: an output is NaN or Inf
  std::vector<std::atomic<bool>> special_;  // by KV head: an input is NaN or Inf
  std::vector<RowState> states_;            // by KV head, slab and row of the band
  std::vector<RowError> errors_;            // by KV head and row of the band
  std::vector<size_t> errors_at_;
  std::vector<uint8_t> computed_;  // by KV head and slab: it has a part of the band's dQ
  std::vector<size_t> computed_at_;
  Floats floats_;
};

void Backward::ZeroBias() {
  const TensorView& to = g_.d_bias;
  // Broadcast dimensions exist even if they are broadcast to nothing.
  const int64_t batch = to.stride_b == 0 ? 1 : p_.batch;
  const int64_t heads = to.stride_h == 0 ? 1 : p_.heads_q;
  const int64_t rows = to.stride_l == 0 ? 1 : p_.len_q;
  ParallelInOrder(
      batch * heads,
      [&](int64_t n) { ZeroRows(to, DType::kFloat32, p_.len_k, n / heads, n % heads, 0, rows); },
      stop_);
}

// Runs waves of as many KV heads as the memory for sums allows.
void Backward::RunHeads() {
  int64_t next = 0;
  const int64_t count = p_.batch * p_.heads_kv;
  while (next < count && !Stopped(stop_)) {
    heads_.clear();
    computed_at_.clear();
    errors_at_.clear();
    int64_t floats = 0;
    int64_t slabs = 0;
    int64_t errors = 0;
    int64_t states = 0;
    while (next < count && heads_.size() < kWaveHeads) {
      KeyHead head = cpu_flash::MakeKeyHead(a_, next / p_.heads_kv, next % p_.heads_kv);
      const auto take = [](int64_t* from, int64_t size) {
        const int64_t at = *from;
        *from += size;
        return at;
      };
      int64_t end = floats;
      head.d_q = take(&end, g_.d_q.data == nullptr ? 0 : head.slabs * head.part);
      head.d_k = take(&end, g_.d_k.data == nullptr ? 0 : head.lanes() * PaddedDim(p_.dim));
      head.d_v = take(&end, g_.d_v.data == nullptr ? 0 : head.lanes() * PaddedDim(p_.dim_v));
      if (end > kWaveFloats && !heads_.empty()) break;
      floats = end;
      computed_at_.push_back(static_cast<size_t>(take(&slabs, head.slabs)));
      errors_at_.push_back(static_cast<size_t>(take(&errors, head.band_rows())));
      head.states = take(&states, head.slabs * head.band_rows());
      heads_.push_back(head);
      ++next;
    }
    floats_.Reserve(floats);
    computed_.resize(static_cast<size_t>(slabs));
    errors_.resize(static_cast<size_t>(errors));
    if (static_cast<size_t>(states) > states_.size()) states_.resize(static_cast<size_t>(states));
    RunWave();
  }
}

void Backward::RunWave() {
  careful_ = std::vector<std::atomic<bool>>(heads_.size());
  special_ = std::vector<std::atomic<bool>>(heads_.size());
  int64_t bands = 0;
  for (const KeyHead& head : heads_) bands = std::max(bands, head.bands);
  for (int64_t band = 0; band < bands && !Stopped(stop_); ++band) {
    RunBand(band);
    if (g_.d_q.data == nullptr && g_.d_k.data == nullptr) continue;
    if (!Stopped(stop_)) StoreBand(band);
    if (finds_errors_ && !Stopped(stop_)) CorrectBand(band);
  }
  if (!Stopped(stop_)) StoreKeys();
  if (!Stopped(stop_)) Redo();
}

GradientTask Backward::TaskOf(size_t n, int64_t band, int64_t slab) {
  const KeyHead& head = heads_[n];
  const Sequence& s = head.sequence;
  const int64_t first_head = band / head.row_bands * head.heads;
  const int64_t row = band % head.row_bands * head.rows;
  GradientTask task{.attention = &a_,
                    .gradients = &g_,
                    .sequence = s,
                    .b = head.b,
                    .head = head.h_kv * p_.group() + first_head,
                    .heads = std::min(head.heads, p_.group() - first_head),
                    .row = row,
                    .rows = std::min(head.rows, s.q_len - row),
                    .keys = head.Slab(slab)};
  const int64_t lane = task.keys.begin;
  if (g_.d_q.data != nullptr) task.d_q = floats_.at(head.d_q + slab * head.part);
  if (g_.d_k.data != nullptr) task.d_k = floats_.at(head.d_k + lane * PaddedDim(p_.dim));
  if (g_.d_v.data != nullptr) task.d_v = floats_.at(head.d_v + lane * PaddedDim(p_.dim_v));
  if (g_.d_q.data != nullptr || g_.d_k.data != nullptr) {
    task.states = states_.data() + head.states + slab * head.band_rows();
    task.sums = finds_errors_;
  }
  task.begins = band == 0;
  task.d_bias = bias_ && !bias_shared_;
  task.amx = TakesTiles(s);
  task.measured = measured();
  task.careful = &careful_[n];
  task.special = &special_[n];
  task.stop = stop_;
  return task;
}

void Backward::RunBand(int64_t band) {
  std::vector<Item> items;
  for (size_t n = 0; n < heads_.size(); ++n) {
    for (int64_t slab = 0; slab < heads_[n].slabs && band < heads_[n].bands; ++slab) {
      const double work = WorkOf(TaskOf(n, band, slab));
      ComputedOf(n)[slab] = work > 0 ? 1 : 0;
      if (work > 0 || band == 0) items.push_back({n, slab, work});
    }
  }
  ForEach(&items, [&](const Item& item) {
    functions_.run(TaskOf(item.head, band, item.n), ThreadScratch());
  });
}

// The band's rows whose delta spoils dK, and those in which it spoils only dQ.
std::vector<Backward::Correction> Backward::FindErrors(int64_t band) const {
  std::vector<Correction> found;
  for (size_t n = 0; n < heads_.size(); ++n) {
    if (band >= heads_[n].bands) continue;
    Correction keys{n, true, {}}, queries{n, false, {}};
    const size_t end = n + 1 < heads_.size() ? errors_at_[n + 1] : errors_.size();
    for (size_t at = errors_at_[n]; at < end; ++at) {
      const bool of_keys = errors_[at].of_keys && g_.d_k.data != nullptr;
      if (!of_keys && !errors_[at].of_queries) continue;
      (of_keys ? keys : queries).rows.push_back(static_cast<int32_t>(at - errors_at_[n]));
    }
    if (!keys.rows.empty()) found.push_back(std::move(keys));
    if (!queries.rows.empty()) found.push_back(std::move(queries));
  }
  return found;
}

// Corrects rows whose delta is off. Computes S and dQ again and, if it is spoilt, dK.
void Backward::CorrectBand(int64_t band) {
  const std::vector<Correction> found = FindErrors(band);
  const auto task_of = [&](const Correction& one, int64_t slab) {
    GradientTask task = TaskOf(one.head, band, slab);
    task.step = GradientStep::kCorrect;
    task.listed = one.rows.data();
    task.listed_count = std::ssize(one.rows);
    task.errors = errors_.data() + errors_at_[one.head];
    task.begins = task.d_bias = false;
    task.d_v = nullptr;
    if (!one.keys) task.d_k = nullptr;
    return task;
  };
  std::vector<Item> items;
  std::vector<Item> stores;
  for (size_t n = 0; n < found.size(); ++n) {
    for (int64_t slab = 0; slab < heads_[found[n].head].slabs; ++slab) {
      const double work = WorkOf(task_of(found[n], slab));
      if (work > 0) items.push_back({n, slab, work});
    }
    for (int64_t row = 0; row < std::ssize(found[n].rows); row += kGradientRows) {
      stores.push_back({n, row, 0});
    }
  }
  ForEach(&items, [&](const Item& item) {
    functions_.run(task_of(found[item.head], item.n), ThreadScratch());
  });
  if (g_.d_q.data == nullptr || Stopped(stop_)) return;
  ForEach(&stores, [&](const Item& item) {
    const GradientTask task = task_of(found[item.head], 0);
    const int64_t rows = std::min(kGradientRows, task.count() - item.n);
    const size_t head = found[item.head].head;
    if (!functions_.store_queries(task, PartsOf(head, task), item.n, rows, nullptr)) {
      careful_[head].store(true);
    }
  });
}

void Backward::StoreBand(int64_t band) {
  if (finds_errors_) std::fill(errors_.begin(), errors_.end(), RowError());
  std::vector<Item> items;
  for (size_t n = 0; n < heads_.size(); ++n) {
    if (band >= heads_[n].bands) continue;
    const GradientTask task = TaskOf(n, band, 0);
    for (int64_t row = 0; row < task.count(); row += kGradientRows) items.push_back({n, row, 0});
  }
  ForEach(&items, [&](const Item& item) {
    const GradientTask task = TaskOf(item.head, band, 0);
    const int64_t rows = std::min(kGradientRows, task.count() - item.n);
    if (!functions_.store_queries(
            task, PartsOf(item.head, task), item.n, rows,
            finds_errors_ ? errors_.data() + errors_at_[item.head] : nullptr)) {
      careful_[item.head].store(true);
    }
  });
}

// Also zeroes the rows of dQ, dK and dV beyond a sequence's lengths.
void Backward::StoreKeys() {
  std::vector<Item> items;
  for (size_t n = 0; n < heads_.size(); ++n) {
    for (int64_t slab = 0; slab < heads_[n].slabs; ++slab) items.push_back({n, slab, 0});
    items.push_back({n, -1, 0});
  }
  ForEach(&items, [&](const Item& item) {
    if (item.n >= 0) {
      const GradientTask task = TaskOf(item.head, 0, item.n);
      if (!functions_.store_keys(task, ThreadScratch())) careful_[item.head].store(true);
      return;
    }
    const auto& [b, h_kv, s] =
        std::tie(heads_[item.head].b, heads_[item.head].h_kv, heads_[item.head].sequence);
    for (int64_t h = h_kv * p_.group(); h < (h_kv + 1) * p_.group(); ++h) {
      ZeroRows(g_.d_q, p_.dtype, p_.dim, b, h, s.q_row + s.q_len, s.q_rows - s.q_len);
    }
    const int64_t k_rows = p_.packed ? 0 : p_.len_k - s.k_len;
    ZeroRows(g_.d_k, p_.dtype, p_.dim, b, h_kv, s.k_row + s.k_len, k_rows);
    ZeroRows(g_.d_v, p_.dtype, p_.dim_v, b, h_kv, s.k_row + s.k_len, k_rows);
  });
}

// Computes dBias where several KV heads share elements. A task owns some elements and adds to them
// head after head, in a fixed order. This computes S and dP once more.
void Backward::RunBias() {
  const int64_t batch = g_.d_bias.stride_b == 0 ? std::min<int64_t>(p_.batch, 1) : p_.batch;
  const int64_t heads = g_.d_bias.stride_h == 0 ? 1 : p_.heads_kv;
  const int64_t rows = g_.d_bias.stride_l == 0 ? std::max<int64_t>(1, p_.len_q) : kBiasRows;
  const int64_t row_runs = CeilDiv(p_.len_q, rows);
  const int64_t key_runs = CeilDiv(p_.len_k, kBiasKeys);
  ParallelInOrder(
      batch * heads * row_runs * key_runs,
      [&](int64_t n) {
        const int64_t row = n % row_runs * rows;
        const int64_t key = n / row_runs % key_runs * kBiasKeys;
        const int64_t head = n / row_runs / key_runs % heads;
        const int64_t sequence = n / row_runs / key_runs / heads;
        const int64_t b_end = batch == p_.batch ? sequence + 1 : p_.batch;
        const int64_t h_end = heads == p_.heads_kv ? head + 1 : p_.heads_kv;
        for (int64_t b = sequence; b < b_end; ++b) {
          for (int64_t h = head; h < h_end && !Stopped(stop_); ++h) {
            AddBias(b, h, {key, key + kBiasKeys}, row, rows);
          }
        }
      },
      stop_);
  if (!bias_careful_.load() || bias_special_.load() || Stopped(stop_)) return;
  Gradients bias_alone = g_;
  bias_alone.d_q.data = bias_alone.d_k.data = bias_alone.d_v.data = nullptr;
  bias_alone.d_sinks = nullptr;
  CpuReferenceGradients(a_, bias_alone, stop_);
}

void Backward::AddBias(int64_t b, int64_t h_kv, const KeyRange& keys, int64_t row, int64_t rows) {
  const Sequence s = SequenceOf(a_, b);
  const KeyRange present{keys.begin, std::min(keys.end, s.k_len)};
  rows = std::min(rows, s.q_len - row);
  if (rows <= 0 || present.begin >= present.end) return;
  GradientTask task = cpu_flash::WholeHead(a_, g_, b, h_kv);
  task.measured = measured();
  task.stop = stop_;
  task.row = row;
  task.rows = rows;
  task.keys = present;
  task.d_bias = true;
  task.amx = TakesTiles(s);
  task.careful = &bias_careful_;
  task.special = &bias_special_;
  functions_.run(task, ThreadScratch());
}

// Computes KV heads again whose inputs are finite but whose sums are not, since products left
// fp32's range on the way.
void Backward::Redo() {
  std::vector<Item> items;
  for (size_t n = 0; n < heads_.size(); ++n) {
    if (careful_[n].load() && !special_[n].load()) items.push_back({n, 0, 0});
  }
  ForEach(&items, [&](const Item& item) {
    const auto& [b, h_kv] = std::tie(heads_[item.head].b, heads_[item.head].h_kv);
    const Attention part =
        TakeSlice(a_, {b, b + 1, h_kv, h_kv + 1, 0, p_.len_q}).value();  // within a_, so valid
    CpuReferenceGradients(part, SliceOf(a_, g_, b, h_kv, !bias_shared_), stop_);
  });
}

}  // namespace

void CpuFlashGradients(const Attention& attention, const Gradients& gradients,
                       const StopFlag* stop) {
  Backward(attention, gradients, stop, /*amx=*/false).Run();
}

void CpuFlashAmxGradients(const Attention& attention, const Gradients& gradients,
                          const StopFlag* stop) {
  Backward(attention, gradients, stop, /*amx=*/true).Run();
}

}  // namespace attend
