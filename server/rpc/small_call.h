// SPDX-License-Identifier: Apache-2.0
//
// Calls with small messages: parsed by the generated classes and answered on the spot.

#pragma once

#include <google/protobuf/arena.h>
#include <google/protobuf/descriptor.h>

#include <cstdint>
#include <string>

#include "kernels/util/status.h"
#include "server/memory/memory_reserve.h"

namespace attend {

// The path of the method, in the file that defines In, whose request type is In.
template <class In>
const std::string& MethodOf() {
  static const std::string method = [] {
    const google::protobuf::FileDescriptor& file = *In::descriptor()->file();
    for (int s = 0; s < file.service_count(); ++s) {
      const google::protobuf::ServiceDescriptor& service = *file.service(s);
      for (int m = 0; m < service.method_count(); ++m) {
        if (service.method(m)->input_type() != In::descriptor()) continue;
        return "/" + service.full_name() + "/" + service.method(m)->name();
      }
    }
    return std::string();
  }();
  return method;
}

// `answer(request, response)` fills the response or returns an error. Messages above `bytes_max`
// are refused. May throw std::bad_alloc.
template <class In, class Out, class Answer>
Status AnswerSmallCall(const std::string& request, int64_t bytes_max, const Answer& answer,
                       std::string& response) {
  if (MemoryIsShort()) return OutOfMemory();
  if (std::ssize(request) > bytes_max) {
    return InvalidArgument("the message has " + std::to_string(request.size()) +
                           " bytes, must have at most " + std::to_string(bytes_max));
  }
  google::protobuf::Arena arena;  // Protobuf messages leak if an allocation fails
  auto* const in = google::protobuf::Arena::CreateMessage<In>(&arena);
  auto* const out = google::protobuf::Arena::CreateMessage<Out>(&arena);
  if (!in->ParseFromString(request)) return InvalidArgument("the message cannot be parsed");
  ATTEND_RETURN_IF_ERROR(answer(*in, *out));
  return out->SerializeToString(&response) ? Status() : Internal("the answer cannot be written");
}

}  // namespace attend
