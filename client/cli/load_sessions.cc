// SPDX-License-Identifier: Apache-2.0

#include "client/cli/load_sessions.h"

#include <cstdio>

#include "client/cli/commands.h"
#include "client/load/session_load.h"
#include "client/tool/file_io.h"

namespace attend::client {

void AddSessionLoad(CLI::App* command, std::string* number, SessionLoad* load) {
  command->option_defaults()->group("Sessions, instead of single requests");
  CLI::Option* const sessions =
      command
          ->add_option("--sessions", *number,
                       "Number of sequences at once, each with a session: a prompt, then one token "
                       "after another. --shape gives heads, head dims and dtype. Values as for "
                       "--concurrency")
          ->type_name("VALUES");
  for (const char* other :
       {"--mix", "--pool", "--concurrency", "--rate", "--arrivals", "--warmup", "--duration",
        "--count", "--stable", "--max-outstanding", "--search-p99", "--grace", "--check",
        "--deadline-ms", "--cancel-share", "--shared-memory-socket", "--discard-output"}) {
    sessions->excludes(command->get_option(other));
  }
  command->add_option("--context", load->context, "Tokens of each prompt")
      ->needs(sessions)
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  command
      ->add_option(
          "--decode", load->decode,
          "Steps after the prompt, of one token each; with tree=T in the shape, of a draft of "
          "T tokens, of which a random path is kept")
      ->needs(sessions)
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  command
      ->add_option("--layers", load->layers,
                   "Layers of a session, computed one after another for every token")
      ->needs(sessions)
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command
      ->add_option("--fork-share", load->fork_share,
                   "Share of the sequences that are forked after the prompt; the fork is decoded "
                   "after the sequence itself")
      ->needs(sessions)
      ->check(CLI::Range(0.0, 1.0));
  command->add_option("--think-ms", load->think_ms, "Milliseconds to wait before each step")
      ->needs(sessions)
      ->check(CLI::Range(0.0, 1e6));
}

int LoadSessions(const LoadFlags& flags, const std::atomic<bool>& interrupted) {
  LoadOptions options = flags.load;
  std::vector<SessionLoadResult> results;
  bool failed = false;
  for (const int64_t sessions : flags.session_counts) {
    options.session.sessions = sessions;
    Result<SessionLoadResult> result = RunSessionLoad(options, interrupted);
    if (!result.ok()) return Fail(result.status(), kExitUsage);
    std::printf("%s", SessionLoadTable(options, *result).c_str());
    failed = failed || result->failed();
    results.push_back(std::move(*result));
    if (interrupted) break;
  }
  if (!flags.json.empty()) {
    const std::string text = SessionLoadJson(options, results);
    const Status written =
        WriteFile(flags.json, {{text.data(), static_cast<int64_t>(text.size())}});
    if (!written.ok()) return Fail(written, kExitUsage);
  }
  if (!flags.plot.empty()) {
    const Status written = WritePicture(Draw(SessionLoadFigure(options, results)), flags.plot);
    if (!written.ok()) return Fail(written, kExitUsage);
  }
  if (interrupted) return kExitInterrupted;
  return failed ? kExitFailed : kExitOk;
}

}  // namespace attend::client
