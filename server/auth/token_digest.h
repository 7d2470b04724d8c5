// SPDX-License-Identifier: Apache-2.0
//
// Only SHA-256 digests of tokens are stored. Tokens are meant to have 256 random bits, so a digest
// cannot be inverted by guessing, and a slow password hash would only cost time.

#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

namespace attend {

using TokenDigest = std::array<uint8_t, 32>;

// Throws std::bad_alloc if there is no memory for the hash's state.
TokenDigest DigestOf(std::string_view token);

// The index of the last digest equal to `wanted`; -1 if none. Reads every byte of every digest, so
// that the time reveals nothing about them.
int FindDigest(std::span<const TokenDigest> digests, const TokenDigest& wanted);

}  // namespace attend
