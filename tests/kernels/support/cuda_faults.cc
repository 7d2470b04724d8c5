// SPDX-License-Identifier: Apache-2.0

#include "tests/kernels/support/cuda_faults.h"

#include <atomic>
#include <cstring>
#include <utility>

namespace attend::test {
namespace {

std::atomic<const char*> wanted{nullptr};
std::atomic<int64_t> left{0};
std::atomic<cudaError_t> wanted_error{cudaSuccess};
std::atomic<bool> met{false};
// Sets the error that cudaGetLastError then returns, as after a call that CUDA refused.
thread_local cudaError_t last_error = cudaSuccess;

bool Fails(const char* function) {
  const char* const fails = wanted.load(std::memory_order_acquire);
  if (fails == nullptr || std::strcmp(fails, function) != 0) return false;
  if (left.fetch_sub(1) != 1) return false;
  met = true;
  last_error = wanted_error;
  return true;
}

}  // namespace

void FailCudaCall(const std::string& function, int64_t n, cudaError_t error) {
  wanted = nullptr;
  left = n;
  met = false;
  wanted_error = error;
  for (const std::string& each : WrappedCudaCalls()) {
    if (each == function && n > 0) wanted = each.c_str();
  }
}

bool CudaFaultWasMet() { return met; }

}  // namespace attend::test

// The name, its parameters and the arguments that they are passed on as.
#define ATTEND_WRAPPED(X)                                                                         \
  X(cudaDeviceGetAttribute, (int* a, cudaDeviceAttr b, int c), (a, b, c))                         \
  X(cudaEventCreate, (cudaEvent_t * a), (a))                                                      \
  X(cudaEventCreateWithFlags, (cudaEvent_t * a, unsigned b), (a, b))                              \
  X(cudaEventElapsedTime, (float* a, cudaEvent_t b, cudaEvent_t c), (a, b, c))                    \
  X(cudaEventQuery, (cudaEvent_t a), (a))                                                         \
  X(cudaEventRecord, (cudaEvent_t a, cudaStream_t b), (a, b))                                     \
  X(cudaFuncGetAttributes, (cudaFuncAttributes * a, const void* b), (a, b))                       \
  X(cudaFuncSetAttribute, (const void* a, cudaFuncAttribute b, int c), (a, b, c))                 \
  X(cudaGetDevice, (int* a), (a))                                                                 \
  X(cudaHostAlloc, (void** a, size_t b, unsigned c), (a, b, c))                                   \
  X(cudaLaunchKernel, (const void* a, dim3 b, dim3 c, void** d, size_t e, cudaStream_t f),        \
    (a, b, c, d, e, f))                                                                           \
  X(cudaLaunchKernelExC, (const cudaLaunchConfig_t* a, const void* b, void** c), (a, b, c))       \
  X(cudaMalloc, (void** a, size_t b), (a, b))                                                     \
  X(cudaMallocFromPoolAsync, (void** a, size_t b, cudaMemPool_t c, cudaStream_t d), (a, b, c, d)) \
  X(cudaMemcpyAsync, (void* a, const void* b, size_t c, cudaMemcpyKind d, cudaStream_t e),        \
    (a, b, c, d, e))                                                                              \
  X(cudaMemsetAsync, (void* a, int b, size_t c, cudaStream_t d), (a, b, c, d))                    \
  X(cudaPointerGetAttributes, (cudaPointerAttributes * a, const void* b), (a, b))                 \
  X(cudaSetDevice, (int a), (a))                                                                  \
  X(cudaStreamCreateWithPriority, (cudaStream_t * a, unsigned b, int c), (a, b, c))               \
  X(cudaStreamIsCapturing, (cudaStream_t a, cudaStreamCaptureStatus * b), (a, b))                 \
  X(cudaStreamQuery, (cudaStream_t a), (a))                                                       \
  X(cudaStreamSynchronize, (cudaStream_t a), (a))                                                 \
  X(cudaStreamWaitEvent, (cudaStream_t a, cudaEvent_t b, unsigned c), (a, b, c))

#define ATTEND_WRAP(name, parameters, arguments)                          \
  extern "C" cudaError_t __real_##name parameters;                        \
  extern "C" cudaError_t __wrap_##name parameters {                       \
    return attend::test::Fails(#name) ? attend::test::wanted_error.load() \
                                      : __real_##name arguments;          \
  }
ATTEND_WRAPPED(ATTEND_WRAP)

extern "C" cudaError_t __real_cudaGetLastError();
extern "C" cudaError_t __wrap_cudaGetLastError() {
  const cudaError_t real = __real_cudaGetLastError();
  const cudaError_t mine = std::exchange(attend::test::last_error, cudaSuccess);
  return mine != cudaSuccess ? mine : real;
}

#define ATTEND_NAME(name, parameters, arguments) #name,
const std::vector<std::string>& attend::test::WrappedCudaCalls() {
  static const std::vector<std::string> names = {ATTEND_WRAPPED(ATTEND_NAME)};
  return names;
}
