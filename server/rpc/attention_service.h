// SPDX-License-Identifier: Apache-2.0
//
// AttentionService.

#pragma once

#include "server/rpc/call_table.h"

namespace attend {

// Adds the service's methods.
void AddAttention(CallTable& table);

}  // namespace attend
