// SPDX-License-Identifier: Apache-2.0
//
// Validators of settings. Each Check returns an error text, or an empty string if the value is
// valid; it may normalise the value. Pure.

#pragma once

#include <string>
#include <vector>

namespace attend {

// The parts between commas. An empty list has one empty part.
std::vector<std::string> Split(const std::string& list);

// HOST:PORT or unix:PATH.
std::string CheckAddress(std::string& address);
// A collector: HOST:PORT, http://HOST:PORT (normalised to HOST:PORT), https://HOST:PORT or
// unix:PATH.
std::string CheckCollector(std::string& endpoint);
// An octal mode.
std::string CheckSocketMode(std::string& mode);
// A name safe in metadata, logs and tables: letters, digits, ".", "_" and "-".
std::string CheckServerId(std::string& id);
// HOST:PORT or off.
std::string CheckMetricsAddress(std::string& address);
// auto | cpu | cuda:all | a list of cuda:N and cpu; "cuda:0,1" is short for "cuda:0,cuda:1".
std::string CheckDevice(std::string& list);
// off | all | sample:P.
std::string CheckReferenceCheck(std::string& mode);
// The share of requests that a valid mode checks.
double SampleOf(const std::string& mode);
// The prefix of a shm_open key: a slash, optionally followed by the start of a name.
std::string CheckKeyPrefix(std::string& prefix);
// NAME=WEIGHT.
std::string CheckTenant(std::string& text);

}  // namespace attend
