// SPDX-License-Identifier: Apache-2.0
//
// A call described in a few words, "B1,H8,L1024,D64,dtype=float16,causal,weight=3", and random
// inputs for it, as sent by `attend-client load` and `check`. Pure.

#pragma once

#include <optional>
#include <string>
#include <vector>

#include "client/call/attention_call.h"

namespace attend::client {

struct CallSpec {
  std::string text;  // as given
  int64_t batch = 1;
  int64_t heads_q = 1;
  int64_t heads_kv = 0;  // 0: heads_q
  int64_t len_q = 128;
  int64_t len_k = 0;  // 0: len_q
  int64_t dim = 64;
  int64_t dim_v = 0;  // 0: dim
  DType dtype = DType::kFloat32;
  AttentionCall call;   // layout, window, scale, softcap, dropout_p and kernel
  bool ragged = false;  // every sequence has a random true length
  bool causal = false;
  bool top_left = false;  // alignment of the mask and of ALiBi
  bool bias = false;
  bool bits = false;  // the bias is a bit mask
  int64_t tree = 0;   // tokens of the draft, whose parents are random; 0: no tree
  bool alibi = false;
  bool sinks = false;
  bool lse = false;
  bool backward = false;  // all available gradients instead of O and LSE
  double weight = 1;      // relative share of the mix
};

// Words, separated by commas, in any order:
//   B1 H8 Hkv2 L1024 Lq1 Lk4096 D64 Dv128        sizes; also as B=1
//   dtype=float16|bfloat16|float32  layout=bhld|blhd|lhd  ragged
//   causal  window=LEFT:RIGHT  top-left          mask; -1 = no bound
//   scale=X softcap=X bias alibi sinks lse       terms of the scores, and the log-sum-exp
//   bits                                         a mask of random bits; not with bias
//   tree=T                                       the last T tokens are a random tree; likewise
//   dropout=P                                    a weight is dropped with this probability
//   backward                                     gradients instead of O
//   kernel=NAME  weight=X
Result<CallSpec> ParseCallSpec(const std::string& text);
// All words, with values.
inline constexpr char kCallWords[] =
    "B1,H8,Hkv8,L128,Lk128,D64,Dv64,dtype=float32,layout=bhld,ragged,causal,window=L:R,top-left,"
    "scale=X,softcap=X,bias,bits,tree=T,alibi,sinks,lse,dropout=P,backward,kernel=NAME,weight=1";

// The layout named "bhld", "blhd" or "lhd".
std::optional<v1::Layout> ParseLayout(std::string_view name);
v1::Mask::Kind MaskKind(bool causal, bool windowed, bool top_left);

// Reads a JSON file: an array, or an object with an array "shapes", of such strings or of objects
// with the same words as keys: {"B": 1, "H": 8, "L": 1024, "causal": true, "weight": 3}.
Result<std::vector<CallSpec>> ReadMix(const std::string& path);

// Subtracts the input bytes of `calls` such calls from `*bytes_max`. INVALID_ARGUMENT if they may
// exceed it.
Status TakeInputBytes(const CallSpec& spec, int64_t calls, int64_t* bytes_max);

// The call, with tensors drawn from `seed` with mean 0 and variance 1. A gradient call lacks O and
// LSE (forward_pass.h).
Result<AttentionCall> MakeRandomCall(const CallSpec& spec, uint64_t seed);

}  // namespace attend::client
