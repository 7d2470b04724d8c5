// SPDX-License-Identifier: Apache-2.0
//
// Clients of grpc.health.v1 and of server reflection, written by hand: Debian ships no generated
// classes for either, and their messages have two fields.

#pragma once

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <vector>

namespace attend::test {

// Values of grpc.health.v1.HealthCheckResponse.ServingStatus, and kFailed for no answer.
enum class Health { kUnknown = 0, kServing = 1, kNotServing = 2, kServiceUnknown = 3, kFailed };

Health CheckHealth(const std::shared_ptr<grpc::Channel>& channel, const std::string& service);

// A stream whose methods block until they are done. `method` takes one message and answers with
// many.
class BytesStream {
 public:
  BytesStream(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
              const std::string& request);
  ~BytesStream();  // cancels
  // False at the end of the stream.
  bool Read(std::string* message);

 private:
  bool WaitForTag();

  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::GenericStub> stub_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
};

std::vector<std::string> ListServices(const std::shared_ptr<grpc::Channel>& channel);

}  // namespace attend::test
