// SPDX-License-Identifier: Apache-2.0
//
// A server in a child process, so that it shares neither memory nor threads with the client.
//
// Parent and child communicate over two pipes: the child's first line of output is "ready ADDRESS"
// (or "ready ADDRESS METRICS_ADDRESS"), or "cannot REASON". The child ends at the end of its input,
// also if the parent dies.

#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "kernels/util/status.h"

namespace attend::bench {

class ServerProcess {
 public:
  // Waits up to `timeout_seconds` for the first line. UNIMPLEMENTED with the child's reason if it
  // cannot serve on this machine, UNAVAILABLE if it did not start.
  static Result<std::unique_ptr<ServerProcess>> Start(const std::vector<std::string>& command,
                                                      double timeout_seconds = 120);
  ~ServerProcess();  // kills the child
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  const std::string& address() const { return address_; }
  // Processor time used so far; 0 once the child has ended.
  double ProcessorSeconds() const;
  const std::string& metrics_address() const { return metrics_address_; }  // empty: none

 private:
  ServerProcess(pid_t pid, int input, int output) : pid_(pid), input_(input), output_(output) {}
  Status ReadFirstLine(double timeout_seconds);

  const pid_t pid_;
  const int input_;   // the child's stdin
  const int output_;  // the child's stdout
  std::string address_;
  std::string metrics_address_;
};

// The command line of this program with `--serve KIND ARGUMENTS...` (serve.h).
std::vector<std::string> ServeCommand(const std::string& kind,
                                      const std::vector<std::string>& arguments);

}  // namespace attend::bench
