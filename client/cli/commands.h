// SPDX-License-Identifier: Apache-2.0
//
// The commands of attend-client. Each Add... adds a subcommand with its flags to the parser and
// returns the function that runs it after parsing. That function returns the exit code: 0 success,
// 1 a call or check failed, 2 a bad flag, value or file, 3 a measurement that did not become
// stable, 130 interrupted.

#pragma once

#include <CLI/CLI.hpp>
#include <atomic>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "client/client.h"
#include "client/load/run_facts.h"
#include "kernels/reference/check_rows.h"

namespace attend::client {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitUnstable = 3;  // measured, but not stable enough
inline constexpr int kExitInterrupted = 130;

// Options common to all commands.
struct CommonOptions {
  std::string server = "127.0.0.1:8001";
  TlsOptions tls;
  int connections = 1;
  int completion_threads = 0;
  int attempts = 0;  // 0: five; one for a load
  double keepalive_time_s = 10;
  double keepalive_timeout_s = 5;
  std::string token_file;
  std::string token;  // from that file or the environment; may be empty
  bool allocator_tuning = true;
  std::string command;  // command line, for result files
};

using Command = std::function<int()>;

Command AddInfo(CLI::App& app, const CommonOptions& common);
Command AddRun(CLI::App& app, const CommonOptions& common);
Command AddBenchLocal(CLI::App& app, const CommonOptions& common);
Command AddCompare(CLI::App& app);
Command AddCheck(CLI::App& app, const CommonOptions& common);
Command AddLoad(CLI::App& app, const CommonOptions& common);
Command AddReplay(CLI::App& app, const CommonOptions& common);
Command AddSession(CLI::App& app, const CommonOptions& common);
Command AddAdmin(CLI::App& app, const CommonOptions& common);

ClientOptions ClientOptionsOf(const CommonOptions& common);

// The values of --transport and --shared-memory-socket.
struct TransportOptions {
  CallTransport transport = CallTransport::kAuto;
  bool shared_memory = false;  // also with cuda_ipc
  bool cuda_ipc = false;
  std::string socket;  // empty: as the server reports
};
// Adds --transport and --shared-memory-socket to a command.
void AddTransport(CLI::App* command, TransportOptions* options);
// A server's own report, and its address if there are several.
struct KnownServer {
  v1::GetServerInfoResponse info;
  std::string address;  // for CallOptions; empty: the client has only one server
};
Result<KnownServer> AskServer(Client& client, std::chrono::nanoseconds timeout);
// A connection to the server's shared memory, as `tenant`; null unless --transport needs it.
Result<std::shared_ptr<SharedMemory>> ConnectShared(const TransportOptions& options,
                                                    const KnownServer& server, const Client& client,
                                                    const std::string& tenant);
// The UUIDs of the server's healthy GPUs, for cuda_ipc.
Result<std::vector<std::string>> CudaDevices(const v1::GetServerInfoResponse& info);

// For printf.
inline long long Int(int64_t value) { return static_cast<long long>(value); }

// The subcommands of `parent`, in order, each with the function that runs it on flags and a
// `Target`.
template <class Flags, class Target>
struct Subcommands {
  using Act = std::function<int(const Flags& flags, Target& target)>;

  CLI::App* parent;
  Flags* flags;
  std::map<const CLI::App*, Act> acts;

  CLI::App* Add(const char* name, const char* help, Act act) {
    CLI::App* const command = parent->add_subcommand(name, help);
    command->fallthrough();
    acts[command] = std::move(act);
    return command;
  }
  int Run(Target& target) const {
    return acts.at(parent->get_subcommands().front())(*flags, target);
  }
};

// The facts about this run for result files. Reads the clock.
RunFacts FactsOf(const CommonOptions& common);
ServerFacts ServerFactsOf(const v1::GetServerInfoResponse& info);

// Adds --tenant to a command; its value goes to `tenant`.
void AddTenant(CLI::App* command, std::string* tenant);
// Warns on stderr if the server does not know the tenant and counts it as "default".
void WarnOfTenant(const std::string& tenant, const v1::GetServerInfoResponse& info);
// The same for a command that needs no other server information; silent if the server cannot be
// reached.
void WarnOfTenant(const std::string& tenant, Client& client);

// From now on the first Ctrl-C sets the returned flag, and the second kills the process.
const std::atomic<bool>& InstallInterrupt();

// Flushes stdout; false if it fails: the reader is gone, or the disk is full.
bool FlushOutput();
// To be called last, with the command's exit code: returns kExitFailed instead of success if stdout
// could not be written completely. Silent if the reader is gone, as with `head`.
int FinishOutput(int exit_code);

// Prints "attend-client: <status>" on stderr; returns `exit_code`.
int Fail(const Status& status, int exit_code);

// "kernel cpu_flash on cpu, batch of 1, server total 1.234 ms (queue 0.012, kernel 1.100)".
std::string DescribeAnswer(const AttentionResult& result);
// "ok: max error 1.2e-07, bound 3.4e-06, 128 of 1024 rows".
std::string DescribeCheck(const RowsReport& report);

}  // namespace attend::client
