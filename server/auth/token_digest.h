// SPDX-License-Identifier: Apache-2.0
//
// Tokens are known by their SHA-256 alone: they have 256 random bits, so nobody finds a token for a
// hash, and a slow hash for passwords would only cost time.

#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

namespace attend {

using TokenDigest = std::array<uint8_t, 32>;

// Throws std::bad_alloc if there is no memory for the hash's state.
TokenDigest DigestOf(std::string_view token);

// The index of the last digest that equals `wanted`; -1: none does. Looks at every byte of every
// digest, whatever they are, so that the time says nothing of what is there.
int FindDigest(std::span<const TokenDigest> digests, const TokenDigest& wanted);

}  // namespace attend
