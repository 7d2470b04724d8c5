// SPDX-License-Identifier: Apache-2.0
//
// attend-client: talks to an attend server from the command line.

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <new>
#include <utility>

#include "client/call/token.h"
#include "client/cli/commands.h"
#include "client/cli/parse_errors.h"
#include "proto/process/process_settings.h"
#include "proto/process/receive_blocks.h"

namespace attend::client {
namespace {

void AddCommonOptions(CLI::App& app, CommonOptions* common) {
  app.add_option("--server,-s", common->server,
                 "Server: HOST[:PORT], [IPV6]:PORT or unix:PATH; without a port, 8001. Several "
                 "servers, which calls go to in turn: IP addresses with commas between them, or a "
                 "name with several addresses")
      ->envname("ATTEND_SERVER")
      ->capture_default_str();
  const auto tls = [&app](const char* flag, const char* env, std::string& value, const char* help) {
    return app.add_option(flag, value, help)->envname(env);
  };
  tls("--tls-ca", "ATTEND_TLS_CA", common->tls.ca,
      "Authorities of the server's certificate, in PEM, or \"system\" for the system's: TLS over "
      "TCP")
      ->type_name("FILE");
  tls("--tls-cert", "ATTEND_TLS_CERT", common->tls.cert,
      "Certificate to show to servers that ask for one, in PEM")
      ->type_name("FILE");
  tls("--tls-key", "ATTEND_TLS_KEY", common->tls.key, "Its private key, in PEM")->type_name("FILE");
  tls("--tls-server-name", "ATTEND_TLS_SERVER_NAME", common->tls.server_name,
      "Name that the server's certificate must have; default: the host of --server")
      ->type_name("NAME");
  app.add_option("--connections", common->connections,
                 "Connections, each with its own socket; calls are spread over them")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--completion-threads", common->completion_threads,
                 "Threads that send requests and receive answers; 0 = one per connection, at most "
                 "half the cores")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  app.add_option("--attempts", common->attempts,
                 "Attempts per call, the first included and within the deadline. A call is retried "
                 "if there is no server (UNAVAILABLE) or if a full one says when to retry "
                 "(RESOURCE_EXHAUSTED). Default: 5, and 1 for `load`, where retries would hide "
                 "refusals")
      ->check(CLI::Range(1, 1000));
  app.add_option("--keepalive-time", common->keepalive_time_s,
                 "Of several servers: seconds of silence after which one is asked whether it is "
                 "there")
      ->check(CLI::Range(1.0, 86400.0))
      ->capture_default_str();
  app.add_option("--keepalive-timeout", common->keepalive_timeout_s,
                 "Seconds that it then has to answer; else its calls end with UNAVAILABLE, and it "
                 "is left out until it does")
      ->check(CLI::Range(0.1, 86400.0))
      ->capture_default_str();
  app.add_option("--token-file", common->token_file,
                 "File whose first line is the token that says who calls; default: the variable "
                 "ATTEND_TOKEN. Without TLS it is sent only to loopback and Unix sockets")
      ->envname("ATTEND_TOKEN_FILE")
      ->type_name("FILE");
  app.add_flag_callback(
      "--no-allocator-tuning", [common] { common->allocator_tuning = false; },
      "Leave malloc and its settings alone, which makes transfers slower");
}

int Main(int argc, char** argv) {
  CLI::App app("Client of attend: exact attention as a service.", "attend-client");
  app.set_version_flag("--version", std::string("attend-client ") + ATTEND_VERSION);
  app.require_subcommand(1);
  app.fallthrough();
  app.get_formatter()->column_width(34);
  app.footer(
      "Exit codes: 0 success; 1 a call or a check failed; 2 bad flag, value or file; 3 a load "
      "did not become stable; 130 interrupted.");
  CommonOptions common;
  common.command = ShellText({argv, argv + argc});
  AddCommonOptions(app, &common);
  const std::map<std::string, Command> commands = {
      {"info", AddInfo(app, common)},     {"run", AddRun(app, common)},
      {"check", AddCheck(app, common)},   {"load", AddLoad(app, common)},
      {"compare", AddCompare(app)},       {"bench-local", AddBenchLocal(app, common)},
      {"replay", AddReplay(app, common)}, {"session", AddSession(app, common)},
      {"admin", AddAdmin(app, common)},
  };
  for (CLI::App* subcommand : app.get_subcommands({})) subcommand->fallthrough();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    return Fail(InvalidArgument(DescribeParseError(app, error)), kExitUsage);
  }
  if (Status numbers = CheckNumbers(app); !numbers.ok()) return Fail(numbers, kExitUsage);
  // gRPC's log lines on stderr are less helpful than a command's error.
  setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);
  // The interval at which gRPC makes progress on connections that no call waits for; by default 5
  // s, during which calls go only to servers that are already connected.
  setenv("GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS", "200", /*overwrite=*/0);
  Result<std::string> token =
      common.token_file.empty() ? TokenOf("") : ReadTokenFile(common.token_file);
  if (!token.ok()) return Fail(token.status(), kExitUsage);
  common.token = std::move(*token);
  if (common.allocator_tuning) TuneAllocatorAndBlocks();
  SkipDeadlockSearch();
  return commands.at(app.get_subcommands().front()->get_name())();
}

}  // namespace
}  // namespace attend::client

int main(int argc, char** argv) {
  // A lost reader or a file-size limit then fails the write instead of killing a long run.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
  try {
    return attend::client::FinishOutput(attend::client::Main(argc, argv));
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "attend-client: out of memory\n");
    return attend::client::kExitFailed;
  } catch (const std::exception& error) {
    return attend::client::Fail(attend::Internal(error.what()), attend::client::kExitFailed);
  }
}
