// SPDX-License-Identifier: Apache-2.0
//
// A client of bench_sessions: a session with a prompt, and the tokens that it appends.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "client/client.h"
#include "client/session.h"

namespace attend::bench {

// Ends the program.
[[noreturn]] void Fail(const std::string& what);
template <class T>
T Take(Result<T> result, const char* what) {
  if (!result.ok()) Fail(std::string(what) + ": " + result.status().ToString());
  return *std::move(result);
}

// Random bfloat16 numbers of magnitude 0.5 to 2.
client::HostTensor RandomBFloat16(std::mt19937_64& random, std::vector<int64_t> shape);

struct SequenceShape {
  int64_t context = 4096;  // tokens of the prompt
  int64_t heads_q = 32, heads_kv = 8, dim = 128;
};

// A client's sequence: the tokens that it appends in turn, and the number of those appended.
class Sequence {
 public:
  Sequence(client::Client& client, const SequenceShape& shape, uint64_t seed);

  client::Session& session() { return session_; }
  int64_t context() const { return shape_.context; }
  // The next step's call.
  const client::AttentionCall& Step() { return tokens_[static_cast<size_t>(steps_++ % kTokens)]; }
  // Truncates the session to the prompt.
  void Truncate();
  // The prompt and one token, as a request without sessions.
  client::AttentionCall Whole() const;

 private:
  static constexpr int kTokens = 8;  // distinct tokens

  client::Session Open(client::Client& client) const;
  client::AttentionCall Call(int64_t rows_q, int64_t rows_k);
  template <class Of>
  client::HostTensor Joined(const std::vector<client::AttentionCall>& calls, const Of& of) const;

  const SequenceShape shape_;
  std::mt19937_64 random_;
  client::Session session_;
  std::vector<client::AttentionCall> tokens_, prompt_;
  int64_t steps_ = 0;
};

}  // namespace attend::bench
