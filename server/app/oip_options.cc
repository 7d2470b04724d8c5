// SPDX-License-Identifier: Apache-2.0

#include "server/app/oip_options.h"

#include <unistd.h>

#include <optional>
#include <string>
#include <string_view>

#include "server/app/unix_address.h"
#include "server/util/parse_number.h"

namespace attend {

Result<oip::InferenceServiceImpl::Options> MakeOipOptions(const Config& config,
                                                          const std::vector<Backend*>& backends,
                                                          RegionRegistry* lent) {
  oip::InferenceServiceImpl::Options options;
  options.version = Version();
  options.batch_delay_us = config.max_batch_delay_us;
  oip::RegionNames::Options& regions = options.regions;
  regions.regions_max = config.oip_shared_memory_regions;
  regions.files_bytes_max = config.oip_shared_memory_bytes;
  regions.tenants.clear();
  for (const Tenant& tenant : config.tenants.list()) regions.tenants.push_back(tenant.name);
  if (!config.oip_shared_memory.empty()) {
    const std::string& user = config.oip_shared_memory_owner;
    const std::optional<uid_t> owner = user.empty() ? geteuid() : FindUser(user);
    if (!owner) {
      return InvalidArgument("oip-shared-memory-owner " + user + ": no such user");
    }
    regions.files = {config.oip_shared_memory, *owner};
  }
  if (!config.oip_cuda_shared_memory) return options;
  regions.lent = lent;
  constexpr std::string_view kCuda = "cuda:";
  for (const Backend* const backend : backends) {
    const DeviceInfo& info = backend->info();
    if (info.uuid.empty()) continue;
    std::optional<int64_t> id;
    if (info.name.starts_with(kCuda)) id = ParseNumber<int64_t>(info.name.substr(kCuda.size()));
    regions.gpus.push_back({id.value_or(std::ssize(regions.gpus)), info.uuid});
  }
  return options;
}

}  // namespace attend
