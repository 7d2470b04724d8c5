// SPDX-License-Identifier: Apache-2.0
//
// The fault sweep for regions: the N-th registration of a region's pages, the N-th import of device
// memory and the N-th import of an event fail, for every N.

#include <memory>
#include <string>
#include <vector>

#include "server/regions/region_registry.h"
#include "tests/server/support/cuda_ipc_fixture.h"

namespace attend {
namespace {

using test::RegionClient;

// The system refuses to lock a region's pages: its client is told, and other clients do not notice.
TEST_F(SharedMemoryTest, AFailedRegistrationAffectsOnlyItsClient) {
  constexpr int kRegions = 4;
  const std::string text = "page-locking 123 bytes: cudaErrorPretend";
  Start();
  for (int n = 1; n <= kRegions; ++n) {
    SCOPED_TRACE("region " + std::to_string(n));
    server_->backend().FailRegister(n, ResourceExhausted(text));
    RegionClient client(path());
    std::unique_ptr<test::MappedRegion> region;
    for (int i = 1; i <= kRegions; ++i) {
      if (i != n) {
        region = client.Create(1 << 16);
        continue;
      }
      const v1::RegionReply reply = client.TryCreate(1 << 16);
      EXPECT_EQ(reply.error().code(), static_cast<int>(Code::kResourceExhausted));
      EXPECT_EQ(reply.error().message(), text);
    }
    EXPECT_EQ(stats().regions, kRegions - 1);
    EXPECT_EQ(stats().bytes, (kRegions - 1) << 16);
    test::WireProblem problem = Shared(*region, static_cast<uint64_t>(n));
    v1::AttendResponse response;
    ASSERT_TRUE(Attend(problem.request, &response).ok());
    EXPECT_EQ(test::Judge(problem, test::WithBytes(*region, response)), "");
    client.Close();
    WaitUntilEmpty();
  }
  EXPECT_EQ(stats().refused, kRegions);
}

class FaultSweepImportsTest : public CudaIpcTest {
 protected:
  static constexpr int kImports = 4;
  static constexpr int64_t kImportBytes = 1 << 16;

  // A client lends each allocation with an event; the n-th is refused. Returns the others.
  std::vector<std::unique_ptr<test::MappedRegion>> LendAllBut(int n, const Status& fault,
                                                              RegionClient& client) {
    const RegionRegistry::Stats before = stats();
    const int64_t imported_before = imported();
    std::vector<std::unique_ptr<test::MappedRegion>> regions;
    for (int i = 1; i <= kImports; ++i) {
      const Allocation& memory = allocations_[static_cast<size_t>(i - 1)];
      if (i == n) {
        v1::ImportCudaMemory lent = ImportOf(memory, 0, kImportBytes);
        lent.set_event_handle("event");
        const v1::RegionReply reply = client.Import(lent);
        EXPECT_EQ(reply.error().code(), static_cast<int>(fault.code()));
        EXPECT_EQ(reply.error().message(), fault.message());
        const auto open = static_cast<int64_t>(regions.size());
        EXPECT_EQ(imported() - imported_before, 2 * open) << "memory or event of what was refused";
        EXPECT_EQ(stats().lent_regions - before.lent_regions, open);
        EXPECT_EQ(stats().lent_bytes - before.lent_bytes, open * kImportBytes);
        EXPECT_EQ(stats().refused - before.refused, 1);
        continue;
      }
      regions.push_back(Lend(client, memory, 0, "event"));
    }
    return regions;
  }
  void ExpectServed(const test::MappedRegion& region, uint64_t seed) {
    test::WireProblem problem = Shared(region, seed);
    v1::AttendResponse response;
    const grpc::Status status = Attend(problem.request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(test::Judge(problem, test::WithBytes(region, response)), "");
  }

  std::vector<Allocation> allocations_;
};

// The device refuses a client's memory or event: the client is told and may lend the same again,
// and other clients do not notice.
TEST_F(FaultSweepImportsTest, AFailedImportAffectsOnlyItsClient) {
  struct Fault {
    const char* name;
    void (test::FakeBackend::*fail)(int, Status);
    int64_t test::FakeBackend::Calls::*calls;
    Status status;
  };
  const Fault faults[] = {
      {"memory", &test::FakeBackend::FailImportMemory, &test::FakeBackend::Calls::memory_import,
       ResourceExhausted("opening memory of another process on cpu: cudaErrorPretend")},
      {"event", &test::FakeBackend::FailImportEvent, &test::FakeBackend::Calls::event_import,
       Internal("opening an event of another process on cpu: cudaErrorPretend")}};
  StartIpc();
  test::FakeBackend& backend = server_->backend();
  backend.LendEvent("event");
  backend.Reach("event");
  for (int i = 0; i < kImports; ++i) allocations_.push_back(Allocate(kImportBytes));
  RegionClient other(path());
  const auto others_import = Lend(other, Allocate(kImportBytes), 0, "event");
  const auto others_region = other.Create(kImportBytes);
  for (const Fault& fault : faults) {
    for (int n = 1; n <= kImports; ++n) {
      SCOPED_TRACE(std::string(fault.name) + ", import " + std::to_string(n));
      const int64_t before = backend.calls().*fault.calls;
      (backend.*fault.fail)(n, fault.status);
      RegionClient client(path());
      auto regions = LendAllBut(n, fault.status, client);
      EXPECT_EQ(backend.calls().*fault.calls - before, kImports);
      regions.push_back(Lend(client, allocations_[static_cast<size_t>(n - 1)], 0, "event"));
      for (const auto& region : regions) ExpectServed(*region, static_cast<uint64_t>(n));
      ExpectServed(*others_import, static_cast<uint64_t>(n));
      ExpectServed(*others_region, static_cast<uint64_t>(n));
      client.Close();
      while (stats().lent_regions > 1) std::this_thread::yield();
      EXPECT_EQ(imported(), 2) << "the other client's";
    }
  }
  other.Close();
  WaitUntilEmpty();
  EXPECT_EQ(imported(), 0);
  EXPECT_EQ(stats().lent_bytes, 0);
}

}  // namespace
}  // namespace attend
