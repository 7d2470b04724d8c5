// SPDX-License-Identifier: Apache-2.0

#include "client/wire/piece_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "client/call/random.h"
#include "client/wire/chunk_codec.h"
#include "tests/client/support/test_seed.h"

namespace attend::client {
namespace {

using Tensors = std::vector<PieceOrder::Tensor>;

std::vector<std::tuple<int, int64_t, int64_t>> AllOf(PieceOrder order, int64_t bytes_max) {
  std::vector<std::tuple<int, int64_t, int64_t>> all;
  while (const auto piece = order.Next(bytes_max)) {
    all.emplace_back(piece->tensor, piece->offset, piece->bytes);
  }
  return all;
}
using Pieces = decltype(AllOf(PieceOrder(), 1));

// What of the tensors has been given out.
class Taken {
 public:
  explicit Taken(const Tensors& tensors) : tensors_(tensors), bytes_(tensors.size()) {}

  // False if it is not the tensor's next bytes.
  bool Add(const PieceOrder::Piece& piece) {
    const auto at = static_cast<size_t>(piece.tensor);
    if (piece.tensor < 0 || at >= bytes_.size() || piece.offset != bytes_[at]) return false;
    bytes_[at] += piece.bytes;
    total_ += piece.bytes;
    return piece.bytes > 0 && bytes_[at] <= tensors_[at].bytes;
  }
  bool all() const {
    for (size_t i = 0; i < bytes_.size(); ++i) {
      if (bytes_[i] != tensors_[i].bytes) return false;
    }
    return true;
  }
  // Bytes that complete no unit yet.
  int64_t outstanding() const {
    int64_t units = 1 << 20;
    int64_t unit_bytes = 0;
    int64_t whole_bytes = 0;
    for (size_t i = 0; i < bytes_.size(); ++i) {
      const PieceOrder::Tensor& t = tensors_[i];
      if (t.units == 1) {
        whole_bytes += t.bytes;
        if (bytes_[i] < t.bytes) units = 0;
      } else {
        units = std::min(units, t.bytes == 0 ? t.units : bytes_[i] * t.units / t.bytes);
        unit_bytes += t.bytes / t.units;
      }
    }
    return total_ - units * unit_bytes - (units == 0 ? 0 : whole_bytes);
  }

 private:
  const Tensors tensors_;
  std::vector<int64_t> bytes_;
  int64_t total_ = 0;
};

// More can never be outstanding: the tensors that go whole, and of each other one a run, which is
// one unit or has less than four times what it should have at least.
int64_t OutstandingMax(const Tensors& tensors, int64_t run_bytes_min) {
  int64_t whole_bytes = 0;
  int64_t run_bytes = 4 * run_bytes_min;
  for (const PieceOrder::Tensor& t : tensors) {
    if (t.units == 1) {
      whole_bytes += t.bytes;
    } else {
      run_bytes = std::max(run_bytes, t.bytes / t.units);
    }
  }
  return whole_bytes + static_cast<int64_t>(tensors.size()) * run_bytes;
}

void CheckOrder(PieceOrder order, const Tensors& tensors, int64_t run_bytes_min, Random& random) {
  Taken taken(tensors);
  for (;;) {
    const int64_t bytes_max = 1 + random.Below(2 * run_bytes_min);
    const std::optional<PieceOrder::Piece> piece = order.Next(bytes_max);
    if (!piece) break;
    ASSERT_LE(piece->bytes, bytes_max);
    ASSERT_TRUE(taken.Add(*piece)) << piece->tensor << " at " << piece->offset;
    ASSERT_LE(taken.outstanding(), OutstandingMax(tensors, run_bytes_min));
  }
  EXPECT_TRUE(taken.all());
  EXPECT_FALSE(order.Next(1));
}

TEST(PieceOrder, RunsOfAllTensorsGoTogether) {
  // Six units, of 2, 1, 1 and 3 bytes; runs of two.
  const PieceOrder order({{12, 6}, {6, 6}, {6, 6}, {18, 6}}, 6);
  EXPECT_EQ(AllOf(order, 4), (Pieces{{0, 0, 4},
                                     {1, 0, 2},
                                     {2, 0, 2},
                                     {3, 0, 4},
                                     {3, 4, 2},  //
                                     {0, 4, 4},
                                     {1, 2, 2},
                                     {2, 2, 2},
                                     {3, 6, 4},
                                     {3, 10, 2},
                                     {0, 8, 4},
                                     {1, 4, 2},
                                     {2, 4, 2},
                                     {3, 12, 4},
                                     {3, 16, 2}}));
}

TEST(PieceOrder, UnitsThatRunsDoNotDivideAreSharedOut) {
  const PieceOrder order({{50, 5}}, 25);  // two runs, of two units and of three
  EXPECT_EQ(AllOf(order, 100), (Pieces{{0, 0, 20}, {0, 20, 30}}));
}

TEST(PieceOrder, WhatIsNotCutGoesFirst) {
  EXPECT_EQ(AllOf(PieceOrder({{8, 2}, {4, 2}, {4, 2}, {5, 1}}, 4), 100),
            (Pieces{{3, 0, 5}, {0, 0, 4}, {1, 0, 2}, {2, 0, 2}, {0, 4, 4}, {1, 2, 2}, {2, 2, 2}}));
  EXPECT_EQ(AllOf(PieceOrder({{8, 1}, {4, 1}, {4, 1}}, 2), 6),
            (Pieces{{0, 0, 6}, {0, 6, 2}, {1, 0, 4}, {2, 0, 4}}));
}

TEST(PieceOrder, ShortTensorsAreNotCut) {
  EXPECT_EQ(AllOf(PieceOrder({{8, 4}, {4, 4}}, 5), 100), (Pieces{{0, 0, 8}, {1, 0, 4}}));
}

TEST(PieceOrder, WhatIsFarSmallerThanARunGoesWholeAndFirst) {
  EXPECT_EQ(AllOf(PieceOrder({{2, 2}, {64, 2}, {64, 2}}, 24), 100),
            (Pieces{{0, 0, 2}, {1, 0, 32}, {2, 0, 32}, {1, 32, 32}, {2, 32, 32}}));
  EXPECT_EQ(AllOf(PieceOrder({{4, 2}, {64, 2}}, 24), 100),
            (Pieces{{0, 0, 2}, {1, 0, 32}, {0, 2, 2}, {1, 32, 32}}));
}

TEST(PieceOrder, OfNothing) {
  EXPECT_TRUE(AllOf(PieceOrder(), 1).empty());
  EXPECT_TRUE(AllOf(PieceOrder(Tensors{}, 1), 1).empty());
  EXPECT_TRUE(AllOf(PieceOrder({{0, 1}, {0, 7}, {0, 7}}, 1), 1).empty());
}

TEST(PieceOrder, SizesUpTo64Bits) {
  const Tensors tensors = {{INT64_MAX, INT64_MAX}, {INT64_MAX, 1000}};
  PieceOrder order(tensors, INT64_MAX / 1000);
  Taken taken({tensors[0]});
  int64_t second = 0;
  while (const auto piece = order.Next(INT64_MAX)) {
    if (piece->tensor == 0) {
      ASSERT_TRUE(taken.Add(*piece));
    } else {
      ASSERT_EQ(piece->offset, second);
      second += piece->bytes;
    }
  }
  EXPECT_TRUE(taken.all());
  EXPECT_EQ(second, INT64_MAX);
  // As many runs as there can be.
  PieceOrder many({tensors[0], tensors[0]}, 1);
  EXPECT_EQ(many.Next(INT64_MAX)->bytes, INT64_MAX >> 30);
  EXPECT_EQ(many.Next(INT64_MAX)->tensor, 1);
}

TEST(PieceOrder, EachByteOnceAndHeadsOneAfterAnother) {
  ATTEND_FRESH_SEED(seed);
  Random random(seed);
  for (int round = 0; round < 1000; ++round) {
    const int64_t units = 1 + random.Below(40);
    Tensors tensors(static_cast<size_t>(1 + random.Below(5)));
    for (PieceOrder::Tensor& tensor : tensors) {
      tensor.units = random.Below(5) == 0 ? 1 : units;
      tensor.bytes = tensor.units * random.Below(60);
    }
    const int64_t run_bytes_min = 1 + random.Below(200);
    CheckOrder(PieceOrder(tensors, run_bytes_min), tensors, run_bytes_min, random);
  }
}

// Units that fit nothing, as of a call that the server will refuse.
TEST(PieceOrder, EachByteOnceWhateverTheUnits) {
  ATTEND_FRESH_SEED(seed);
  Random random(seed);
  for (int round = 0; round < 1000; ++round) {
    Tensors tensors(static_cast<size_t>(1 + random.Below(5)));
    for (PieceOrder::Tensor& tensor : tensors) {
      tensor = {random.Below(500), random.Below(50) - 5};
    }
    PieceOrder order(tensors, 1 + random.Below(100));
    Taken taken(tensors);
    while (const auto piece = order.Next(1 + random.Below(50))) ASSERT_TRUE(taken.Add(*piece));
    EXPECT_TRUE(taken.all());
  }
}

// A tensor without memory: no byte of it is looked at.
TensorRef Sized(const std::vector<int64_t>& shape) {
  return TensorRef(DType::kFloat16, shape, nullptr,
                   *TensorBytes("a tensor", DType::kFloat16, shape));
}

std::vector<int64_t> ShapeIn(v1::Layout layout, int64_t b, int64_t h, int64_t l, int64_t d) {
  if (layout == v1::LAYOUT_LHD) return {b * l, h, d};
  if (layout == v1::LAYOUT_BLHD) return {b, l, h, d};
  return {b, h, l, d};
}

TEST(PieceOrder, OfCalls) {
  ATTEND_FRESH_SEED(seed);
  Random random(seed);
  for (int round = 0; round < 200; ++round) {
    AttentionCall call;
    call.layout = static_cast<v1::Layout>(random.Below(4));  // unspecified too
    const int64_t b = random.Below(4);
    const int64_t heads_kv = random.Below(5);
    const int64_t heads_q = heads_kv * (1 + random.Below(3));
    const int64_t len_q = random.Below(4000);
    const int64_t len_k = random.Below(10) == 0 ? 0 : random.Below(20000);
    const int64_t dim = 1 + random.Below(256);
    call.q = Sized(ShapeIn(call.layout, b, heads_q, len_q, dim));
    call.k = Sized(ShapeIn(call.layout, b, heads_kv, len_k, dim));
    call.v = Sized(ShapeIn(call.layout, b, heads_kv, len_k, 1 + random.Below(256)));
    int64_t units = call.layout == v1::LAYOUT_BLHD ? b : b * heads_kv;
    if (call.layout == v1::LAYOUT_LHD || units == 0) units = 1;
    Tensors tensors = {{call.q.bytes, units}, {call.k.bytes, units}, {call.v.bytes, units}};
    if (random.Below(2) == 0) {
      const bool full = random.Below(2) == 0 || b * heads_q <= 1;
      call.bias = Sized({full ? b : 1, full ? heads_q : 1, 1 + random.Below(100), len_k});
      tensors.push_back({call.bias->bytes, full ? units : 1});
    }
    SCOPED_TRACE(::testing::Message()
                 << v1::Layout_Name(call.layout) << " q " << ShapeText(call.q.shape) << " k "
                 << ShapeText(call.k.shape));
    const Result<ChunkedCall> chunked = ChunkedCall::Make(call, nullptr);
    ASSERT_TRUE(chunked.ok());
    CheckOrder(chunked->pieces(), tensors, PieceOrder::kPieceBytes, random);
  }
}

TEST(PieceOrder, OfCallsWhoseShapesDoNotFitTogether) {
  ATTEND_FRESH_SEED(seed);
  Random random(seed);
  for (int round = 0; round < 1000; ++round) {
    AttentionCall call;
    call.layout = static_cast<v1::Layout>(random.Below(4));
    Tensors tensors;
    for (TensorRef* tensor : {&call.q, &call.k, &call.v, &call.bias.emplace()}) {
      for (int64_t rank = random.Below(6); rank > 0; --rank) {
        const int64_t dims[] = {INT64_MIN, -1, 0, 1, 2, 3, 1000, INT64_MAX};
        tensor->shape.push_back(dims[random.Below(8)]);
      }
      tensor->bytes = random.Below(int64_t{30} << 20);
      tensors.push_back({tensor->bytes, 1});
    }
    PieceOrder order = ChunkedCall::Make(call, nullptr)->pieces();
    Taken taken(tensors);
    while (const auto piece = order.Next(int64_t{1} << 20)) ASSERT_TRUE(taken.Add(*piece));
    EXPECT_TRUE(taken.all());
  }
}

}  // namespace
}  // namespace attend::client
