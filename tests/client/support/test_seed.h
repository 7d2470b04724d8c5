// SPDX-License-Identifier: Apache-2.0
//
// A fresh seed for every run of a test, printed when it fails; and a folder of the process's own.

#pragma once

#include <gtest/gtest.h>

#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <random>
#include <string>
#include <system_error>

namespace attend::client {

inline uint64_t FreshSeed() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

// A file in a folder that no other run of any test uses; removed with the process.
inline std::string ScratchPath(const std::string& name) {
  struct Folder {
    Folder() {
      path = ::testing::TempDir() + "/attend-client-XXXXXX";
      if (mkdtemp(path.data()) == nullptr) abort();
    }
    ~Folder() {
      std::error_code ignored;
      std::filesystem::remove_all(path, ignored);
    }
    std::string path;
  };
  static const Folder folder;
  return folder.path + "/" + name;
}

}  // namespace attend::client

// Declares `seed` and shows it with every later failure.
#define ATTEND_FRESH_SEED(seed)                        \
  const uint64_t seed = ::attend::client::FreshSeed(); \
  SCOPED_TRACE(::testing::Message() << "seed " << seed)
