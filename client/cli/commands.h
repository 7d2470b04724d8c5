// SPDX-License-Identifier: Apache-2.0
//
// The commands of attend-client. Each Add... puts a subcommand with its flags on the parser and
// returns what runs it after parsing; that returns the process's exit code: 0 good, 1 a call or a
// check failed, 2 a bad flag, value or file, 130 interrupted.

#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

#include "client/client.h"
#include "kernels/reference/check_rows.h"

namespace attend::client {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitInterrupted = 130;

// What all commands share.
struct CommonOptions {
  std::string server = "127.0.0.1:8001";
  int connections = 1;
  int completion_threads = 0;
  int attempts = 5;
  bool allocator_tuning = true;
};

using Command = std::function<int()>;

Command AddInfo(CLI::App& app, const CommonOptions& common);
Command AddRun(CLI::App& app, const CommonOptions& common);
Command AddCheck(CLI::App& app, const CommonOptions& common);
Command AddLoad(CLI::App& app, const CommonOptions& common);
Command AddReplay(CLI::App& app, const CommonOptions& common);

ClientOptions ClientOptionsOf(const CommonOptions& common);

// What --transport and --shared-memory-socket say.
struct TransportOptions {
  CallTransport transport = CallTransport::kAuto;
  bool shared_memory = false;  // cuda_ipc too
  bool cuda_ipc = false;
  std::string socket;  // empty: as the server says
};
// --transport and --shared-memory-socket for a command.
void AddTransport(CLI::App* command, TransportOptions* options);
// The socket to get shared memory from.
Result<std::string> SharedMemorySocket(const TransportOptions& options,
                                       const v1::GetServerInfoResponse& info);
// A connection to it; null unless --transport is shm.
Result<std::shared_ptr<SharedMemory>> ConnectShared(const TransportOptions& options,
                                                    const v1::GetServerInfoResponse& info);
// With cuda_ipc: the server's GPUs, by UUID.
Result<std::vector<std::string>> CudaDevices(const v1::GetServerInfoResponse& info);

// --tenant for a command, whose value goes to `tenant`.
void AddTenant(CLI::App* command, std::string* tenant);
// Says on stderr if the server counts it as another.
void WarnOfTenant(const std::string& tenant, const v1::GetServerInfoResponse& info);
// The same for a command that needs to know nothing else of the server; silent if it cannot ask.
void WarnOfTenant(const std::string& tenant, Client& client);

// Memory of this machine.
int64_t MachineMemoryBytes();

// "attend-client: <status>" on stderr; returns `exit_code`.
int Fail(const Status& status, int exit_code);

// "kernel cpu_flash on cpu, batch of 1, server total 1.234 ms (queue 0.012, kernel 1.100)".
std::string DescribeAnswer(const AttentionResult& result);
// "ok: max error 1.2e-07, bound 3.4e-06, 128 of 1024 rows".
std::string DescribeCheck(const ServerCheck& check);
std::string DescribeCheck(const RowsReport& report);

}  // namespace attend::client
