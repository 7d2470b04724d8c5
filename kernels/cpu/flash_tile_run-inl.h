// SPDX-License-Identifier: Apache-2.0
//
// One tile of query rows: loading it, and each tile of keys. Continued in flash_tile-inl.h.
// Included once per instruction set; runs on any thread, on its own Scratch.

#if defined(ATTEND_CPU_FLASH_TILE_RUN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTEND_CPU_FLASH_TILE_RUN_INL_H_
#undef ATTEND_CPU_FLASH_TILE_RUN_INL_H_
#else
#define ATTEND_CPU_FLASH_TILE_RUN_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "hwy/highway.h"
#include "kernels/cpu/flash_math-inl.h"
#include "kernels/cpu/flash_pack-inl.h"
#include "kernels/cpu/flash_tile.h"
#include "kernels/reference/dropout_factor.h"

HWY_BEFORE_NAMESPACE();
namespace attend::cpu_flash {
namespace HWY_NAMESPACE {

constexpr double kLog2e = 1.44269504088896341;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// A few vectors of the tile's rows, beginning at row `lane`.
struct Panel {
  int64_t lane = 0;
  int vectors = 0;
  bool unpaired = false;  // some row fails FitsPairs
  KeyRange any{0, 0};     // keys that some row sees
  KeyRange all{0, 0};     // keys that every row sees
  int64_t width() const { return vectors * kLanes; }
};
constexpr int64_t kPanelsMax =
    std::max(kRowTile / (kPanelVectors * kLanes), kAmxRowTile / kAmxPanelLanes);
static_assert(kRowTile % (kPanelVectors * kLanes) == 0);

class TileRun {
 public:
  TileRun(const Tile& tile, Scratch* scratch, int64_t panel_vectors = kPanelVectors)
      : tile_(tile),
        a_(*tile.attention),
        p_(tile.attention->problem),
        s_(*scratch),
        sequence_(SequenceOf(*tile.attention, tile.b)),
        lanes_(tile.heads * tile.rows),
        vectors_((lanes_ + kLanes - 1) / kLanes),
        panel_count_((vectors_ + panel_vectors - 1) / panel_vectors),
        dim_v_padded_((p_.dim_v + kValueBlock - 1) / kValueBlock * kValueBlock),
        plain_(ScaledLate(p_)),
        pairs_(kHavePairs && p_.dim % 2 == 0 && TakesPairs(p_)),
        bits_(HasBits(a_)),
        unit_(static_cast<double>(UnitOf(p_))),
        to_log2_(static_cast<float>(unit_ * kLog2e)),
        kept_(KeptFactor(p_)) {}

  void Run() {
    if (Stopped(tile_.stop)) return;
    MakePanels();
    PackQuery();
    Attend();
    careful_ = !OutputFinite();
    // O is not divided yet, and may overflow where its mean does not.
    if (careful_) {
      ScaleDown(HasHugeValues());
      if (scaled_) Attend();
    }
    if (!Stopped(tile_.stop)) Store();
  }

 protected:
  int64_t HeadOf(int64_t lane) const { return tile_.head + lane / tile_.rows; }
  int64_t RowOf(int64_t lane) const { return tile_.row + lane % tile_.rows; }
  bool Real(int64_t lane) const { return lane < lanes_ && RowOf(lane) < sequence_.q_len; }
  // First element of a lane's row of Q.
  int64_t QueryOf(int64_t lane) const {
    return tile_.b * a_.q.stride_b + HeadOf(lane) * a_.q.stride_h +
           (sequence_.q_row + RowOf(lane)) * a_.q.stride_l;
  }
  KeyRange KeysOf(int64_t lane) const {
    return Real(lane) ? VisibleKeys(p_.mask, sequence_, RowOf(lane)) : KeyRange{0, 0};
  }

  void MakePanels();
  void PackQuery();
  void PackPairs(const Panel& panel, int64_t first, int64_t dim);
  void Attend();
  template <bool kSkip>
  void TileStep(int64_t begin, int64_t end);
  void LoadKeys(int64_t j, int64_t keys);
  void LoadLanes(const Panel& panel, int64_t j, int64_t keys);
  void LoadBias(const Panel& panel, int64_t j, int64_t keys);
  template <int kVectors>
  void Scores(const Panel& panel, int64_t keys);
  template <int kVectors>
  void ScoreUnpaired(const Panel& panel, const float* const* rows, float* s);
  void FinishScores(const Panel& panel, int64_t keys);
  void MaskScores(const Panel& panel, int64_t keys);
  template <int kVectors, bool kSkip>
  void Softmax(const Panel& panel, int64_t j, int64_t keys);
  void Drop(const Panel& panel, int64_t j, int64_t keys);
  template <int kVectors, bool kSkip>
  void Output(const Panel& panel, int64_t keys);
  template <int kVectors, bool kSkip>
  void PanelStep(const Panel& panel, int64_t j, int64_t keys);
  bool OutputFinite() const;
  bool HasHugeValues() const;
  void ScaleDown(bool scaled);
  void Store();
  void StoreRow(int64_t lane, const float* down, int64_t stride, float* o);
  void ScaleUp(const float* down, int64_t stride, double factor, float* o) const;

  const Tile& tile_;
  const Attention& a_;
  const Problem& p_;
  Scratch& s_;
  const Sequence sequence_;
  const int64_t lanes_;
  const int64_t vectors_;
  const int64_t panel_count_;
  const int64_t dim_v_padded_;
  const bool plain_;       // scores are q.k without scale
  const bool pairs_;       // q.k is added in pairs, except for rows that fail FitsPairs
  bool unpaired_ = false;  // there are such rows
  const bool bits_;        // the bias is a mask of bits
  // One unit of a score, in units of problem.h and in powers of two.
  const double unit_;
  const float to_log2_;
  const double kept_;     // factor of weights that dropout keeps; applied to O last
  bool careful_ = false;  // O is not finite
  bool scaled_ = false;   // and was computed again by s_.down
  // Some V so far is NaN or Inf. Hidden keys have weight 0, and 0 * Inf is NaN: they are skipped.
  bool skips_ = false;
  Panel panels_[kPanelsMax];
  KeyRange keys_{0, 0};  // seen by any row
  // The current key tile: its keys as fp32, and the distance between blocks of V's columns.
  const float* k_ = nullptr;
  const uint16_t* k_words_[kKeyTile];  // its keys in place, for pairs
  int64_t block_stride_ = 0;
};

void TileRun::MakePanels() {
  // Both ends never fall from row to row, and all heads are alike.
  const KeyRange first_keys = KeysOf(0);
  const KeyRange last_keys = KeysOf(lanes_ - 1);
  const bool even =
      Real(lanes_ - 1) && first_keys.begin == last_keys.begin && first_keys.end == last_keys.end;
  keys_ = {sequence_.k_len, 0};
  for (int64_t n = 0; n < panel_count_; ++n) {
    // Vectors are divided evenly: 2 + 2 is faster than 3 + 1.
    Panel& panel = panels_[n];
    const int64_t first = n * vectors_ / panel_count_;
    panel.lane = first * kLanes;
    panel.vectors = static_cast<int>((n + 1) * vectors_ / panel_count_ - first);
    panel.any = {sequence_.k_len, 0};
    panel.all = {0, sequence_.k_len};
    const int64_t end = even ? panel.lane + 1 : std::min(panel.lane + panel.width(), lanes_);
    for (int64_t lane = panel.lane; lane < end; ++lane) {
      const KeyRange range = KeysOf(lane);
      panel.all.begin = std::max(panel.all.begin, range.begin);
      panel.all.end = std::min(panel.all.end, range.end);
      if (range.begin >= range.end) continue;
      panel.any.begin = std::min(panel.any.begin, range.begin);
      panel.any.end = std::max(panel.any.end, range.end);
    }
    keys_.begin = std::min(keys_.begin, panel.any.begin);
    keys_.end = std::max(keys_.end, panel.any.end);
  }
}

void TileRun::PackQuery() {
  for (int64_t n = 0; n < panel_count_; ++n) {
    Panel& panel = panels_[n];
    float* out = s_.q + panel.lane * p_.dim;
    for (int64_t first = 0; first < panel.width(); first += kTurned) {
      const int64_t begin = panel.lane + first;
      const int64_t last = begin + kTurned - 1;
      if (p_.dtype == DType::kFloat32 && Real(begin) && Real(last) &&
          HeadOf(begin) == HeadOf(last)) {
        const auto* const rows = static_cast<const float*>(a_.q.data) + QueryOf(begin);
        TurnIn(rows, a_.q.stride_l, p_.dim, panel.width(), out + first);
        continue;
      }
      for (int64_t r = 0; r < kTurned; ++r) {
        float* row = s_.rows + r * kHeadDimMax;
        std::fill(row, row + (p_.dim + kLanes - 1) / kLanes * kLanes, 0.0f);
        if (Real(begin + r)) WidenRow(a_.q.data, p_.dtype, QueryOf(begin + r), p_.dim, row);
        if (pairs_) s_.unpaired[begin + r] = FitsPairs(row, p_.dim) ? 0.0f : 1.0f;
        panel.unpaired = panel.unpaired || (pairs_ && s_.unpaired[begin + r] != 0);
      }
      TurnIn(s_.rows, kHeadDimMax, p_.dim, panel.width(), out + first);
      if (pairs_) PackPairs(panel, first, p_.dim);
    }
    unpaired_ = unpaired_ || panel.unpaired;
  }
}

// Packs rows of the panel from lane `first` on as pairs of bf16, transposed like floats, and with
// zeros up to `dim`.
void TileRun::PackPairs(const Panel& panel, int64_t first, int64_t dim) {
  for (int64_t r = 0; r < kTurned; ++r) {
    float* row = s_.rows + r * kHeadDimMax;
    const int64_t lane = panel.lane + first + r;
    std::fill(row, row + dim / 2, 0.0f);
    if (!Real(lane)) continue;
    std::memcpy(row, static_cast<const uint16_t*>(a_.q.data) + QueryOf(lane),
                static_cast<size_t>(p_.dim) * sizeof(uint16_t));
  }
  TurnIn(s_.rows, kHeadDimMax, dim / 2, panel.width(), s_.q_pairs + panel.lane * (dim / 2) + first);
}

// Loads K and V of keys [j, j + keys) as fp32. K is read in place if its rows are contiguous; rows
// that are apart may share a cache set.
void TileRun::LoadKeys(int64_t j, int64_t keys) {
  const int64_t h_kv = tile_.head / p_.group();
  block_stride_ = ValueBlockStride(keys);
  k_ = s_.k;
  for (int64_t n = 0; n < keys;) {  // one round, unless K and V are paged
    const int64_t run = EvenKeys(p_, j + n, keys - n);
    const int64_t k = KeyElement(a_, a_.k, sequence_, tile_.b, h_kv, j + n);
    const int64_t v = KeyElement(a_, a_.v, sequence_, tile_.b, h_kv, j + n);
    if (run == keys && p_.dtype == DType::kFloat32 && a_.k.stride_l == p_.dim) {
      k_ = static_cast<const float*>(a_.k.data) + k;
    } else if (!pairs_ || unpaired_) {
      for (int64_t i = 0; i < run; ++i) {
        WidenRow(a_.k.data, p_.dtype, k + i * a_.k.stride_l, p_.dim, s_.k + (n + i) * p_.dim);
      }
    }
    for (int64_t i = 0; pairs_ && i < run; ++i) {
      k_words_[n + i] = static_cast<const uint16_t*>(a_.k.data) + k + i * a_.k.stride_l;
    }
    const bool finite = PackValues(a_.v.data, p_.dtype, v, a_.v.stride_l, run, block_stride_,
                                   p_.dim_v, s_.v + n * kValueBlock);
    skips_ = skips_ || !finite;
    n += run;
  }
}

// Sets each lane's visible keys and diagonal relative to key j. Lanes without a row are never
// stored.
void TileRun::LoadLanes(const Panel& panel, int64_t j, int64_t keys) {
  for (int64_t lane = panel.lane; lane < panel.lane + panel.width(); ++lane) {
    const KeyRange range = KeysOf(lane);
    s_.begin[lane] = static_cast<float>(std::clamp<int64_t>(range.begin - j, 0, keys));
    s_.end[lane] = static_cast<float>(std::clamp<int64_t>(range.end - j, 0, keys));
    if (!p_.has_alibi) continue;
    s_.diagonal[lane] = static_cast<float>(RowOf(lane) + sequence_.offset - j);
    s_.slope[lane] =
        Real(lane) ? a_.alibi_slopes[tile_.b * a_.alibi_stride_b + HeadOf(lane)] : 0.0f;
  }
}

void TileRun::LoadBias(const Panel& panel, int64_t j, int64_t keys) {
  for (int64_t first = 0; first < panel.width(); first += kTurned) {
    for (int64_t r = 0; r < kTurned; ++r) {
      float* row = s_.rows + r * kHeadDimMax;
      const int64_t lane = panel.lane + first + r;
      if (Real(lane)) {
        const int64_t index = tile_.b * a_.bias.stride_b + HeadOf(lane) * a_.bias.stride_h +
                              RowOf(lane) * a_.bias.stride_q + j;
        WidenRow(a_.bias.data, a_.bias.dtype, index, keys, row);
      } else {
        std::fill(row, row + keys, 0.0f);
      }
    }
    TurnIn(s_.rows, kHeadDimMax, keys, panel.width(), s_.bias + first);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace attend::cpu_flash
HWY_AFTER_NAMESPACE();

#endif  // include guard
