// SPDX-License-Identifier: Apache-2.0
//
// Regions by client-given names, as in Triton's protocol: files that a client shares (shm_open),
// and GPU memory that it lends. A name belongs to its tenant: others can neither see, use nor
// unregister it. With several tenants a file belongs to one of them too: its key begins with the
// tenant's name. A region in use lives until its requests have ended. Thread-safe.

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
  std::optional<SharedFile> file;  // none: GPU memory
  int64_t offset = 0;              // in the file
  int64_t bytes = 0;
  std::string token;  // of GPU memory: the registry's token
  int64_t device_id = 0;
};
using NamedRegionRef = std::shared_ptr<const NamedRegion>;

class RegionNames {
 public:
  struct Gpu {
    int64_t id = 0;  // as clients number them
    std::string uuid;
  };
  struct Options {
    std::optional<SharedFile::Rules> files;  // none: files are disabled
    RegionRegistry* lent = nullptr;          // null: GPU memory is disabled; must outlive this
    std::vector<Gpu> gpus;
    // Per tenant.
    int64_t regions_max = 256;
    int64_t files_bytes_max = int64_t{1} << 30;
    std::vector<std::string> tenants = {"default"};
  };
  enum class Kind { kFile, kGpu };

  explicit RegionNames(Options options);
  ~RegionNames();  // returns lent memory to the registry
  RegionNames(const RegionNames&) = delete;
  RegionNames& operator=(const RegionNames&) = delete;

  bool files() const { return options_.files.has_value(); }
  bool gpus() const { return options_.lent != nullptr; }

  // UNIMPLEMENTED: that kind is disabled. ALREADY_EXISTS, RESOURCE_EXHAUSTED, INVALID_ARGUMENT, and
  // the errors of SharedFile::Open and RegionRegistry::Import. RegisterGpu may wait for a device.
  Status RegisterFile(int tenant, const std::string& name, const std::string& key, uint64_t offset,
                      uint64_t bytes);
  Status RegisterGpu(int tenant, const std::string& name, const std::string& handle,
                     int64_t device_id, uint64_t bytes);
  // Unregisters the tenant's region of that kind and name, or all of the kind if the name is empty.
  // An unknown name is no error. `closed` is released once the server has closed the GPU memory.
  void Unregister(int tenant, Kind kind, const std::string& name,
                  const std::shared_ptr<void>& closed);
  // NOT_FOUND if the tenant has no such region.
  Result<NamedRegionRef> Find(int tenant, const std::string& name) const;
  // The tenant's regions of that kind, sorted by name. NOT_FOUND if `name` is neither empty nor one
  // of them.
  Result<std::vector<NamedRegionRef>> List(int tenant, Kind kind, const std::string& name) const;

 private:
  class Reservation;
  // A null region is being registered.
  using Names = std::map<std::string, NamedRegionRef>;
  struct Tenant {
    Names names;
    int64_t files_bytes = 0;  // of its regions in files, including those being registered
  };

  Status CheckRoom(const Tenant& tenant, Kind kind, const std::string& name, uint64_t bytes) const;

  const Options options_;
  std::vector<SharedFile::Rules> rules_;  // for files, by tenant; empty: disabled
  std::vector<uint64_t> clients_;         // client ids in the registry, by tenant
  mutable Mutex mutex_;
  std::vector<Tenant> tenants_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend::oip
