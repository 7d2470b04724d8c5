// SPDX-License-Identifier: Apache-2.0
//
// The backward pass of a range of keys against a band of query rows: loading, and scores. Continued
// in flash_gradients_tile-inl.h. Included once per instruction set; runs on any thread, on its own
// scratch.

#if defined(ATTEND_CPU_FLASH_GRADIENTS_RUN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTEND_CPU_FLASH_GRADIENTS_RUN_INL_H_
#undef ATTEND_CPU_FLASH_GRADIENTS_RUN_INL_H_
#else
#define ATTEND_CPU_FLASH_GRADIENTS_RUN_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "hwy/highway.h"
#include "kernels/contract/softmax_state.h"
#include "kernels/cpu/dropout-inl.h"
#include "kernels/cpu/flash_gradients_rows-inl.h"
#include "kernels/cpu/flash_gradients_tile.h"
#include "kernels/cpu/flash_math-inl.h"
#include "kernels/cpu/flash_pack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attend::cpu_flash {
namespace HWY_NAMESPACE {

// Weigh's rows: ordinary ones; those with NaN and Inf, for products in tiles, which multiply all
// weights; or any, also measured ones, for products that skip weights of -0.
enum class Rows : uint8_t { kOrdinary, kSpecialInTiles, kAny };

class GradientRun {
 public:
  GradientRun(const GradientTask& task, GradientScratch* scratch)
      : task_(task),
        a_(*task.attention),
        g_(*task.gradients),
        p_(task.attention->problem),
        s_(*scratch),
        sequence_(task.sequence),
        row_count_(task.count()),
        listed_(task.listed),
        plain_(ScaledLate(p_)),
        bits_(HasBits(a_)),
        unit_(UnitOf(p_)) {}
  virtual ~GradientRun() = default;

  void Run() {
    Begin();
    if (task_.listed != nullptr) last_ = KeysOfRows(task_, 0, row_count_).any.end;
    for (tile_ = task_.keys.begin; tile_ < task_.keys.end; tile_ += kGradientKeys) {
      keys_ = std::min(kGradientKeys, task_.keys.end - tile_);
      loaded_ = std::clamp<int64_t>(last_ - tile_, 0, keys_);
      bool loaded = false;
      for (int64_t first = 0; first < row_count_; first += kGradientRows) {
        const int64_t count = std::min(kGradientRows, row_count_ - first);
        const RowsKeys seen = KeysOfRows(task_, first, count);
        if (seen.any.begin >= tile_ + keys_ || seen.any.end <= tile_) continue;
        if (Stopped(task_.stop)) return;
        if (!loaded) LoadKeys();
        loaded = true;
        TileStep(first, count, seen);
      }
    }
    if (task_.step == GradientStep::kMeasure) FinishMeasuring();
    const F32 d;
    if (task_.d_bias && !hn::AllTrue(d, hn::Eq(special_, hn::Zero(d)))) {
      task_.careful->store(true, std::memory_order_relaxed);
    }
  }

 protected:
  int64_t RowAt(int64_t n) const { return listed_ == nullptr ? n : listed_[n]; }
  // Most tasks have one head, whose rows need no division.
  int64_t HeadOf(int64_t row) const {
    return task_.head + (row < task_.rows ? 0 : row / task_.rows);
  }
  int64_t RowOf(int64_t row) const {
    return task_.row + (row < task_.rows ? row : row % task_.rows);
  }
  RowId IdOf(int64_t row) const { return {task_.b, HeadOf(row), RowOf(row)}; }

  void Begin();
  virtual void LoadKeys();
  void LookAtKeys(const LanePanel& panel, bool values);
  void LoadRow(int64_t row, int64_t at, bool wide);
  bool NoteSpecial(int64_t n) const;
  bool LoadRows(int64_t first, int64_t count);
  virtual void TileStep(int64_t first, int64_t count, const RowsKeys& seen);
  template <int kVectors>
  void PanelStep(const LanePanel& panel, int64_t count, bool masked);
  template <int kVectors>
  void Products(const float* rows, const float* panel, int64_t dim, int64_t count, float* out);
  void FinishScores(const LanePanel& panel, int64_t count);
  void Draw(const LanePanel& panel, int64_t count);
  template <Rows kRows>
  HWY_INLINE V32 ExponentOf(const LanePanel& panel, int64_t t, int64_t lane, bool masked) const;
  HWY_INLINE V32 ScoreOf(const LanePanel& panel, int64_t t, int64_t lane, bool masked) const;
  void RaiseShift(int64_t t, float shift);
  template <int kVectors, bool kDropout>
  void Measure(const LanePanel& panel, int64_t count, bool masked);
  void FinishMeasuring();
  template <int kVectors, bool kDropout>
  void WeighOrMeasure(const LanePanel& panel, int64_t count, bool masked);
  template <int kVectors, bool kDropout, Rows kRows>
  void Weigh(const LanePanel& panel, int64_t count, bool masked);
  template <int kVectors>
  void WeighErrors(const LanePanel& panel, int64_t count, bool masked);
  HWY_INLINE void AddSums(int64_t t, V32 d_scores, V32 squares, V32 norms);
  void StoreSums(int64_t count);
  void AddBias(const LanePanel& panel, int64_t count);
  void Slope(const LanePanel& panel, int64_t count);
  template <int kVectors>
  void AddKeys(const float* rows, const float* by, int64_t by_stride, int64_t dim, int64_t count,
               float* sums);
  template <int kVectors>
  void AddQueries(int64_t dim, int64_t first, int64_t count, const KeyRange& lanes);

  const GradientTask& task_;
  const Attention& a_;
  const Gradients& g_;
  const Problem& p_;
  GradientScratch& s_;
  const Sequence& sequence_;
  const int64_t row_count_;
  const int32_t* listed_;    // task_.listed, or rows that the task computes apart
  const bool plain_;         // scores are q.k without scale
  const bool bits_;          // the bias is a mask of bits
  const float unit_;         // factor of scores, after subtracting the shift
  float d_weight_unit_ = 1;  // factor of products dO V
  int64_t tile_ = 0;         // first key of the key tile, and its number of keys
  int64_t keys_ = 0;
  int64_t last_ = std::numeric_limits<int64_t>::max();  // no row sees a key from here on
  int64_t loaded_ = 0;                                  // keys of the tile before last_
  bool special_keys_ = false;                           // some K or V of the key tile is NaN or Inf
  // special_keys_, or some row is special: hidden keys have weight 0, and 0 * Inf is NaN. Their
  // weights are then -0, which the products skip.
  bool careful_ = false;
  bool in_tiles_ = false;          // flash_gradients_amx-inl.h's products
  bool sums_begun_ = false;        // s_.sums has sums of this key tile
  V32 special_ = hn::Zero(F32());  // NaN once a sum in dBias is not finite
};

void GradientRun::Begin() {
  std::fill_n(s_.ones, kPanelLanesMax, 1.0f);
  if (task_.d_q != nullptr && task_.step == GradientStep::kAdd) {
    std::fill_n(task_.d_q, PaddedRows(row_count_) * PaddedDim(p_.dim), 0.0f);
  }
  if (task_.states != nullptr && task_.step == GradientStep::kAdd) {
    std::fill_n(task_.states, row_count_, RowState());
  }
  if (!task_.begins) return;
  const int64_t lanes = PaddedKeys(task_.keys.end - task_.keys.begin);
  if (task_.d_k != nullptr) std::fill_n(task_.d_k, lanes * PaddedDim(p_.dim), 0.0f);
  if (task_.d_v != nullptr) std::fill_n(task_.d_v, lanes * PaddedDim(p_.dim_v), 0.0f);
}

// Loads K and, where dP is needed, V of the key tile. Lanes without a key are 0, and so are K's
// columns beyond D.
void GradientRun::LoadKeys() {
  const int64_t h_kv = task_.head / p_.group();
  const int64_t lanes = CountVectors(keys_) * kLanes;
  special_keys_ = false;
  for (int64_t j = 0; j < lanes; ++j) {
    float* const row = s_.k_rows + j * kRowStride;
    const int64_t loaded = j < loaded_ ? p_.dim : 0;
    if (loaded > 0) {
      WidenRow(a_.k.data, p_.dtype, KeyElement(a_, a_.k, sequence_, task_.b, h_kv, tile_ + j),
               p_.dim, row);
    }
    std::fill(row + loaded, row + PaddedDim(p_.dim), 0.0f);
  }
  const bool values = task_.step != GradientStep::kCorrect;
  for (int64_t n = 0; n < CountPanels(keys_, task_.amx); ++n) {
    const LanePanel panel = PanelOf(keys_, n, task_.amx);
    if (panel.lane >= loaded_) break;
    for (int64_t lane = panel.lane; lane < panel.lane + panel.width(); lane += kTurned) {
      const int64_t at = lane - panel.lane;
      TurnIn(s_.k_rows + lane * kRowStride, kRowStride, p_.dim, panel.width(),
             s_.k + panel.lane * p_.dim + at);
      for (int64_t r = 0; r < kTurned && values; ++r) {
        float* const row = s_.rows + r * kRowStride;
        if (lane + r < loaded_) {
          const int64_t v = KeyElement(a_, a_.v, sequence_, task_.b, h_kv, tile_ + lane + r);
          WidenRow(a_.v.data, p_.dtype, v, p_.dim_v, row);
        } else {
          std::fill(row, row + p_.dim_v, 0.0f);
        }
      }
      if (!values) continue;
      TurnIn(s_.rows, kRowStride, p_.dim_v, panel.width(), s_.v + panel.lane * p_.dim_v + at);
    }
    LookAtKeys(panel, values);
  }
}

// Computes the norms of a panel's keys, and whether any key or loaded value is special.
void GradientRun::LookAtKeys(const LanePanel& panel, bool values) {
  const F32 d;
  for (int64_t n = 0; n < panel.width(); n += kLanes) {
    const float* const k = s_.k + panel.lane * p_.dim + n;
    const float* const v = s_.v + panel.lane * p_.dim_v + n;
    V32 square = hn::Zero(d), zero = hn::Zero(d);
    for (int64_t i = 0; i < p_.dim; ++i) {
      const V32 x = hn::Load(d, k + i * panel.width());
      square = hn::MulAdd(x, x, square);
    }
    for (int64_t i = 0; i < p_.dim_v && values; ++i) {
      zero = hn::MulAdd(hn::Load(d, v + i * panel.width()), hn::Zero(d), zero);
    }
    const auto finite = hn::IsFinite(square);
    hn::Store(hn::IfThenElseZero(finite, hn::Sqrt(square)), d, s_.norms + panel.lane + n);
    special_keys_ =
        special_keys_ || !hn::AllTrue(d, finite) || !hn::AllTrue(d, hn::Eq(zero, hn::Zero(d)));
  }
}

// Loads one row into place `at` of the tile of rows; without `wide`, its Q and dO only if its terms
// are not known yet.
void GradientRun::LoadRow(int64_t row, int64_t at, bool wide) {
  const RowId id = IdOf(row);
  float* const q = s_.q + at * kRowStride;
  float* const d_o = s_.d_o + at * kRowStride;
  RowTerms* const terms = task_.states == nullptr ? &s_.own_terms[at] : &task_.states[row].terms;
  if (wide || task_.states == nullptr || !terms->known) {
    LoadQuery(a_, g_, sequence_, id, q, d_o);
    std::fill(q + p_.dim, q + PaddedDim(p_.dim), 0.0f);
    std::fill(d_o + p_.dim_v, d_o + PaddedDim(p_.dim_v), 0.0f);
  }
  s_.row[at] = row;
  s_.terms[at] = terms;
  if (task_.step == GradientStep::kMeasure) {
    *terms = {.shift = task_.measured[TermsIndex(p_, sequence_, id)].shift};
  } else if (task_.states == nullptr || !terms->known) {
    *terms = FindTerms(a_, g_, task_.measured, sequence_, id, q, d_o, s_.rows);
  }

  const KeyRange range = VisibleKeys(p_.mask, sequence_, id.i);
  s_.begin[at] = static_cast<float>(std::clamp<int64_t>(range.begin - tile_, 0, keys_));
  s_.end[at] = static_cast<float>(std::clamp<int64_t>(range.end - tile_, 0, keys_));
  if (p_.has_alibi) {
    s_.diagonal[at] = static_cast<float>(id.i + sequence_.offset - tile_);
    s_.alibi[at] = a_.alibi_slopes[id.b * a_.alibi_stride_b + id.h];
  }
  if (p_.has_bias) {
    float* const bias = s_.bias + at * kGradientKeys;
    const int64_t index =
        id.b * a_.bias.stride_b + id.h * a_.bias.stride_h + id.i * a_.bias.stride_q + tile_;
    WidenRow(a_.bias.data, a_.bias.dtype, index, keys_, bias);
    std::fill(bias + keys_, bias + CountVectors(keys_) * kLanes, 0.0f);
  }
  if (task_.d_bias) {
    s_.d_bias[at] = static_cast<float*>(g_.d_bias.data) + id.b * g_.d_bias.stride_b +
                    id.h * g_.d_bias.stride_h + id.i * g_.d_bias.stride_l + tile_;
  }
}

// Whether row n of the tile is special. If it sees a key, so may the KV head's sums be.
bool GradientRun::NoteSpecial(int64_t n) const {
  if (!s_.terms[n]->special) return false;
  const bool sees = s_.begin[n] < s_.end[n] && task_.special != nullptr;
  // Threads share the flag; writing it for each row would take longer than the row.
  if (sees && !task_.special->load(std::memory_order_relaxed)) task_.special->store(true);
  return true;
}

// Loads rows numbered [first, first + count). True if any is special.
bool GradientRun::LoadRows(int64_t first, int64_t count) {
  bool special = false;
  for (int64_t n = 0; n < count; ++n) {
    LoadRow(RowAt(first + n), n, /*wide=*/true);
    special = NoteSpecial(n) || special;
  }
  return special;
}

// Applies all steps of problem.h between q.k and the mask, as TileRun does, and keeps the cap's
// slope.
void GradientRun::FinishScores(const LanePanel& panel, int64_t count) {
  const F32 d;
  const V32 scale = hn::Set(d, p_.scale);
  const LaneCap cap(p_);
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t n = 0; n < panel.width(); n += kLanes) {
      const int64_t lane = panel.lane + n;
      const int64_t at = t * panel.width() + n;
      V32 x = hn::Mul(hn::Load(d, s_.weight + at), scale);
      if (cap.on()) {
        const V32 share = cap.Tanh(x);
        hn::Store(hn::NegMulAdd(share, share, hn::Set(d, 1.0f)), d, s_.slope + at);
        x = cap.OfTanh(share);
      }
      const float* const bias = s_.bias + t * kGradientKeys + lane;
      if (p_.has_bias && !bits_) x = hn::Add(x, hn::Load(d, bias));
      if (p_.has_alibi) {
        const V32 key = hn::Iota(d, static_cast<float>(lane));
        const V32 distance = hn::Abs(hn::Sub(key, hn::Set(d, s_.diagonal[t])));
        x = hn::NegMulAdd(hn::Set(d, s_.alibi[t]), distance, x);
      }
      hn::Store(bits_ ? WithoutRemoved(x, bias) : x, d, s_.weight + at);
    }
  }
}

// Computes dropout's draws for the loaded rows and the panel's keys, from the tile of 16 keys on
// that the panel begins in.
void GradientRun::Draw(const LanePanel& panel, int64_t count) {
  const int64_t key = p_.key_offset + tile_ + panel.lane;
  const int64_t offset = key % kDropoutTile;
  const RoundKeys keys(a_.dropout.seed);
  const auto sequence = static_cast<uint64_t>(a_.dropout.sequence + task_.b);
  constexpr int64_t kHalf = kDropoutTile / 2;
  uint16_t* const spare = s_.draws + kGradientRows * kDrawStride;
  for (int64_t t = 0; t < count; ++t) {
    const int64_t row = a_.dropout.row + RowOf(s_.row[t]);
    const int64_t in_head = s_.row[t] % task_.rows;
    const bool paired = listed_ == nullptr;
    uint16_t* const own = s_.draws + t * kDrawStride;
    uint16_t* low = own;
    uint16_t* high = spare;
    if (row % kDropoutTile >= kHalf) {
      if (paired && t >= kHalf && in_head >= kHalf) continue;  // drawn with the row 8 before it
      low = spare;
      high = own;
    } else if (paired && t + kHalf < count && in_head + kHalf < task_.rows) {
      high = own + kHalf * kDrawStride;
    }
    DrawKeys(keys, sequence, a_.dropout.head + HeadOf(s_.row[t]), row, key - offset,
             offset + panel.width(), low, high);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace attend::cpu_flash
HWY_AFTER_NAMESPACE();

#endif  // include guard
