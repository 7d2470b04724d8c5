/* SPDX-License-Identifier: Apache-2.0
 *
 * A call by a program in C: the header is C, and one include is enough.
 */

#include "tests/client/c/plain_c.h"

#include <string.h>

#include "client/c/attend_client.h"

static attend_client_tensor Tensor(const float* data, int64_t rows, int64_t dim) {
  attend_client_tensor tensor;
  memset(&tensor, 0, sizeof(tensor));
  tensor.data = data;
  tensor.dtype = ATTEND_CLIENT_FLOAT32;
  tensor.dims = 4;
  tensor.shape[0] = tensor.shape[1] = 1;
  tensor.shape[2] = rows;
  tensor.shape[3] = dim;
  return tensor;
}

int32_t PlainAttention(const char* server, const float* q, const float* k, const float* v,
                       int64_t rows, int64_t dim, float* o) {
  attend_client_options options;
  memset(&options, 0, sizeof(options));
  options.struct_bytes = sizeof(options);
  options.server = server;
  attend_client* client = NULL;
  int32_t code = attend_client_open(&options, &client);
  if (code != ATTEND_CLIENT_OK) return code;

  attend_client_params params;
  memset(&params, 0, sizeof(params));
  params.struct_bytes = sizeof(params);
  params.q = Tensor(q, rows, dim);
  params.k = Tensor(k, rows, dim);
  params.v = Tensor(v, rows, dim);
  params.request = "mask { kind: KIND_CAUSAL_BOTTOM_RIGHT }";
  attend_client_call* call = NULL;
  code = attend_client_start(client, &params, &call);
  if (code == ATTEND_CLIENT_OK) {
    int32_t ended = 0;
    attend_client_wait(call, -1, &ended);
    attend_client_answer answer;
    memset(&answer, 0, sizeof(answer));
    answer.struct_bytes = sizeof(answer);
    attend_client_get(call, &answer);
    code = answer.code;
    if (code == ATTEND_CLIENT_OK) memcpy(o, answer.o.data, (size_t)(rows * dim) * sizeof(float));
    attend_client_call_free(call);
  }
  attend_client_close(client);
  return code;
}
