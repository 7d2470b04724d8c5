// SPDX-License-Identifier: Apache-2.0
//
// The header must itself be a valid ModelInferRequest. An input's length prefix covers its
// contents, so TakeInput walks each input twice: first to find the contents and the length without
// them, then to copy the other fields behind a new prefix.

#include "server/oip/infer_scan.h"

#include <string>

#include "inference/grpc_service.pb.h"
#include "server/wire/protobuf_wire.h"
#include "server/wire/wire_fields.h"

namespace attend::oip {
namespace {

using Infer = inference::ModelInferRequest;
using InputTensor = Infer::InferInputTensor;

Status Malformed(const std::string& what) {
  return InvalidArgument("the message is not a ModelInferRequest: " + what);
}

class Scanner {
 public:
  Scanner(std::span<const ByteSpan> slices, MessageScan& scan, InferScan& out)
      : reader_(slices), scan_(scan), out_(out) {}

  Status Run() {
    scan_.message_bytes = reader_.remaining();
    return wire::ForEachField(reader_, scan_.message_bytes, Malformed,
                              [&](const wire::Field& field, const SliceReader& begin) {
                                const bool bytes = field.type == wire::kBytes;
                                if (bytes && field.number == Infer::kRawInputContentsFieldNumber) {
                                  TakeRaw(field.bytes);
                                  return Status();
                                }
                                if (bytes && field.number == Infer::kInputsFieldNumber) {
                                  return TakeInput(field.bytes);
                                }
                                return Gather(begin, field);
                              });
  }

 private:
  void TakeRaw(int64_t bytes) {
    if (out_.raw_count < kInputCount) {
      out_.raw[static_cast<size_t>(out_.raw_count)] = {reader_.position(), bytes};
    }
    ++out_.raw_count;
  }

  // wire::ForEachField for the input that has the next `bytes`.
  template <class Take>
  Status ForEachField(int64_t bytes, const Take& take) {
    const auto malformed = [this](const std::string& what) {
      return Malformed("in inputs[" + std::to_string(out_.inputs) + "], " + what);
    };
    return wire::ForEachField(reader_, reader_.position() + bytes, malformed, take);
  }
  static bool IsContents(const wire::Field& field) {
    return field.type == wire::kBytes && field.number == InputTensor::kContentsFieldNumber;
  }

  Status TakeInput(int64_t bytes) {
    if (out_.inputs == kInputCount) {
      return InvalidArgument("inputs has more than " + std::to_string(kInputCount) + " entries");
    }
    MessagePart& contents = out_.contents[static_cast<size_t>(out_.inputs)];
    const SliceReader whole = reader_;
    int64_t small = bytes;
    ATTEND_RETURN_IF_ERROR(
        ForEachField(bytes, [&](const wire::Field& field, const SliceReader& begin) {
          if (!IsContents(field)) return Status();
          if (contents.present()) {
            return InvalidArgument("inputs[" + std::to_string(out_.inputs) +
                                   "].contents is given twice");
          }
          contents = {reader_.position(), field.bytes};
          small -= reader_.position() - begin.position() + field.bytes;
          return Status();
        }));
    constexpr int64_t kPrefixMax = 12;
    ATTEND_RETURN_IF_ERROR(CheckRoom(small + kPrefixMax));
    auto* const header = reinterpret_cast<uint8_t*>(scan_.header.data());
    uint8_t* const end = wire::WritePrefix(wire::BytesTag(Infer::kInputsFieldNumber), small,
                                           header + scan_.header_bytes);
    scan_.header_bytes = end - header;
    reader_ = whole;
    ATTEND_RETURN_IF_ERROR(
        ForEachField(bytes, [&](const wire::Field& field, const SliceReader& begin) {
          return IsContents(field) ? Status() : Gather(begin, field);
        }));
    ++out_.inputs;
    return Status();
  }

  Status CheckRoom(int64_t bytes) const {
    if (bytes <= kHeaderBytesMax - scan_.header_bytes) return Status();
    return InvalidArgument("the fields other than tensors' contents have at least " +
                           std::to_string(scan_.header_bytes + bytes) +
                           " bytes, must have at most " + std::to_string(kHeaderBytesMax));
  }

  // Copies a field whose value is next to the header.
  Status Gather(SliceReader begin, const wire::Field& field) {
    const int64_t bytes = reader_.position() - begin.position() + field.bytes;
    ATTEND_RETURN_IF_ERROR(CheckRoom(bytes));
    begin.Read(scan_.header.data() + scan_.header_bytes, bytes);
    scan_.header_bytes += bytes;
    return Status();
  }

  SliceReader reader_;
  MessageScan& scan_;
  InferScan& out_;
};

}  // namespace

Status ScanInfer(std::span<const ByteSpan> slices, MessageScan& scan, InferScan& out) {
  return Scanner(slices, scan, out).Run();
}

}  // namespace attend::oip
