// SPDX-License-Identifier: Apache-2.0

#include "tests/server/support/bad_requests.h"

#include <limits>

namespace attend::test {
namespace {

using grpc::StatusCode;

constexpr auto kHuge = std::numeric_limits<int64_t>::max();
constexpr auto kLeast = std::numeric_limits<int64_t>::min();

void SetDim(v1::Tensor* tensor, int i, int64_t dim) { tensor->set_shape(i, dim); }

// Turns the request into LHD with two sequences of 3 + 5 rows. Shapes keep their element count.
void MakePacked(v1::AttendRequest& r) {
  r.set_layout(v1::LAYOUT_LHD);
  for (v1::Tensor* tensor : {r.mutable_q(), r.mutable_k(), r.mutable_v()}) {
    tensor->mutable_shape()->Clear();
    for (const int64_t dim : {8, 2, 16}) tensor->add_shape(dim);
  }
  for (const int64_t row : {0, 3, 8}) {
    r.add_cu_q(row);
    r.add_cu_kv(row);
  }
}

v1::Tensor* AddBias(v1::AttendRequest& r, std::vector<int64_t> shape) {
  v1::Tensor* bias = r.mutable_bias();
  bias->set_dtype(v1::DTYPE_FLOAT32);
  bias->mutable_shape()->Assign(shape.begin(), shape.end());
  r.add_raw(std::string(2 * 8 * 8 * 4, '\0'));
  return bias;
}

}  // namespace

std::vector<BadRequest> BadShapes() {
  return {
      {"no q", [](auto& r) { r.clear_q(); }, {"q is not set"}},
      {"no v", [](auto& r) { r.clear_v(); }, {"v is not set"}},
      {"rank 3",
       [](auto& r) { r.mutable_q()->mutable_shape()->RemoveLast(); },
       {"q.shape [1, 2, 8] has 3 dimensions, must have 4: [B, Hq, Lq, D]"}},
      {"rank 3 in BLHD",
       [](auto& r) {
         r.set_layout(v1::LAYOUT_BLHD);
         r.mutable_v()->add_shape(1);
       },
       {"v.shape", "has 5 dimensions, must have 4: [B, Lk, Hkv, Dv]"}},
      {"negative",
       [](auto& r) { SetDim(r.mutable_k(), 2, -8); },
       {"k.shape[2] is -8, must be at least 0"}},
      {"most negative", [](auto& r) { SetDim(r.mutable_q(), 0, -kHuge - 1); }, {"q.shape[0]"}},
      {"overflow",
       [](auto& r) {
         SetDim(r.mutable_q(), 2, int64_t{1} << 40);
         SetDim(r.mutable_q(), 0, int64_t{1} << 40);
       },
       {"q.shape", "overflows 64 bits"}},
      {"overflow by one dimension",
       [](auto& r) { SetDim(r.mutable_q(), 2, kHuge); },
       {"q.shape", "overflows 64 bits"}},
      {"huge and empty",
       [](auto& r) {
         for (v1::Tensor* t : {r.mutable_q(), r.mutable_k(), r.mutable_v()}) SetDim(t, 0, 0);
         SetDim(r.mutable_q(), 2, kHuge);
         for (int i = 0; i < 3; ++i) r.mutable_raw(i)->clear();
       },
       {"query length Lq is 9223372036854775807, must be in [0, "}},
      {"head counts",
       [](auto& r) {
         SetDim(r.mutable_k(), 1, 3);
         SetDim(r.mutable_v(), 1, 3);
       },
       {"Hq is 2, must be a multiple of key/value heads Hkv 3"}},
      {"no shape",
       [](auto& r) { r.mutable_q()->clear_shape(); },
       {"has 0 dimensions, must have 4"}},
      {"no heads", [](auto& r) { SetDim(r.mutable_q(), 1, 0); }, {"query heads Hq is 0"}},
      {"no kv heads",
       [](auto& r) {
         SetDim(r.mutable_k(), 1, 0);
         SetDim(r.mutable_v(), 1, 0);
       },
       {"Hkv is 0, must be in [1, "}},
  };
}

std::vector<BadRequest> BadMatches() {
  return {
      {"batches differ",
       [](auto& r) { SetDim(r.mutable_k(), 0, 2); },
       {"k.shape[0] (B) is 2, must equal q's 1"}},
      {"v heads differ",
       [](auto& r) { SetDim(r.mutable_v(), 1, 1); },
       {"v.shape[1] (Hkv) is 1, must equal k's 2"}},
      {"v length differs",
       [](auto& r) { SetDim(r.mutable_v(), 2, 9); },
       {"v.shape[2] (Lk) is 9, must equal k's 8"}},
      {"D differs",
       [](auto& r) { SetDim(r.mutable_k(), 3, 15); },
       {"k.shape[3] (D) is 15, must equal q's 16"}},
      {"D 0",
       [](auto& r) {
         SetDim(r.mutable_q(), 3, 0);
         SetDim(r.mutable_k(), 3, 0);
       },
       {"head dim D is 0, must be in [1, 256]"}},
      {"D 257",
       [](auto& r) {
         SetDim(r.mutable_q(), 3, 257);
         SetDim(r.mutable_k(), 3, 257);
       },
       {"head dim D is 257, must be in [1, 256]"}},
      {"Dv 0",
       [](auto& r) { SetDim(r.mutable_v(), 3, 0); },
       {"value head dim Dv is 0, must be in [1, 256]"}},
      {"Dv 257",
       [](auto& r) { SetDim(r.mutable_v(), 3, 257); },
       {"value head dim Dv is 257, must be in [1, 256]"}},
  };
}

std::vector<BadRequest> BadBytes() {
  return {
      {"byte_length short",
       [](auto& r) { r.mutable_q()->set_byte_length(1020); },
       {"q.byte_length is 1020, must be 1024 for shape [1, 2, 8, 16] of float32"}},
      {"byte_length 2^64 - 1",
       [](auto& r) { r.mutable_v()->set_byte_length(UINT64_MAX); },
       {"v.byte_length is 18446744073709551615, must be 1024"}},
      {"raw short",
       [](auto& r) { r.mutable_raw(0)->pop_back(); },
       {"raw[0] has 1023 bytes, must have 1024, the bytes of q"}},
      {"raw long",
       [](auto& r) { r.mutable_raw(2)->push_back('x'); },
       {"raw[2] has 1025 bytes, must have 1024, the bytes of v"}},
      {"raw missing", [](auto& r) { r.clear_raw(); }, {"raw has 0 entries, must have 3"}},
      {"raw too many", [](auto& r) { r.add_raw("x"); }, {"raw has 4 entries, must have 3"}},
      {"4 GiB declared, little sent",
       [](auto& r) {
         SetDim(r.mutable_q(), 2, (int64_t{4} << 30) / 128);
         r.mutable_raw(0)->resize(4);
       },
       {"raw[0] has 4 bytes, must have 4294967296, the bytes of q"}},
      {"bytes elsewhere",
       [](auto& r) {
         v1::Tensor::GetReflection()->MutableUnknownFields(r.mutable_k())->AddVarint(7, 1);
       },
       {"k.source is field 7, but this server supports only inline_bytes, chunked and "
        "shared_memory"},
       StatusCode::UNIMPLEMENTED},
  };
}

std::vector<BadRequest> BadValues() {
  const auto nan = std::numeric_limits<float>::quiet_NaN();
  const auto inf = std::numeric_limits<float>::infinity();
  return {
      {"no dtype",
       [](auto& r) { r.mutable_q()->clear_dtype(); },
       {"q.dtype is 0, must be FLOAT16 (1), BFLOAT16 (2) or FLOAT32 (3)"}},
      {"unknown dtype",
       [](auto& r) { r.mutable_k()->set_dtype(static_cast<v1::DType>(77)); },
       {"k.dtype is 77"}},
      {"negative dtype",
       [](auto& r) { r.mutable_v()->set_dtype(static_cast<v1::DType>(-1)); },
       {"v.dtype is -1"}},
      {"mixed dtypes",
       [](auto& r) {
         r.mutable_v()->set_dtype(v1::DTYPE_FLOAT16);
         r.mutable_raw(2)->resize(512);
       },
       {"v.dtype is float16, must equal q.dtype float32"}},
      {"unknown layout",
       [](auto& r) { r.set_layout(static_cast<v1::Layout>(9)); },
       {"layout is 9, must be BHLD (1), BLHD (2) or LHD (3)"}},
      {"unknown mask",
       [](auto& r) { r.mutable_mask()->set_kind(static_cast<v1::Mask::Kind>(6)); },
       {"mask.kind is 6, must be in [0, 5]"}},
      {"window without a window",
       [](auto& r) { r.mutable_mask()->set_window_left(3); },
       {"mask.window_left is 3, must be unset"}},
      {"right window of a causal mask",
       [](auto& r) {
         r.mutable_mask()->set_kind(v1::Mask::KIND_CAUSAL_TOP_LEFT);
         r.mutable_mask()->set_window_right(0);
       },
       {"mask.window_right is 0, must be unset"}},
      {"window -2",
       [](auto& r) {
         r.mutable_mask()->set_kind(v1::Mask::KIND_WINDOW_TOP_LEFT);
         r.mutable_mask()->set_window_left(-2);
       },
       {"mask.window_left is -2, must be at least 0, or -1 for no bound"}},
      {"scale nan", [=](auto& r) { r.set_scale(nan); }, {"scale is", "must be finite"}},
      {"scale inf", [=](auto& r) { r.set_scale(-inf); }, {"scale is -inf, must be finite"}},
      {"softcap negative",
       [](auto& r) { r.set_softcap(-1); },
       {"softcap is -1, must be in [1e-06, 1e+06], or 0 for none"}},
      {"softcap nan",
       [=](auto& r) { r.set_softcap(nan); },
       {"softcap is nan, must be in [1e-06, "}},
      {"softcap subnormal", [](auto& r) { r.set_softcap(1e-45f); }, {"softcap is 1e-45, must be"}},
      {"softcap large", [](auto& r) { r.set_softcap(2e6f); }, {"softcap is 2e+06"}},
      {"priority",
       [](auto& r) { r.set_priority(101); },
       {"priority is 101, must be in [-100, 100]"}},
      {"request_id",
       [](auto& r) { r.set_request_id(std::string(129, 'i')); },
       {"request_id has 129 bytes, must have at most 128"}},
      {"kernel",
       [](auto& r) { r.set_kernel("warp_drive"); },
       {"kernel is \"warp_drive\", must be one of auto, cpu_reference"}},
      {"kernel of another device",
       [](auto& r) { r.set_kernel("cuda_naive"); },
       {"kernel cuda_naive does not run on cpu"},
       StatusCode::UNIMPLEMENTED},
  };
}

std::vector<BadRequest> BadTerms() {
  const auto nan = std::numeric_limits<float>::quiet_NaN();
  return {
      {"slopes",
       [](auto& r) {
         for (int i = 0; i < 3; ++i) r.add_alibi_slopes(1);
       },
       {"alibi_slopes has 3 entries, must have Hq = 2, B * Hq = 2, or 0"}},
      {"dropout 1",
       [](auto& r) { r.set_dropout_p(1); },
       {"dropout_p is 1, must be in [0, 1 - 2^-17)"}},
      {"dropout negative", [](auto& r) { r.set_dropout_p(-0.25f); }, {"dropout_p is -0.25"}},
      {"dropout nan", [=](auto& r) { r.set_dropout_p(nan); }, {"dropout_p is", "must be in [0, "}},
      {"q of bits",
       [](auto& r) { r.mutable_q()->set_dtype(v1::DTYPE_BIT); },
       {"q.dtype is 4, must be FLOAT16 (1), BFLOAT16 (2) or FLOAT32 (3)"}},
      {"o of another 16 bits",
       [](auto& r) { r.set_o_dtype(v1::DTYPE_FLOAT16); },
       {"o_dtype is 1, must be q.dtype float32 or FLOAT32 (3)"}},
      {"o of a negative dtype",
       [](auto& r) { r.set_o_dtype(static_cast<v1::DType>(-1)); },
       {"o_dtype is -1"}},
      {"o of bits",
       [](auto& r) { r.set_o_dtype(v1::DTYPE_BIT); },
       {"o_dtype is 4, must be q.dtype float32 or FLOAT32 (3)"}},
      {"key offset -1",
       [](auto& r) { r.mutable_mask()->set_key_offset(-1); },
       {"mask.key_offset is -1, must be in [0, 1073741824]"}},
      {"keys after 2^62",
       [](auto& r) { r.mutable_mask()->set_keys_after(int64_t{1} << 62); },
       {"mask.keys_after is 4611686018427387904, must be in [0, 1073741824]"}},
      {"keys of the whole 2^31",
       [](auto& r) {
         r.mutable_mask()->set_key_offset(1 << 30);
         r.mutable_mask()->set_keys_after(1 << 30);
       },
       {"keys of the whole"}},
      {"sinks", [](auto& r) { r.add_sinks(1); }, {"sinks has 1 entries, must have Hq = 2, or 0"}},
  };
}

std::vector<BadRequest> BadLengths() {
  return {
      {"lengths beyond",
       [](auto& r) { r.add_q_lengths(9); },
       {"q_lengths[0] is 9, must be in [0, Lq = 8]"}},
      {"negative length",
       [](auto& r) { r.add_kv_lengths(-1); },
       {"kv_lengths[0] is -1, must be in [0, Lk = 8]"}},
      {"too many lengths",
       [](auto& r) {
         r.add_kv_lengths(1);
         r.add_kv_lengths(1);
       },
       {"kv_lengths has 2 entries, must have B = 1, or 0"}},
      {"cu in a dense layout", [](auto& r) { r.add_cu_q(0); }, {"cu_q has 1 entries", "LHD"}},
      {"packed without cu",
       [](auto& r) {
         MakePacked(r);
         r.clear_cu_q();
       },
       {"cu_q has 0 entries, must have B + 1 in layout LHD"}},
      {"cu not from 0",
       [](auto& r) {
         MakePacked(r);
         r.set_cu_kv(0, 1);
       },
       {"cu_kv[0] is 1, must be 0"}},
      {"cu falls",
       [](auto& r) {
         MakePacked(r);
         r.mutable_cu_q()->Add(kLeast);
         r.mutable_cu_q()->Add(8);
       },
       {"cu_q[3] is -9223372036854775808, must be in [8, 8]"}},
      {"cu overshoots",
       [](auto& r) {
         MakePacked(r);
         r.set_cu_q(1, 9);
       },
       {"cu_q[1] is 9, must be in [0, 8]"}},
      {"cu huge",
       [](auto& r) {
         MakePacked(r);
         r.set_cu_kv(1, kHuge);
       },
       {"cu_kv[1] is 9223372036854775807, must be in [0, 8]"}},
      {"cu ends early",
       [](auto& r) {
         MakePacked(r);
         r.set_cu_q(2, 7);
       },
       {"cu_q[2] is 7, must equal the rows 8"}},
      {"cu counts differ",
       [](auto& r) {
         MakePacked(r);
         r.add_cu_kv(8);
       },
       {"cu_kv has 4 entries, must have as many as cu_q, 3"}},
      {"lengths in LHD",
       [](auto& r) {
         MakePacked(r);
         r.add_q_lengths(1);
       },
       {"q_lengths has 1 entries, must have none in layout LHD"}},
  };
}

std::vector<BadRequest> BadBiases() {
  return {
      {"bias rank",
       [](auto& r) {
         AddBias(r, {2, 8, 8});
       },
       {"bias.shape", "must have 4"}},
      {"bias heads",
       [](auto& r) {
         AddBias(r, {1, 3, 8, 8});
       },
       {"bias.shape[1] is 3, must be Hq = 2 or 1"}},
      {"bias keys",
       [](auto& r) {
         AddBias(r, {1, 2, 8, 1});
       },
       {"bias.shape[3] is 1, must be Lk = 8"}},
      {"bias dtype",
       [](auto& r) {
         AddBias(r, {1, 2, 8, 8})->clear_dtype();
       },
       {"bias.dtype is 0, must be FLOAT16 (1), BFLOAT16 (2), FLOAT32 (3) or BIT (4)"}},
      {"bias of bits, a byte for each key",
       [](auto& r) {
         AddBias(r, {1, 2, 8, 8})->set_dtype(v1::DTYPE_BIT);
         r.mutable_raw(3)->resize(2 * 8 * 8);
       },
       {"raw[3] has 128 bytes, must have 16, the bytes of bias"}},
      {"byte_length of bits",
       [](auto& r) {
         v1::Tensor* const bias = AddBias(r, {1, 1, 8, 8});
         bias->set_dtype(v1::DTYPE_BIT);
         bias->set_byte_length(64);
         r.mutable_raw(3)->resize(8);
       },
       {"bias.byte_length is 64, must be 8 for shape [1, 1, 8, 8] of bit"}},
      {"bits that overflow",
       [](auto& r) {
         AddBias(r, {1, kHuge, 8, 8})->set_dtype(v1::DTYPE_BIT);
       },
       {"bias.shape [1, 9223372036854775807, 8, 8] times 1 bit an element, in rows of whole bytes, "
        "overflows 64 bits"}},
      {"bits whose bytes do not overflow",
       [](auto& r) {
         AddBias(r, {1, int64_t{1} << 58, 8, 8})->set_dtype(v1::DTYPE_BIT);
       },
       {"bias.shape [1, 288230376151711744, 8, 8] times 1 bit an element, in rows of whole bytes, "
        "overflows 64 bits"}},
      {"bias bytes",
       [](auto& r) {
         AddBias(r, {1, 1, 8, 8});
       },
       {"raw[3] has 512 bytes, must have 256, the bytes of bias"}},
  };
}

}  // namespace attend::test
