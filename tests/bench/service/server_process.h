// SPDX-License-Identifier: Apache-2.0
//
// A server in a process of its own, so that it shares neither memory nor threads with the client.
//
// Parent and child speak by two pipes: the child's first line of output is "ready ADDRESS" (or
// "ready ADDRESS METRICS_ADDRESS"), or "cannot REASON"; it ends when its input does, which is also
// when the parent is gone.

#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "kernels/util/status.h"

namespace attend::bench {

class ServerProcess {
 public:
  // Waits for the first line, as long as `timeout_seconds`. UNIMPLEMENTED with the reason of a
  // child that cannot serve on this machine, UNAVAILABLE if it did not start.
  static Result<std::unique_ptr<ServerProcess>> Start(const std::vector<std::string>& command,
                                                      double timeout_seconds = 120);
  ~ServerProcess();  // kills it
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  const std::string& address() const { return address_; }
  // Processor time that it has used so far; 0 once it is gone.
  double ProcessorSeconds() const;
  const std::string& metrics_address() const { return metrics_address_; }  // empty: none

 private:
  ServerProcess(pid_t pid, int input, int output) : pid_(pid), input_(input), output_(output) {}
  Status ReadFirstLine(double timeout_seconds);

  const pid_t pid_;
  const int input_;   // of the child
  const int output_;  // of the child
  std::string address_;
  std::string metrics_address_;
};

// This program as `--serve KIND ARGUMENTS...` (serve.h).
std::vector<std::string> ServeCommand(const std::string& kind,
                                      const std::vector<std::string>& arguments);

}  // namespace attend::bench
