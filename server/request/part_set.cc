// SPDX-License-Identifier: Apache-2.0

#include "server/request/part_set.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace attend {

void PartSet::Close(int64_t parts) {
  open_ -= parts;
  assert(open_ >= 0);
}

bool PartSet::Fail(Status status) {
  if (failed()) return false;
  failure_ = std::move(status);
  return true;
}

void PartSet::Add(const Request& part) {
  const bool sums = times_ == Times::kSums;
  const bool last = sums ? part.enqueued >= enqueued_ : part.completed >= completed_;
  completed_ = std::max(completed_, part.completed);
  if (last) {
    enqueued_ = part.enqueued;
    started_ = part.started;
    batch_requests_ = part.batch_requests;
    batch_elements_ = part.batch_elements;
  }
  if (!sums && !last) return;
  copy_in_ns_ = part.copy_in_ns + (sums ? copy_in_ns_ : 0);
  kernel_ns_ = part.kernel_ns + (sums ? kernel_ns_ : 0);
  copy_out_ns_ = part.copy_out_ns + (sums ? copy_out_ns_ : 0);
}

void PartSet::ApplyTo(Request& whole) const {
  whole.status = failure_;
  whole.enqueued = enqueued_;
  whole.started = started_;
  whole.completed = completed_;
  whole.batch_requests = batch_requests_;
  whole.batch_elements = batch_elements_;
  whole.copy_in_ns = copy_in_ns_;
  whole.kernel_ns = kernel_ns_;
  whole.copy_out_ns = copy_out_ns_;
}

}  // namespace attend
