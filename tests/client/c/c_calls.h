// SPDX-License-Identifier: Apache-2.0
//
// A server in its own process, calls of the C interface, and their expected answers.

#pragma once

#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "client/c/attend_client.h"

extern char** environ;

namespace attend::client::c::test {

namespace fs = std::filesystem;

constexpr int64_t kRows = 20, kDim = 8;
constexpr char kGradients[] = "backward { wanted: [TENSOR_NAME_D_Q, TENSOR_NAME_D_V] }";

class Server {
 public:
  Server() {
    std::string pattern = fs::temp_directory_path() / "attend-client-c-XXXXXX";
    folder_ = mkdtemp(pattern.data());
    address_ = "unix:" + folder_ + "/grpc.sock";
    const std::string ready = folder_ + "/ready.json";
    std::vector<std::string> words = {ATTEND_SERVER_BINARY,
                                      "--listen",
                                      address_,
                                      "--metrics-listen",
                                      "off",
                                      "--device",
                                      "cpu",
                                      "--ready-file",
                                      ready,
                                      "--shared-memory",
                                      "--shared-memory-socket",
                                      folder_ + "/shm.sock",
                                      "--log-file",
                                      folder_ + "/log"};
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    EXPECT_EQ(posix_spawn(&pid_, ATTEND_SERVER_BINARY, nullptr, nullptr, argv.data(), environ), 0);
    while (!fs::exists(ready) && waitpid(pid_, nullptr, WNOHANG) == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    EXPECT_TRUE(fs::exists(ready));
  }
  ~Server() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    fs::remove_all(folder_);
  }
  const char* address() const { return address_.c_str(); }

 private:
  std::string folder_, address_;
  pid_t pid_ = -1;
};

inline Server& TheServer() {
  static Server server;
  return server;
}

inline attend_client* Open(int32_t connections = 2) {
  attend_client_options options = {};
  options.struct_bytes = sizeof(options);
  options.server = TheServer().address();
  options.connections = connections;
  attend_client* client = nullptr;
  EXPECT_EQ(attend_client_open(&options, &client), ATTEND_CLIENT_OK) << attend_client_last_error();
  return client;
}

inline std::vector<float> Numbers(int64_t count, float step) {
  std::vector<float> numbers(count);
  for (int64_t i = 0; i < count; ++i) numbers[i] = std::sin(step * static_cast<float>(i));
  return numbers;
}

inline attend_client_tensor Tensor(const std::vector<float>& data, int64_t heads, int64_t rows,
                                   int64_t dim) {
  attend_client_tensor tensor = {};
  tensor.data = data.data();
  tensor.dtype = ATTEND_CLIENT_FLOAT32;
  tensor.dims = 4;
  const int64_t shape[] = {1, heads, rows, dim};
  std::copy(std::begin(shape), std::end(shape), tensor.shape);
  return tensor;
}

// One head, or more of any length.
struct Case {
  explicit Case(int64_t heads = 1, int64_t rows = kRows, int64_t dim = kDim)
      : q(Numbers(heads * rows * dim, 0.7f)),
        k(Numbers(heads * rows * dim, 0.3f)),
        v(Numbers(heads * rows * dim, 0.9f)) {
    params.struct_bytes = sizeof(params);
    params.q = Tensor(q, heads, rows, dim);
    params.k = Tensor(k, heads, rows, dim);
    params.v = Tensor(v, heads, rows, dim);
    params.request = "return_lse: true";
  }
  std::vector<float> q, k, v;
  attend_client_params params = {};
};

// A call that may or may not have ended.
class Call {
 public:
  explicit Call(attend_client_call* call) : call_(call) {}
  ~Call() { attend_client_call_free(call_); }
  Call(const Call&) = delete;
  attend_client_call* get() { return call_; }
  bool Wait(int64_t timeout_ns = -1) {
    int32_t ended = 0;
    EXPECT_EQ(attend_client_wait(call_, timeout_ns, &ended), ATTEND_CLIENT_OK);
    return ended != 0;
  }
  attend_client_answer Answer() {
    EXPECT_TRUE(Wait());
    attend_client_answer answer = {};
    answer.struct_bytes = sizeof(answer);
    EXPECT_EQ(attend_client_get(call_, &answer), ATTEND_CLIENT_OK);
    return answer;
  }

 private:
  attend_client_call* const call_;
};

inline attend_client_call* Start(attend_client* client, const attend_client_params& params) {
  attend_client_call* call = nullptr;
  EXPECT_EQ(attend_client_start(client, &params, &call), ATTEND_CLIENT_OK)
      << attend_client_last_error();
  return call;
}

// O of one head in double precision.
inline std::vector<float> Right(const Case& c, bool causal) {
  std::vector<float> o(c.v.size());
  for (int64_t i = 0; i < kRows; ++i) {
    std::vector<double> weights(kRows);
    double total = 0;
    for (int64_t j = 0; j < (causal ? i + 1 : kRows); ++j) {
      double score = 0;
      for (int64_t d = 0; d < kDim; ++d) score += double{c.q[i * kDim + d]} * c.k[j * kDim + d];
      total += weights[j] = std::exp(score / std::sqrt(double{kDim}));
    }
    for (int64_t d = 0; d < kDim; ++d) {
      double sum = 0;
      for (int64_t j = 0; j < kRows; ++j) sum += weights[j] / total * c.v[j * kDim + d];
      o[i * kDim + d] = static_cast<float>(sum);
    }
  }
  return o;
}

inline void ExpectClose(const float* got, const std::vector<float>& right) {
  for (size_t i = 0; i < right.size(); ++i) ASSERT_NEAR(got[i], right[i], 2e-6) << i;
}

inline void ExpectSays(const char* words) {
  EXPECT_NE(std::string(attend_client_last_error()).find(words), std::string::npos)
      << attend_client_last_error();
}

}  // namespace attend::client::c::test
