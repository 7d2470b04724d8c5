// SPDX-License-Identifier: Apache-2.0
//
// attend-client run: computes one attention, or its gradients, on tensors from files and writes the
// answer to files.

#include <cstdio>

#include "client/call/shared_call.h"
#include "client/cli/backward_flags.h"
#include "client/cli/call_flags.h"
#include "client/cli/commands.h"
#include "client/forward_pass.h"
#include "client/memory/cuda_memory.h"
#include "client/tool/verify.h"

namespace attend::client {
namespace {

struct RunOptions : CallFlags {
  bool verify = false;
  BackwardFlags gradients;
  TransportOptions transport;
};

// Puts the call into shared memory if the transport requires it, and stores its server's address.
Status Share(const RunOptions& options, Client& client, AttentionCall* call, std::string* address) {
  if (!options.transport.shared_memory) return Status();
  const Result<KnownServer> server = AskServer(client, std::chrono::seconds(5));
  if (!server.ok()) return server.status();
  *address = server->address;
  const Result<std::shared_ptr<SharedMemory>> memory =
      ConnectShared(options.transport, *server, client, options.tenant);
  if (!memory.ok()) return memory.status();
  MakeRegion make_region = [&](int64_t bytes) { return (*memory)->Create(bytes); };
  if (options.transport.cuda_ipc) {
    const Result<std::vector<std::string>> devices = CudaDevices(server->info);
    if (!devices.ok()) return devices.status();
    make_region = [&memory, uuids = *devices](int64_t bytes) {
      Result<std::shared_ptr<DeviceMemory>> device = LendableMemory(uuids, bytes);
      if (!device.ok()) return Result<std::shared_ptr<SharedRegion>>(device.status());
      return (*memory)->Lend(std::move(*device));
    };
  }
  Result<AttentionCall> shared = ShareCall(make_region, *call);
  if (!shared.ok()) return shared.status();
  *call = std::move(*shared);
  return Status();
}

// The call with its tensors from files, provided that its outputs can be written.
Result<AttentionCall> Prepare(const RunOptions& options) {
  Result<AttentionCall> call = MakeCall(options, {});
  if (!call.ok()) return call;
  ATTEND_RETURN_IF_ERROR(CheckOutputs(options, *call));
  if (!options.gradients.backward) return call;
  ATTEND_RETURN_IF_ERROR(CheckGradientsFile(options.gradients, options.out));
  ATTEND_RETURN_IF_ERROR(FillBackward(options.gradients, options.safetensors, &*call));
  return call;
}

int Run(const RunOptions& options, const CommonOptions& common) {
  Result<AttentionCall> call = Prepare(options);
  if (!call.ok()) return Fail(call.status(), kExitUsage);
  const Result<std::unique_ptr<Client>> client = Client::Make(ClientOptionsOf(common));
  if (!client.ok()) return Fail(client.status(), kExitUsage);
  WarnOfTenant(options.tenant, **client);
  CallOptions call_options = CallOptionsOf(options);
  const Status forward = AddForwardPass(**client, call_options, &*call);
  if (!forward.ok()) return Fail(forward, kExitFailed);
  const Status shared = Share(options, **client, &*call, &call_options.server);
  if (!shared.ok()) return Fail(shared, kExitFailed);
  call_options.transport = options.transport.transport;
  const Result<AttentionResult> result = (*client)->Call(*call, call_options);
  if (!result.ok()) return Fail(result.status(), kExitFailed);
  const bool backward = call->backward.has_value();
  const Status written =
      backward ? WriteGradients(options.out, *result) : WriteOutputs(options, *result);
  if (!written.ok()) return Fail(written, kExitUsage);
  std::string line =
      (backward ? DescribeGradients(options.out, *result) : DescribeOutputs(options, *result)) +
      ", " + DescribeAnswer(*result);
  bool ok = true;
  if (result->check) {
    ok = !result->check->failed();
    line += ", server check " + DescribeCheck(*result->check);
  }
  if (options.verify) {
    const Result<RowsReport> report = VerifyAnswer(*call, *result, /*seed=*/1);
    if (!report.ok()) return Fail(report.status(), kExitFailed);
    ok = ok && !report->failed();
    line += ", client check " + DescribeCheck(*report);
  }
  std::printf("%s\n", line.c_str());
  return ok ? kExitOk : kExitFailed;
}

}  // namespace

Command AddRun(CLI::App& app, const CommonOptions& common) {
  const auto options = std::make_shared<RunOptions>();
  CLI::App* command = app.add_subcommand("run", "Compute one attention on tensors from files");
  AddFiles(command, options.get(), {});
  AddMeaning(command, options.get(), /*packed=*/true);
  AddBackward(command, &options->gradients);
  AddCallOptions(command, options.get());
  command->add_flag(
      "--verify", options->verify,
      "Check a sample of rows here, in double precision: O, and LSE if it is asked for");
  AddDeadline(command, options.get());
  AddTransport(command, &options->transport);
  AddTenant(command, &options->tenant);
  return [options, &common] { return Run(*options, common); };
}

}  // namespace attend::client
