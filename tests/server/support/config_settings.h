// SPDX-License-Identifier: Apache-2.0
//
// Settings with a value: for each, an accepted value and a refused one.

#pragma once

#include <functional>
#include <string>
#include <vector>

#include "server/app/config.h"

namespace attend::test {

struct Setting {
  std::string flag;
  std::string text;  // as written
  std::function<bool(const Config&)> holds;
  std::string bad;                       // a value that is refused; empty: all are accepted
  std::vector<std::string> beside = {};  // flags without which it is refused
  std::string variable = {};             // environment variable; empty: ATTEND_ and the flag
};

std::vector<Setting> Settings();

}  // namespace attend::test
