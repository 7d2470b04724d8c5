// SPDX-License-Identifier: Apache-2.0

#include "client/tool/call_spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>

#include "client/call/tree_mask.h"
#include "client/tool/file_io.h"
#include "tests/client/support/test_seed.h"

namespace attend::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(CallSpec, ReadsEveryWord) {
  const Result<CallSpec> spec = ParseCallSpec(
      "B2,H=8,Hkv2,Lq16,Lk32,D64,Dv=48,dtype=bfloat16,layout=blhd,ragged,causal,window=5:-1,"
      "top-left,scale=0.25,softcap=30,bias,alibi,sinks,lse,kernel=cpu_flash,weight=2.5");
  ASSERT_TRUE(spec.ok()) << spec.status().ToString();
  EXPECT_EQ(spec->batch, 2);
  EXPECT_EQ(spec->heads_q, 8);
  EXPECT_EQ(spec->heads_kv, 2);
  EXPECT_EQ(spec->len_q, 16);
  EXPECT_EQ(spec->len_k, 32);
  EXPECT_EQ(spec->dim, 64);
  EXPECT_EQ(spec->dim_v, 48);
  EXPECT_EQ(spec->dtype, DType::kBFloat16);
  EXPECT_EQ(spec->call.layout, v1::LAYOUT_BLHD);
  EXPECT_TRUE(spec->ragged && spec->causal && spec->top_left && spec->bias && spec->alibi &&
              spec->sinks && spec->lse);
  EXPECT_EQ(spec->call.mask.window_left, 5);
  EXPECT_EQ(spec->call.mask.window_right, -1);
  EXPECT_EQ(spec->call.scale, 0.25f);
  EXPECT_EQ(spec->call.softcap, 30);
  EXPECT_EQ(spec->call.kernel, "cpu_flash");
  EXPECT_EQ(spec->weight, 2.5);
  const Result<CallSpec> dropped = ParseCallSpec("L9,bits,dropout=0.25");
  ASSERT_TRUE(dropped.ok()) << dropped.status().ToString();
  EXPECT_TRUE(dropped->bits && !dropped->bias);
  EXPECT_EQ(dropped->call.dropout_p, 0.25f);
  EXPECT_EQ(ParseCallSpec("L9,tree=5")->tree, 5);
}

TEST(CallSpec, OmittedWordsHaveDefaults) {
  const Result<CallSpec> spec = ParseCallSpec("H6,L10");
  ASSERT_TRUE(spec.ok());
  EXPECT_EQ(spec->batch, 1);
  EXPECT_EQ(spec->heads_kv, 6);
  EXPECT_EQ(spec->len_k, 10);
  EXPECT_EQ(spec->dim_v, 64);
  EXPECT_EQ(ParseCallSpec("L10,Lk0")->len_k, 0) << "an empty KV can be asked for";
}

TEST(CallSpec, RefusesUnknownWords) {
  for (const char* text : {"",
                           ",",
                           "B1,",
                           "B1,,H2",
                           "Q3",
                           "B",
                           "B-1",
                           "Bx",
                           "B1x",
                           "B99999999999999999999",
                           "dtype=int8",
                           "dtype",
                           "layout=hbld",
                           "window=3",
                           "window=3:x",
                           "window=-2:0",
                           "softcap=-1",
                           "softcap=nan",
                           "scale=inf",
                           "weight=0",
                           "weight=nan",
                           "dropout",
                           "dropout=1",
                           "dropout=-0.1",
                           "dropout=nan",
                           "bits,bias",
                           "tree=0",
                           "tree=1025",
                           "tree",
                           "tree=4,bits",
                           "tree=4,backward",
                           "causal=1",
                           "causal,window=1:1",
                           "colour=red"}) {
    const Result<CallSpec> spec = ParseCallSpec(text);
    EXPECT_FALSE(spec.ok()) << text;
    EXPECT_EQ(spec.status().code(), Code::kInvalidArgument) << text;
  }
  EXPECT_THAT(ParseCallSpec("B1,colour=red").status().message(), HasSubstr("colour=red"));
}

TEST(CallSpec, ReadsMixFiles) {
  const std::string path = ScratchPath("mix.json");
  const auto read = [&](const std::string& text) {
    EXPECT_TRUE(WriteFile(path, {{text.data(), static_cast<int64_t>(text.size())}}).ok());
    return ReadMix(path);
  };
  const auto mix = read(R"({"shapes": ["B1,L5,causal",
      {"B": 2, "H": 4, "L": 7, "dtype": "float16", "causal": true, "lse": false,
       "weight": 2.5}]})");
  ASSERT_TRUE(mix.ok()) << mix.status().ToString();
  ASSERT_EQ(mix->size(), 2u);
  EXPECT_TRUE((*mix)[0].causal);
  EXPECT_EQ((*mix)[1].batch, 2);
  EXPECT_EQ((*mix)[1].dtype, DType::kFloat16);
  EXPECT_TRUE((*mix)[1].causal);
  EXPECT_FALSE((*mix)[1].lse);
  EXPECT_EQ((*mix)[1].weight, 2.5);
  EXPECT_TRUE(read(R"([{"L": 3}])").ok());
  for (const char* bad : {"", "{", "[]", "{}", "3", "[3]", "[{\"L\": []}]", "[{\"L\": null}]",
                          "[{\"Z\": 1}]", "[\"L\"]", "{\"shapes\": {}}"}) {
    const auto result = read(bad);
    EXPECT_FALSE(result.ok()) << bad;
    EXPECT_THAT(result.status().message(), HasSubstr(path)) << bad;
  }
  EXPECT_EQ(ReadMix(path + ".none").status().code(), Code::kNotFound);
}

TEST(CallSpec, RandomCallsAreCompleteAndDeterministic) {
  ATTEND_FRESH_SEED(seed);
  for (const char* text :
       {"B2,H4,Hkv2,Lq5,Lk9,D16,Dv8,bias,alibi,sinks,softcap=9,lse,causal,window=3:-1",
        "B3,H2,L6,D8,layout=blhd,ragged,window=1:2,top-left",
        "B3,H2,Lq6,Lk8,D8,layout=lhd,ragged,bias,dtype=float16", "B1,H1,Lq0,Lk4,D3",
        "B2,H2,Lq6,Lk19,D8,bits,dropout=0.2", "B1,H1,Lq4,Lk0,D3,bits", "B0,H1,L4,D8"}) {
    const Result<CallSpec> spec = ParseCallSpec(text);
    ASSERT_TRUE(spec.ok()) << text;
    const Result<AttentionCall> call = MakeRandomCall(*spec, seed);
    const Result<AttentionCall> same = MakeRandomCall(*spec, seed);
    ASSERT_TRUE(call.ok()) << text << ": " << call.status().ToString();
    const Result<Attention> attention = Describe(*call, nullptr, nullptr);
    ASSERT_TRUE(attention.ok()) << text << ": " << attention.status().ToString();
    EXPECT_EQ(attention->problem.has_bias, spec->bias || spec->bits);
    EXPECT_EQ(attention->problem.dropout > 0, spec->call.dropout_p > 0);
    EXPECT_EQ(attention->dropout.seed, same->dropout_seed);
    EXPECT_EQ(attention->problem.has_alibi, spec->alibi);
    EXPECT_EQ(attention->problem.has_sinks, spec->sinks);
    EXPECT_EQ(call->q.bytes, same->q.bytes);
    EXPECT_EQ(std::memcmp(call->v.data, same->v.data, static_cast<size_t>(call->v.bytes)), 0);
  }
}

TEST(CallSpec, AMaskOfBitsHasWholeBytesForEachRow) {
  const CallSpec spec = *ParseCallSpec("B2,H3,Lq5,Lk19,D8,bits");
  const AttentionCall call = *MakeRandomCall(spec, 1);
  EXPECT_THAT(call.bias->shape, ElementsAre(1, 3, 5, 19));
  EXPECT_EQ(call.bias->bytes, 3 * 5 * 3);
  const Attention attention = *Describe(call, nullptr, nullptr);
  EXPECT_EQ(attention.bias.dtype, DType::kBit);
  EXPECT_TRUE(attention.problem.bias_bits);
  EXPECT_EQ(attention.bias.stride_q, 24);
  EXPECT_EQ(attention.bias.stride_h, 5 * 24);
  EXPECT_EQ(attention.bias.stride_b, 0);
  int64_t bytes = 2 * 3 * 4 * 8 * (5 + 19 + 19) + 3 * 5 * 3;
  EXPECT_TRUE(TakeInputBytes(spec, 1, &bytes).ok());
  EXPECT_EQ(bytes, 0);
}

TEST(CallSpec, ATreeHasItsTokensAtTheEndsOfItsSequences) {
  const CallSpec spec = *ParseCallSpec("B3,H2,Lq5,Lk19,D8,ragged,tree=9");
  const AttentionCall call = *MakeRandomCall(spec, 1);
  EXPECT_THAT(call.tree->shape, ElementsAre(1, 9, 9));
  ASSERT_EQ(call.tree_lengths.size(), 3u);
  const AttentionCall written = *WithTreeAsBias(call);
  EXPECT_FALSE(written.tree);
  EXPECT_TRUE(written.tree_lengths.empty());
  EXPECT_THAT(written.bias->shape, ElementsAre(3, 1, 5, 19));
  const auto* const seen = static_cast<const uint8_t*>(call.tree->data);
  const auto bit = [](const uint8_t* row, int64_t j) { return row[j / 8] >> (j % 8) & 1; };
  for (int64_t b = 0; b < 3; ++b) {
    const auto n = static_cast<size_t>(b);
    const int64_t draft = call.tree_lengths[n];
    EXPECT_EQ(draft, std::min(call.q_lengths[n], call.kv_lengths[n]));
    for (int64_t i = 0; i < draft; ++i) {
      const auto* const row = static_cast<const uint8_t*>(written.bias->data) +
                              (b * 5 + call.q_lengths[n] - draft + i) * 3;
      for (int64_t j = 0; j < draft; ++j) {
        EXPECT_EQ(bit(row, call.kv_lengths[n] - draft + j), bit(seen + i * 2, j));
        EXPECT_FALSE(j > i && bit(seen + i * 2, j) != 0) << "a token sees one after it";
      }
      EXPECT_EQ(bit(seen + i * 2, i), 1) << "a token does not see itself";
    }
  }
}

TEST(CallSpec, DifferentSeedsGiveDifferentInputs) {
  const Result<CallSpec> spec = ParseCallSpec("B1,H1,L16,D16");
  const Result<AttentionCall> a = MakeRandomCall(*spec, 1), b = MakeRandomCall(*spec, 2);
  EXPECT_NE(std::memcmp(a->q.data, b->q.data, static_cast<size_t>(a->q.bytes)), 0);
}

TEST(Describe, NamesMismatchedTensors) {
  const AttentionCall good = *MakeRandomCall(*ParseCallSpec("B2,H4,Hkv2,Lq5,Lk9,D16"), 1);
  ASSERT_TRUE(Describe(good, nullptr, nullptr).ok());
  const auto message = [&](const std::function<void(AttentionCall&)>& spoil) {
    AttentionCall call = good;
    spoil(call);
    const Result<Attention> attention = Describe(call, nullptr, nullptr);
    EXPECT_FALSE(attention.ok());
    return attention.ok() ? "" : attention.status().message();
  };
  EXPECT_THAT(message([](auto& c) { c.q.shape.pop_back(); }), HasSubstr("q: shape"));
  EXPECT_THAT(message([](auto& c) { c.k.bytes -= 1; }), HasSubstr("k: "));
  EXPECT_THAT(message([](auto& c) { c.v.shape[0] = -1; }), HasSubstr("below 0"));
  EXPECT_THAT(message([](auto& c) { c.k = c.q; }), HasSubstr("do not fit together"));
  EXPECT_THAT(message([](auto& c) { c.q_lengths = {1}; }), HasSubstr("q_lengths"));
  EXPECT_THAT(message([](auto& c) { c.kv_lengths = {1, 10}; }), HasSubstr("kv_lengths"));
  EXPECT_THAT(message([](auto& c) { c.alibi_slopes = {1}; }), HasSubstr("alibi_slopes"));
  EXPECT_THAT(message([](auto& c) { c.sinks = {1}; }), HasSubstr("sinks"));
  EXPECT_THAT(message([](auto& c) { c.bias = c.q; }), HasSubstr("bias"));
  const auto tree = [](AttentionCall& c) { c.tree = *TreeFromParents(std::array<int64_t, 1>{-1}); };
  EXPECT_THAT(message([&](auto& c) {
                tree(c);
                c.tree->shape = {3, 1, 1};
              }),
              HasSubstr("tree: shape [3, 1, 1] of bit, must be [1, T, T] or [B = 2, T, T]"));
  EXPECT_THAT(message([&](auto& c) {
                tree(c);
                c.tree->bytes = 2;
              }),
              HasSubstr("tree: 2 bytes given, shape [1, 1, 1] needs 1"));
  EXPECT_THAT(message([&](auto& c) {
                tree(c);
                c.tree_lengths = {1, 2};
              }),
              HasSubstr("tree_lengths[1] is 2, must be in [0, 1]"));
  EXPECT_THAT(message([&](auto& c) {
                tree(c);
                c.tree_lengths = {1};
              }),
              HasSubstr("tree_lengths has 1 entries, must have B = 2 or none"));
  EXPECT_THAT(message([&](auto& c) {
                tree(c);
                c.bias = c.q;
              }),
              HasSubstr("bias"));
  EXPECT_THAT(message([](auto& c) { c.scale = INFINITY; }), HasSubstr("scale"));
  EXPECT_THAT(message([](auto& c) { c.dropout_p = 1; }), HasSubstr("dropout_p is 1,"));
  EXPECT_THAT(message([](auto& c) {
                c.q.dtype = DType::kBit;
                c.q.bytes = 2 * 4 * 5 * 2;
              }),
              HasSubstr("q has the dtype of bits"));
}

}  // namespace
}  // namespace attend::client
