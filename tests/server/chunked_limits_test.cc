// SPDX-License-Identifier: Apache-2.0
//
// What one AttendChunked request may take from others, and how a server says no.

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <thread>

#include "tests/server/chunked_client.h"
#include "tests/server/messages.h"
#include "tests/server/test_server.h"

namespace attend {
namespace {

using grpc::StatusCode;
using test::ChunkedHeader;
using test::ChunkedStreamClient;
using test::TestServer;
using test::WireProblem;

int64_t UsedBytes(TestServer& server) { return server.server().engine().host_pool().used_bytes(); }

struct Sizes {
  int64_t batch, heads_q, heads_kv, len_q, len_k, dim, dim_v;
};

v1::AttendRequest HeaderOf(const Sizes& s) {
  v1::AttendRequest header;
  const auto set = [](v1::Tensor* tensor, int64_t batch, int64_t heads, int64_t len, int64_t dim) {
    tensor->set_dtype(v1::DTYPE_FLOAT32);
    for (const int64_t size : {batch, heads, len, dim}) tensor->add_shape(size);
    tensor->mutable_chunked();
  };
  set(header.mutable_q(), s.batch, s.heads_q, s.len_q, s.dim);
  set(header.mutable_k(), s.batch, s.heads_kv, s.len_k, s.dim);
  set(header.mutable_v(), s.batch, s.heads_kv, s.len_k, s.dim_v);
  return header;
}

TEST(ChunkedLimitsTest, WhatCanNeverFitIsNotToldToTryAgain) {
  TestServer server;
  const Sizes cases[] = {
      {1 << 4, 1 << 8, 1 << 8, 1, 1 << 30, 64, 64},         // 2^51 bytes of tensors
      {1 << 15, 1 << 8, 1 << 8, 1, 1 << 30, 64, 64},        // above 2^62
      {1 << 20, 1 << 8, 1, 1 << 25, 1, 1, 192},             // 3 * 2^61 of answer
      {1 << 16, 1 << 8, 1, 1 << 28, 1 << 20, 255, 256},     // 2^62 each, rounded up
      {1 << 15, 1 << 8, 1 << 8, 1 << 30, 1 << 30, 64, 64},  // 3 * 2^61, and 2^61 of answer
  };
  for (const Sizes& sizes : cases) {
    ChunkedStreamClient client(server);
    ASSERT_TRUE(client.SendHeader(HeaderOf(sizes)));
    const grpc::Status status = client.Finish();
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
    EXPECT_NE(status.error_message().find("memory budget of 4294967296"), std::string::npos)
        << status.error_message();
    EXPECT_EQ(client.PushbackMs(), -1);
    EXPECT_EQ(UsedBytes(server), 0);
  }
}

}  // namespace
}  // namespace attend
