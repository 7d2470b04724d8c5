// SPDX-License-Identifier: Apache-2.0
//
// A prepared request, and the check of its answer.

#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <memory>
#include <string>

#include "client/call/attention_call.h"
#include "client/wire/message_codec.h"
#include "tests/kernels/support/problems.h"

namespace attend::bench {

// The truth that an answer is compared with.
enum class Truth {
  kAttention,  // double precision
  kMarks,      // the marks of the pass-through device
};

// Thread-safe once admitted.
class Work {
 public:
  Work(std::string name, const test::ProblemSpec& spec, Truth truth, uint64_t seed);

  const std::string& name() const { return name_; }
  // An AttendRequest that refers to this object's memory, which must outlive the call.
  grpc::ByteBuffer Message(const std::string& request_id = "bench") const;
  // The same for the client library; refers to this object's memory.
  const client::AttentionCall& call() const { return call_; }
  const test::OwnedAttention& owned() const { return *owned_; }
  int64_t input_bytes() const { return client::PayloadBytes(call_); }
  int64_t output_bytes() const { return output_bytes_; }  // of O

  // Checks O in full. Returns what is wrong, or "".
  std::string CheckOutput(const void* o) const;
  // Checks an AttendResponse and keeps it as the pattern for further answers.
  Status Admit(grpc::ByteBuffer& answer);
  int64_t answer_bytes() const { return answer_bytes_; }  // of the admitted message
  // Only once admitted. Checks the length of O, and its bytes if `bytes_too`. An answer that
  // differs from the pattern is checked in full. Returns what is wrong, or "".
  std::string CheckAnswer(const grpc::ByteBuffer& answer, bool bytes_too) const;
  // The same for an answer whose O was written to `o`.
  std::string CheckPlacedAnswer(const grpc::ByteBuffer& answer, const void* o,
                                bool bytes_too) const;

 private:
  bool EndsAsPattern(const grpc::ByteBuffer& answer, bool bytes_too) const;
  std::string CheckFully(const grpc::ByteBuffer& answer, std::string* o) const;

  const std::string name_;
  const Truth truth_;
  const std::shared_ptr<const test::OwnedAttention> owned_;
  int64_t output_bytes_ = 0;
  client::AttentionCall call_;
  std::shared_ptr<const client::EncodedCall> encoded_;
  std::string pattern_;  // tag and length of O, then O, or the part of it that is defined
  int64_t prefix_bytes_ = 0;
  int64_t answer_bytes_ = 0;
};

}  // namespace attend::bench
