// SPDX-License-Identifier: Apache-2.0
//
// What the fuzz targets share. An input that stands for messages is a list of records, each its
// length in two bytes, low byte first, and its bytes; a length beyond the input's end means what is
// left. All else that a target decides at random it draws from the input's own bytes, so that an
// input alone is the whole of a finding.

#pragma once

#include <sys/types.h>

#include <google/protobuf/message.h>
#include <grpcpp/support/byte_buffer.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/util/status.h"
#include "server/util/message.h"

namespace attend::fuzz {

// Ends the process, which is a finding, unless `condition` holds; `detail` says more.
#define ATTEND_FUZZ_REQUIRE(condition, detail)                                        \
  do {                                                                                \
    if (!(condition)) ::attend::fuzz::Fail(#condition, __FILE__, __LINE__, (detail)); \
  } while (false)
[[noreturn]] void Fail(const char* what, const char* file, int line, const std::string& detail);

// A refusal says why, in one of these codes.
void RequireRefusal(const Status& status, std::initializer_list<Code> codes);

inline std::string_view View(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

// Of the input's bytes.
std::mt19937_64 RandomOf(std::string_view input);

std::vector<std::string> Records(std::string_view input);
std::string Join(const std::vector<std::string>& records);

// The bytes in pieces of random sizes: gRPC's, and the transport's.
grpc::ByteBuffer Buffer(std::string_view bytes, std::mt19937_64& random);
InMessage Message(std::string_view bytes, std::mt19937_64& random);

// Heap memory taken since the construction, at its most: of every thread, by malloc and new.
class MemoryPeak {
 public:
  MemoryPeak();
  int64_t bytes() const;

 private:
  int64_t before_;
};

// Changes a field, at random, of the message or of one inside it.
void MutateMessage(google::protobuf::Message& message, std::mt19937_64& random);

// For LLVMFuzzerCustomMutator: changes records as the messages that they are, or as bytes, and
// their number and order. `make(i)` is an empty message of record i's type; `fit` may make a
// changed one fit together.
using MakeMessage = std::function<std::unique_ptr<google::protobuf::Message>(size_t)>;
using FitMessage = std::function<void(google::protobuf::Message&, std::mt19937_64&)>;
size_t MutateRecords(uint8_t* data, size_t size, size_t size_max, unsigned seed,
                     const MakeMessage& make, const FitMessage& fit = {});

// recv, which libFuzzer's own alarm would else break off where a socket has a timeout.
ssize_t Receive(int socket, void* bytes, size_t size);

}  // namespace attend::fuzz

// libFuzzer's.
extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t size_max);
