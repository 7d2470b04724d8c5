// SPDX-License-Identifier: Apache-2.0
//
// Shared by the fuzz targets. An input that stands for messages is a list of records: a length of
// two bytes, little-endian, and as many bytes. A length beyond the end of the input is cut to it.
// Random decisions of a target are seeded with the input's bytes, so that the input alone
// reproduces a finding.

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

// Aborts the process, which libFuzzer reports, unless `condition` holds; prints `detail`.
#define ATTEND_FUZZ_REQUIRE(condition, detail)                                        \
  do {                                                                                \
    if (!(condition)) ::attend::fuzz::Fail(#condition, __FILE__, __LINE__, (detail)); \
  } while (false)
[[noreturn]] void Fail(const char* what, const char* file, int line, const std::string& detail);

// Requires one of these codes and a message.
void RequireRefusal(const Status& status, std::initializer_list<Code> codes);

inline std::string_view View(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

// Seeded with a hash of the input.
std::mt19937_64 RandomOf(std::string_view input);

std::vector<std::string> Records(std::string_view input);
std::string Join(const std::vector<std::string>& records);

// The bytes in pieces of random sizes, as gRPC's and as the transport's type.
grpc::ByteBuffer Buffer(std::string_view bytes, std::mt19937_64& random);
InMessage Message(std::string_view bytes, std::mt19937_64& random);

// Peak of the heap memory allocated since the construction, by all threads.
class MemoryPeak {
 public:
  MemoryPeak();
  int64_t bytes() const;

 private:
  int64_t before_;
};

// Changes a random field of the message or of a nested message.
void MutateMessage(google::protobuf::Message& message, std::mt19937_64& random);

// For LLVMFuzzerCustomMutator: changes records as messages or as bytes, and their number and order.
// `make(i)` returns an empty message of record i's type; `fit` may make the fields of a changed
// message consistent.
using MakeMessage = std::function<std::unique_ptr<google::protobuf::Message>(size_t)>;
using FitMessage = std::function<void(google::protobuf::Message&, std::mt19937_64&)>;
size_t MutateRecords(uint8_t* data, size_t size, size_t size_max, unsigned seed,
                     const MakeMessage& make, const FitMessage& fit = {});

// recv() that is repeated on EINTR: libFuzzer's alarm interrupts it on sockets with a timeout.
ssize_t Receive(int socket, void* bytes, size_t size);

}  // namespace attend::fuzz

// Defined by libFuzzer.
extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t size_max);
