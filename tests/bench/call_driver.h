// SPDX-License-Identifier: Apache-2.0
//
// Drives one unary method with ready-made bytes from a fixed number of calls in flight, and counts.
// Does as little per call as gRPC allows, so that what is measured is the server and the wire.

#pragma once

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace attend::bench {

struct DriveOptions {
  std::string target;
  std::string method;
  int outstanding = 1;
  int connections = 1;
  double seconds = 1.0;
};

struct DriveResult {
  int64_t calls = 0;
  int64_t failed = 0;
  std::string first_error;
  double seconds = 0;
  double p50_us = 0;
  double p99_us = 0;

  double calls_per_second() const { return static_cast<double>(calls) / seconds; }
};

// Looks at an answer; an empty string means it is right.
using Verify = std::function<std::string(grpc::ByteBuffer&)>;

// Connections that stay open between drives of the same target.
class Connections {
 public:
  Connections(const std::string& target, int count);
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer>& stub(int index);
  int count() const { return static_cast<int>(stubs_.size()); }

 private:
  std::vector<std::unique_ptr<grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer>>>
      stubs_;
};

// Calls `method` with `request` for `options.seconds`. Every answer is counted by its status; one
// in `verify_every` is given to `verify` (which may take it apart).
DriveResult Drive(Connections& connections, const DriveOptions& options,
                  const grpc::ByteBuffer& request, const Verify& verify, int verify_every);

}  // namespace attend::bench
