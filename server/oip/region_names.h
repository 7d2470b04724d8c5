// SPDX-License-Identifier: Apache-2.0
//
// Regions by the names that clients give them, as Triton's protocol has it: files that a client
// shares (shm_open), and memory of a GPU that it lends. A name belongs to its tenant: others
// neither see nor use nor forget it. With several tenants a file is one tenant's too: its key
// begins with the tenant's name. What a request uses stays until it has ended. Thread-safe.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/memory/shared_file.h"
#include "server/regions/region_registry.h"

namespace attend::oip {

// Immutable.
struct NamedRegion {
  std::string name;
  std::optional<SharedFile> file;  // none: memory of a GPU
  int64_t offset = 0;              // in the file
  int64_t bytes = 0;
  std::string token;  // of memory of a GPU: the registry's
  int64_t device_id = 0;
};
using NamedRegionRef = std::shared_ptr<const NamedRegion>;

class RegionNames {
 public:
  struct Gpu {
    int64_t id = 0;  // as clients count them
    std::string uuid;
  };
  struct Options {
    std::optional<SharedFile::Rules> files;  // none: no files
    RegionRegistry* lent = nullptr;          // null: no memory of GPUs; must outlive this
    std::vector<Gpu> gpus;
    // Of each tenant.
    int64_t regions_max = 256;
    int64_t files_bytes_max = int64_t{1} << 30;
    std::vector<std::string> tenants = {"default"};
  };
  enum class Kind { kFile, kGpu };

  explicit RegionNames(Options options);
  ~RegionNames();  // the registry forgets what was lent
  RegionNames(const RegionNames&) = delete;
  RegionNames& operator=(const RegionNames&) = delete;

  bool files() const { return options_.files.has_value(); }
  bool gpus() const { return options_.lent != nullptr; }

  // UNIMPLEMENTED: the server does not take that kind. ALREADY_EXISTS, RESOURCE_EXHAUSTED,
  // INVALID_ARGUMENT and what SharedFile::Open and RegionRegistry::Import say. The second may wait
  // for a device.
  Status RegisterFile(int tenant, const std::string& name, const std::string& key, uint64_t offset,
                      uint64_t bytes);
  Status RegisterGpu(int tenant, const std::string& name, const std::string& handle,
                     int64_t device_id, uint64_t bytes);
  // Forgets the tenant's region of that kind and name; all of the kind if the name is empty; none
  // if there is none. `closed` is dropped once the server no longer has the memory of a GPU open.
  void Unregister(int tenant, Kind kind, const std::string& name,
                  const std::shared_ptr<void>& closed);
  // NOT_FOUND.
  Result<NamedRegionRef> Find(int tenant, const std::string& name) const;
  // The tenant's regions of that kind, by name. NOT_FOUND if `name` is not empty and not one.
  Result<std::vector<NamedRegionRef>> List(int tenant, Kind kind, const std::string& name) const;

 private:
  class Reservation;
  // A null region is being made.
  using Names = std::map<std::string, NamedRegionRef>;
  struct Tenant {
    Names names;
    int64_t files_bytes = 0;  // of its regions in files, those that are being made included
  };

  Status CheckRoom(const Tenant& tenant, Kind kind, const std::string& name, uint64_t bytes) const;

  const Options options_;
  std::vector<SharedFile::Rules> rules_;  // of files, by tenant; empty: no files
  std::vector<uint64_t> clients_;         // of the registry, by tenant
  mutable Mutex mutex_;
  std::vector<Tenant> tenants_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend::oip
