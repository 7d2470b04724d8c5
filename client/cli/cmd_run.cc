// SPDX-License-Identifier: Apache-2.0
//
// attend-client run: computes one attention on tensors from files and writes its answer to files.

#include <cstdio>

#include "client/call/shared_call.h"
#include "client/cli/call_flags.h"
#include "client/cli/commands.h"
#include "client/memory/cuda_memory.h"
#include "client/tool/verify.h"

namespace attend::client {
namespace {

struct RunOptions : CallFlags {
  bool verify = false;
  TransportOptions transport;
};

// Puts the call into shared memory if the transport asks for it.
Status Share(const RunOptions& options, Client& client, AttentionCall* call) {
  if (!options.transport.shared_memory) return Status();
  const auto info = client.GetServerInfo(std::chrono::seconds(5));
  if (!info.ok()) return info.status();
  const Result<std::shared_ptr<SharedMemory>> memory = ConnectShared(options.transport, *info);
  if (!memory.ok()) return memory.status();
  MakeRegion make_region = [&](int64_t bytes) { return (*memory)->Create(bytes); };
  if (options.transport.cuda_ipc) {
    const Result<std::vector<std::string>> devices = CudaDevices(*info);
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

int Run(const RunOptions& options, const CommonOptions& common) {
  Result<AttentionCall> call = MakeCall(options, {});
  if (!call.ok()) return Fail(call.status(), kExitUsage);
  const Status outputs = CheckOutputs(options, *call);
  if (!outputs.ok()) return Fail(outputs, kExitUsage);
  const Result<std::unique_ptr<Client>> client = Client::Make(ClientOptionsOf(common));
  if (!client.ok()) return Fail(client.status(), kExitUsage);
  WarnOfTenant(options.tenant, **client);
  const Status shared = Share(options, **client, &*call);
  if (!shared.ok()) return Fail(shared, kExitFailed);
  CallOptions call_options = CallOptionsOf(options);
  call_options.transport = options.transport.transport;
  const Result<AttentionResult> result = (*client)->Call(*call, call_options);
  if (!result.ok()) return Fail(result.status(), kExitFailed);
  const Status written = WriteOutputs(options, *result);
  if (!written.ok()) return Fail(written, kExitUsage);
  std::string line = DescribeOutputs(options, *result) + ", " + DescribeAnswer(*result);
  bool ok = true;
  if (result->check) {
    ok = result->check->ok;
    line += ", server check " + DescribeCheck(*result->check);
  }
  if (options.verify) {
    const Result<RowsReport> report = VerifyAnswer(*call, *result, /*seed=*/1);
    if (!report.ok()) return Fail(report.status(), kExitFailed);
    ok = ok && report->ok;
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
  AddCallOptions(command, options.get());
  command->add_flag("--verify", options->verify,
                    "Check a sample of rows here, in double precision");
  AddDeadline(command, options.get());
  AddTransport(command, &options->transport);
  AddTenant(command, &options->tenant);
  return [options, &common] { return Run(*options, common); };
}

}  // namespace attend::client
