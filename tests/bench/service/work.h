// SPDX-License-Identifier: Apache-2.0
//
// One request, ready to be sent, and what its right answer is.

#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <memory>
#include <string>

#include "client/call/attention_call.h"
#include "client/wire/message_codec.h"
#include "tests/kernels/support/problems.h"

namespace attend::bench {

// What an answer is held against.
enum class Truth {
  kAttention,  // double precision
  kMarks,      // what the pass-through device writes
};

// Thread-safe once it is admitted.
class Work {
 public:
  Work(std::string name, const test::ProblemSpec& spec, Truth truth, uint64_t seed);

  const std::string& name() const { return name_; }
  // An AttendRequest over this object's memory, which must outlive the call.
  grpc::ByteBuffer Message(const std::string& request_id = "bench") const;
  // The same for the client library; borrows.
  const client::AttentionCall& call() const { return call_; }
  const test::OwnedAttention& owned() const { return *owned_; }
  int64_t input_bytes() const { return client::PayloadBytes(call_); }
  int64_t output_bytes() const { return output_bytes_; }  // of O

  // Judges the O of an answer in full. Empty: right.
  std::string CheckOutput(const void* o) const;
  // Takes an AttendResponse as the pattern that further answers are compared with, if it is right.
  Status Admit(grpc::ByteBuffer& answer);
  int64_t answer_bytes() const { return answer_bytes_; }  // of the admitted message
  // Once admitted. Looks for an O of the right length, and at its bytes if `bytes_too`. An answer
  // that differs from the pattern is judged in full. Empty: right.
  std::string CheckAnswer(const grpc::ByteBuffer& answer, bool bytes_too) const;
  // The same for an answer whose O was to be written to `o`.
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
  std::string pattern_;  // the tag and length before O, then O, or as much of it as is defined
  int64_t prefix_bytes_ = 0;
  int64_t answer_bytes_ = 0;
};

}  // namespace attend::bench
