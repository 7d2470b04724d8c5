/* SPDX-License-Identifier: Apache-2.0
 *
 * served_c HOST:PORT: one attention on a server, through the client's C interface. All values of V
 * are equal, so every output is that value.
 */

#include <attend/attend_client.h>
#include <math.h>
#include <stdio.h>

enum { kHeads = 8, kLength = 256, kDim = 64, kCount = kHeads * kLength * kDim };

static int Fail(const char* message) {
  fprintf(stderr, "served_c: %s\n", message);
  return 1;
}

/* [1, kHeads, kLength, kDim] of float32. */
static attend_client_tensor Tensor(const float* values) {
  attend_client_tensor tensor = {values, ATTEND_CLIENT_FLOAT32, 4, {1, kHeads, kLength, kDim}};
  return tensor;
}

/* Fails if an output differs by more than rounding of a mean of kLength equal values, or is NaN. */
static int Check(const attend_client_answer* answer) {
  const float* o = answer->o.data;
  const float allowed = kLength * 0x1p-24F;
  float worst = 0;
  if (answer->code != ATTEND_CLIENT_OK) return Fail(answer->message);
  for (int i = 0; i < kCount; ++i) {
    const float error = fabsf(o[i] - 0.75F);
    if (!(error <= worst)) worst = error;
  }
  printf("%s on %s: off by %.1e at most, %.1e allowed\n", answer->kernel, answer->device, worst,
         allowed);
  return worst <= allowed ? 0 : 1;
}

/* Tensors are sent without a copy, so they must stay in place until the call has ended. */
static int Call(attend_client* client, const float* q, const float* k, const float* v) {
  attend_client_params params = {.struct_bytes = sizeof(params)};
  attend_client_answer answer = {.struct_bytes = sizeof(answer)};
  attend_client_call* call = NULL;
  int32_t ended = 0;
  int failed;
  params.request = "mask { kind: KIND_CAUSAL_BOTTOM_RIGHT }";
  params.q = Tensor(q);
  params.k = Tensor(k);
  params.v = Tensor(v);
  params.timeout_ns = 10000000000;
  if (attend_client_start(client, &params, &call) != ATTEND_CLIENT_OK) {
    return Fail(attend_client_last_error());
  }
  attend_client_wait(call, /*timeout_ns=*/-1, &ended);
  failed = attend_client_get(call, &answer) != ATTEND_CLIENT_OK ? Fail(attend_client_last_error())
                                                                : Check(&answer);
  attend_client_call_free(call);
  return failed;
}

int main(int argc, char** argv) {
  static float q[kCount], k[kCount], v[kCount];
  attend_client_options options = {.struct_bytes = sizeof(options)};
  attend_client* client = NULL;
  int failed;
  for (int i = 0; i < kCount; ++i) {
    q[i] = sinf((float)i);
    k[i] = cosf((float)i);
    v[i] = 0.75F;
  }
  if (argc > 1) options.server = argv[1];
  if (attend_client_open(&options, &client) != ATTEND_CLIENT_OK) {
    return Fail(attend_client_last_error());
  }
  failed = Call(client, q, k, v);
  attend_client_close(client);
  return failed;
}
