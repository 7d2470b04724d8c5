// SPDX-License-Identifier: Apache-2.0
//
// A client of the shared memory's socket that sends valid and invalid packets, and requests that
// use its regions.

#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "attend/v1/attention.pb.h"
#include "attend/v1/shared_memory.pb.h"
#include "server/util/unique_fd.h"

namespace attend::test {

// A region mapped into this process, or memory of the test that it has lent.
class MappedRegion {
 public:
  MappedRegion(std::string token, UniqueFd file, int64_t bytes);
  MappedRegion(std::string token, char* data, int64_t bytes)
      : token_(std::move(token)), bytes_(bytes), data_(data) {}
  ~MappedRegion();
  MappedRegion(const MappedRegion&) = delete;
  MappedRegion& operator=(const MappedRegion&) = delete;

  const std::string& token() const { return token_; }
  int file() const { return file_.get(); }
  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  void Unmap();

 private:
  const std::string token_;
  const UniqueFd file_;
  const int64_t bytes_;
  char* data_ = nullptr;
};

class RegionClient {
 public:
  explicit RegionClient(const std::string& path);

  bool connected() const { return socket_.valid(); }
  // False if the server has closed the connection.
  bool Send(const std::string& packet);
  // The same with that many descriptors attached.
  bool SendWithFiles(const std::string& packet, int files);
  // Empty if the server has closed the connection.
  std::optional<v1::RegionReply> Receive(UniqueFd* file = nullptr);

  // These must not fail.
  std::unique_ptr<MappedRegion> Create(int64_t bytes);
  // These may.
  v1::RegionReply TryCreate(uint64_t bytes);
  v1::RegionReply Release(const std::string& token);
  v1::RegionReply Import(const v1::ImportCudaMemory& lent);
  void Close() { socket_.Reset(); }

 private:
  v1::RegionReply Ask(const v1::RegionRequest& request, UniqueFd* file);

  UniqueFd socket_;
};

// Moves the tensors of `request` from its raw entries into the region, from `offset` on, and refers
// to them there. Returns the offset after them.
int64_t PutTensors(const MappedRegion& region, int64_t offset, v1::AttendRequest* request);
// Places the answer after them: O, then LSE if requested, each of at most `o_bytes`.
void PlaceOutputs(const MappedRegion& region, int64_t offset, int64_t o_bytes,
                  v1::AttendRequest* request);
// The answer with the tensors copied from the region to raw entries.
v1::AttendResponse WithBytes(const MappedRegion& region, const v1::AttendResponse& response);

}  // namespace attend::test
