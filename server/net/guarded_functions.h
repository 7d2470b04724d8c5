// SPDX-License-Identifier: Apache-2.0
//
// The functions of libraries that this process has others in front of (guarded_*.cc). Those hand
// over to the libraries' own, which another build of a library may lack.

#pragma once

#include <span>

#include "kernels/util/status.h"

// grpc_core::chttp2::StreamFlowControl::IncomingUpdateContext::RecvData, whose class no header of
// Debian's declares.
#define ATTEND_RECV_DATA "_ZN9grpc_core6chttp217StreamFlowControl21IncomingUpdateContext8RecvDataEl"

namespace attend {

inline constexpr const char* kGuardedFunctions[] = {
    ATTEND_RECV_DATA,     "SSL_new",  "BIO_new_bio_pair", "SSL_do_handshake",
    "SSL_session_reused", "SSL_read", "SSL_write",        "grpc_auth_context_add_cstring_property"};

// UNIMPLEMENTED names one of these that no library has: a call of it would end the process.
Status CheckFunctions(std::span<const char* const> names);

}  // namespace attend
