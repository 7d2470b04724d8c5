// SPDX-License-Identifier: Apache-2.0
//
// Messages in pieces, as a transport receives them.

#pragma once

#include <algorithm>
#include <cstddef>
#include <random>
#include <string>
#include <string_view>

#include "server/util/message.h"

namespace attend::test {

// The bytes in owned pieces of random sizes, at most `longest`.
inline InMessage InPieces(std::string_view bytes, std::mt19937_64& random, size_t longest) {
  InMessage message;
  while (!bytes.empty()) {
    const size_t step = std::min<size_t>(1 + random() % longest, bytes.size());
    message.pieces.push_back(OutMessage::PieceOf(std::string(bytes.substr(0, step))));
    bytes.remove_prefix(step);
  }
  return message;
}

}  // namespace attend::test
