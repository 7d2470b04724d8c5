/* SPDX-License-Identifier: Apache-2.0
 *
 * Functions of plain_c.c for the test in C++.
 */

#ifndef ATTEND_TESTS_PLAIN_C_H_
#define ATTEND_TESTS_PLAIN_C_H_

#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

/* Causal attention of one head: q, k, v and o have [rows, dim]. A code of ATTEND_CLIENT_OK, .... */
int32_t PlainAttention(const char* server, const float* q, const float* k, const float* v,
                       int64_t rows, int64_t dim, float* o);

#if defined(__cplusplus)
} /* extern "C" */
#endif

#endif /* ATTEND_TESTS_PLAIN_C_H_ */
