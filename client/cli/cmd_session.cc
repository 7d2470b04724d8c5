// SPDX-License-Identifier: Apache-2.0
//
// attend-client session: makes sessions, appends to them from files, reads and ends them. Each run
// is a separate process, so sessions are named by id, in hexadecimal, with the server if there are
// several.

#include <cstdio>
#include <map>

#include "client/cli/call_flags.h"
#include "client/cli/commands.h"
#include "client/cli/session_id.h"
#include "client/session.h"
#include "kernels/util/counted.h"
#include "kernels/util/printable.h"

namespace attend::client {
namespace {

struct SessionFlags : CallFlags {
  std::vector<std::string> ids;  // in hexadecimal
  SessionOptions session;
  LayerShape shape;
  std::string dtype = "float32";
  double lease_s = 0;
  int32_t layer = 0;
  std::optional<int64_t> length;
  std::vector<int64_t> kept;
};

std::string TokensText(const v1::Session& session) {
  const auto& lengths = session.layer_lengths();
  std::string text = std::to_string(session.length());
  for (const int64_t length : lengths) {
    if (length == session.length()) continue;
    text.clear();  // layers differ: list all lengths
    for (const int64_t each : lengths) text += (text.empty() ? "" : ",") + std::to_string(each);
    break;
  }
  return text;
}

void Print(const v1::Session& session) {
  std::printf("%s  %-8s %10s  tokens %-10s  %10s, %10s shared  lease %.0f s%s\n",
              SessionIdText(session.id()).c_str(), Printable(session.device()).c_str(),
              Counted(session.layer_lengths_size(), "layer").c_str(), TokensText(session).c_str(),
              BytesText(session.bytes()).c_str(), BytesText(session.shared_bytes()).c_str(),
              session.lease_seconds_left(), session.pinned() ? "  pinned" : "");
}

// Opens the sessions named by the command.
Result<std::vector<Session>> Open(const SessionFlags& flags, Client& client) {
  SessionOptions options;
  options.tenant = flags.tenant;
  std::vector<Session> sessions;
  for (const std::string& id : flags.ids) {
    const SessionName name = ParseSessionId(id);
    options.server = name.server;
    Result<Session> session = Session::Open(client, name.id, options);
    if (!session.ok())
      return Status(session.status().code(), id + ": " + session.status().message());
    sessions.push_back(std::move(*session));
  }
  return sessions;
}

int Create(const SessionFlags& flags, Client& client) {
  const Result<DType> dtype = ParseDType(flags.dtype);
  if (!dtype.ok()) return Fail(dtype.status(), kExitUsage);
  SessionOptions options = flags.session;
  options.tenant = flags.tenant;
  options.lease = std::chrono::duration<double>(flags.lease_s);
  options.shapes = {flags.shape};
  options.shapes.front().dtype = *dtype;
  Result<Session> session = Session::Create(client, options);
  if (!session.ok()) return Fail(session.status(), kExitFailed);
  const std::string server = session->server();
  std::printf("%s\n", Printable(SessionIdText(session->Release(), server)).c_str());
  return kExitOk;
}

// Gives the call a q without rows, so that it only appends.
void AskForNothing(AttentionCall* call) {
  call->q.dtype = call->k.dtype;
  call->q.shape = call->k.shape;
  if (call->q.shape.size() == 4) call->q.shape[call->layout == v1::LAYOUT_BLHD ? 1 : 2] = 0;
}

// Appends or, if there is a q, attends.
int Call(const SessionFlags& flags, Client& client, const NeededTensors& needed) {
  Result<AttentionCall> call = MakeCall(flags, needed);
  if (!call.ok()) return Fail(call.status(), kExitUsage);
  if (!needed.q) AskForNothing(&*call);
  const Status outputs = CheckOutputs(flags, *call);
  if (!outputs.ok()) return Fail(outputs, kExitUsage);
  Result<std::vector<Session>> sessions = Open(flags, client);
  if (!sessions.ok()) return Fail(sessions.status(), kExitFailed);
  std::vector<Session*> all;
  for (Session& session : *sessions) all.push_back(&session);
  const Result<AttentionResult> result =
      Session::Attend(all, flags.layer, *call, CallOptionsOf(flags));
  if (!result.ok()) return Fail(result.status(), kExitFailed);
  std::string lengths;
  for (const int64_t length : result->session_lengths) {
    lengths += (lengths.empty() ? "" : ", ") + std::to_string(length);
  }
  std::string line = "layer " + std::to_string(flags.layer) + " has " + lengths + " tokens";
  bool ok = true;
  if (needed.q) {
    const Status written = WriteOutputs(flags, *result);
    if (!written.ok()) return Fail(written, kExitUsage);
    line = DescribeOutputs(flags, *result) + ", " + line + ", " + DescribeAnswer(*result);
    if (result->check) {
      ok = !result->check->failed();
      line += ", server check " + DescribeCheck(*result->check);
    }
  }
  std::printf("%s\n", line.c_str());
  return ok ? kExitOk : kExitFailed;
}

int List(const SessionFlags& flags, Client& client) {
  const Result<v1::ListSessionsResponse> list =
      Session::List(client, flags.tenant, SessionOptions().timeout);
  if (!list.ok()) return Fail(list.status(), kExitFailed);
  for (const v1::Session& session : list->sessions()) Print(session);
  return kExitOk;
}

// Applies `act` to each session.
template <class Do>
int Each(const SessionFlags& flags, Client& client, const Do& act) {
  Result<std::vector<Session>> sessions = Open(flags, client);
  if (!sessions.ok()) return Fail(sessions.status(), kExitFailed);
  for (Session& session : *sessions) {
    const Status status = act(session);
    if (!status.ok()) return Fail(status, kExitFailed);
  }
  return kExitOk;
}

Status Fork(const SessionFlags& flags, Session& session) {
  Result<Session> fork = session.Fork(flags.length);
  if (!fork.ok()) return fork.status();
  const std::string server = fork->server();
  std::printf("%s\n", Printable(SessionIdText(fork->Release(), server)).c_str());
  return Status();
}

Status Info(Session& session) {
  const Result<v1::Session> got = session.Get();
  if (got.ok()) Print(*got);
  return got.ok() ? Status() : got.status();
}

void AddIds(CLI::App* command, SessionFlags* f, bool many) {
  CLI::Option* const ids = command->add_option(
      "id", f->ids, many ? "Ids of the sessions, one for each sequence" : "Id of the session");
  ids->required()->check(CheckSessionId)->type_name("ID");
  if (!many) ids->expected(1);
}

void AddLayer(CLI::App* command, SessionFlags* f) {
  command->add_option("--layer", f->layer, "Layer, counted from 0")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
}

void AddShape(CLI::App* command, SessionFlags* f) {
  const CLI::Range counts(1, 1 << 20);
  command->add_option("--dtype", f->dtype, "float32, float16 or bfloat16")->capture_default_str();
  command->add_option("--heads-kv", f->shape.heads_kv, "Key/value heads (Hkv)")
      ->check(counts)
      ->capture_default_str();
  command->add_option("--dim", f->shape.dim, "Head dim of K (D)")
      ->check(counts)
      ->capture_default_str();
  command->add_option("--dim-v", f->shape.dim_v, "Head dim of V (Dv); default: that of K")
      ->check(counts);
  command->add_option("--layers", f->session.layers, "Layers, all of this shape")->check(counts);
  f->session.layers = 1;
  command->add_option("--device", f->session.device,
                      "Device by name (see info); default: the server's choice");
  command
      ->add_option("--lease-s", f->lease_s,
                   "Seconds after its last use at which the session ends; default: the server's")
      ->check(CLI::Range(0.001, 1e9));
  command->add_flag("--pinned", f->session.pinned,
                    "Lose no tokens to other sessions while the lease lasts");
}

using SessionCommands = Subcommands<SessionFlags, Client>;

constexpr NeededTensors kKeys{.q = false};
constexpr NeededTensors kQueries{.keys = false};

void AddCalls(SessionCommands* commands) {
  SessionFlags* const f = commands->flags;
  CLI::App* command = commands->Add(
      "append", "Append K and V from files to a layer of sessions",
      [](const SessionFlags& flags, Client& client) { return Call(flags, client, kKeys); });
  AddIds(command, f, true);
  AddFiles(command, f, kKeys);
  AddLayout(command, f, false);
  command->option_defaults()->group("Options");
  AddLayer(command, f);
  AddDeadline(command, f);

  command = commands->Add(
      "attend", "Compute attention over a layer of sessions; K and V, if given, are appended first",
      [](const SessionFlags& flags, Client& client) { return Call(flags, client, kQueries); });
  AddIds(command, f, true);
  AddFiles(command, f, kQueries);
  AddMeaning(command, f, false);
  AddCallOptions(command, f);
  AddLayer(command, f);
  AddDeadline(command, f);
}

void AddChanges(SessionCommands* commands) {
  SessionFlags* const f = commands->flags;
  CLI::App* command =
      commands->Add("fork", "Make a session that begins with the same tokens and print its id",
                    [](const SessionFlags& flags, Client& client) {
                      return Each(flags, client, [&](Session& s) { return Fork(flags, s); });
                    });
  AddIds(command, f, false);
  command->add_option("--length", f->length, "Tokens of the new session; default: all");
  command = commands->Add("truncate", "Remove tokens from the end of all layers",
                          [](const SessionFlags& flags, Client& client) {
                            return Each(flags, client,
                                        [&](Session& s) { return s.Truncate(*flags.length); });
                          });
  AddIds(command, f, false);
  command->add_option("--length", f->length, "Tokens to keep")->required();
  command = commands->Add("keep-draft", "Keep some tokens of a draft in all layers",
                          [](const SessionFlags& flags, Client& client) {
                            return Each(flags, client, [&](Session& s) {
                              return s.KeepDraft(*flags.length, flags.kept);
                            });
                          });
  AddIds(command, f, false);
  command->add_option("--length", f->length, "Tokens before the draft")->required();
  command
      ->add_option(
          "--kept", f->kept,
          "The draft's tokens to keep, ascending from 0 on, comma-separated; default: none")
      ->delimiter(',');
  const auto each = [&](const char* name, const char* help, Status (*act)(Session&)) {
    const SessionCommands::Act act_on_all = [act](const SessionFlags& flags, Client& client) {
      return Each(flags, client, act);
    };
    AddIds(commands->Add(name, help, act_on_all), f, true);
  };
  each("free", "End sessions and free their memory", [](Session& s) { return s.Free(); });
  each("keep-alive", "Renew sessions' leases", [](Session& s) { return s.KeepAlive(); });
  each("info", "Show sessions' lengths, memory and leases", Info);
}

}  // namespace

Command AddSession(CLI::App& app, const CommonOptions& common) {
  const auto flags = std::make_shared<SessionFlags>();
  CLI::App* const parent = app.add_subcommand(
      "session",
      "Keep K and V on the server: create, append, attend, fork, truncate, keep-draft, free, list, "
      "info");
  parent->require_subcommand(1);
  const auto commands = std::make_shared<SessionCommands>(SessionCommands{parent, flags.get(), {}});
  AddShape(commands->Add("create", "Make a session and print its id", Create), flags.get());
  AddCalls(commands.get());
  AddChanges(commands.get());
  commands->Add("list", "List the tenant's sessions", List);
  for (CLI::App* command : parent->get_subcommands(nullptr)) AddTenant(command, &flags->tenant);
  return [flags, commands, &common] {
    const Result<std::unique_ptr<Client>> client = Client::Make(ClientOptionsOf(common));
    if (!client.ok()) return Fail(client.status(), kExitUsage);
    WarnOfTenant(flags->tenant, **client);
    return commands->Run(**client);
  };
}

}  // namespace attend::client
