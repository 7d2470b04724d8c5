// SPDX-License-Identifier: Apache-2.0
//
// Validates the values of settings. Each Check takes a value and returns what is wrong with it, or
// an empty string; it may normalise the value. Pure.

#pragma once

#include <string>
#include <vector>

namespace attend {

// The parts between commas. An empty list has one part, which is empty.
std::vector<std::string> Split(const std::string& list);

// HOST:PORT or unix:PATH.
std::string CheckAddress(std::string& address);
// A collector: HOST:PORT, http://HOST:PORT, which is the same and becomes it, https://HOST:PORT or
// unix:PATH.
std::string CheckCollector(std::string& endpoint);
// An octal mode.
std::string CheckSocketMode(std::string& mode);
// What metadata, logs and tables take as a name: letters, digits, ".", "_" and "-".
std::string CheckServerId(std::string& id);
// HOST:PORT or off.
std::string CheckMetricsAddress(std::string& address);
// auto | cpu | cuda:all | a list of cuda:N and cpu; "cuda:0,1" is short for "cuda:0,cuda:1".
std::string CheckDevice(std::string& list);
// off | all | sample:P.
std::string CheckReferenceCheck(std::string& mode);
// The fraction of requests that a valid mode selects.
double SampleOf(const std::string& mode);
// The beginning of a key of shm_open: a slash, and perhaps a part of a name.
std::string CheckKeyPrefix(std::string& prefix);
// NAME=WEIGHT.
std::string CheckTenant(std::string& text);

}  // namespace attend
