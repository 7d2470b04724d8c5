// SPDX-License-Identifier: Apache-2.0
//
// The pass over a message's tags: which bytes are which field.

#include <string>

#include "server/wire/protobuf_wire.h"
#include "server/wire/request_codec.h"
#include "server/wire/session_uses.h"
#include "server/wire/slice_reader.h"
#include "server/wire/wire_arrays.h"
#include "server/wire/wire_fields.h"

namespace attend {
namespace {

Status Malformed(const std::string& what) {
  return InvalidArgument("the message is not an AttendRequest: " + what);
}

// The array that a field belongs to; kArrayFields: none.
int ArrayOf(const wire::Field& field) {
  for (int i = 0; i < kArrayFields; ++i) {
    if (field.number != kArrayNumbers[i]) continue;
    const uint32_t one = IsByteArray(i)    ? wire::kBytes
                         : IsFloatArray(i) ? wire::kFixed32
                                           : wire::kVarint;
    return field.type == one || field.type == wire::kBytes ? i : kArrayFields;
  }
  return kArrayFields;
}

// Counts the int64 entries in the next `bytes` and skips them. False if they are not varints.
bool CountInts(SliceReader& reader, int64_t bytes, int64_t& entries) {
  constexpr int kVarintBytesMax = 10;
  int begun = 0;  // bytes of an incomplete entry
  reader.ForEachPiece(bytes, [&](ByteSpan piece) {
    for (const uint8_t byte : piece) {
      if (begun == kVarintBytesMax) return;  // too long, and stays so
      const bool ends = byte < 0x80;
      begun = ends ? 0 : begun + 1;
      entries += ends ? 1 : 0;
    }
  });
  return begun == 0;
}

// A pass over one message.
class Scanner {
 public:
  Scanner(std::span<const ByteSpan> slices, MessageScan& scan) : reader_(slices), scan_(scan) {}

  Status Run() {
    scan_.message_bytes = reader_.remaining();
    while (reader_.remaining() > 0) ATTEND_RETURN_IF_ERROR(Next());
    if (sessions_ <= kRequestSessionsMax) return Status();
    return InvalidArgument("sessions has " + std::to_string(sessions_) +
                           " entries, must have at most " + std::to_string(kRequestSessionsMax));
  }

  bool RunToRaw() {
    while (reader_.remaining() > 0) {
      const SliceReader begin = reader_;
      uint64_t tag = 0;
      uint64_t bytes = 0;
      if (!reader_.ReadVarint(&tag)) return false;
      if (tag == wire::kRawTag) {
        if (!reader_.ReadVarint(&bytes) || bytes > INT64_MAX) return false;
        scan_.raw[0] = {reader_.position(), static_cast<int64_t>(bytes)};
        scan_.raw_count = 1;
        return true;
      }
      reader_ = begin;
      if (!Next().ok()) return false;
    }
    return false;
  }

 private:
  Status Next() {
    const SliceReader begin = reader_;
    wire::Field field;
    Status status = wire::ReadField(reader_, field);
    if (!status.ok()) return Malformed(status.message());
    if (const int array = ArrayOf(field); array < kArrayFields) {
      status = TakeArray(begin, field, array);
    } else if (field.number == wire::kRawField && field.type == wire::kBytes) {
      TakeRaw(begin, field.bytes);
    } else {
      const bool session = field.number == v1::AttendRequest::kSessionsFieldNumber;
      sessions_ += session && field.type == wire::kBytes ? 1 : 0;
      status = TakeSmall(begin, field.bytes);
    }
    if (!status.ok() || field_bytes_ <= kFieldBytesMax) return status;
    return InvalidArgument("the message has more than " + std::to_string(kFieldBytesMax) +
                           " bytes outside its raw entries");
  }

  Status TakeArray(const SliceReader& begin, const wire::Field& field, int array) {
    ArrayRun& run = scan_.arrays[array];
    if (run.entries == 0) run.begin = begin.position();
    bool whole = true;
    if (IsByteArray(array)) {
      run = {.begin = reader_.position(), .entries = field.bytes};
      reader_.Skip(field.bytes);
    } else if (field.type != wire::kBytes) {
      reader_.Skip(field.bytes);
      ++run.entries;
    } else if (IsFloatArray(array)) {
      whole = field.bytes % int64_t{sizeof(float)} == 0;
      reader_.Skip(field.bytes);
      run.entries += field.bytes / int64_t{sizeof(float)};
    } else {
      whole = CountInts(reader_, field.bytes, run.entries);
    }
    if (!whole) {
      return Malformed("field " + std::to_string(field.number) + " at byte " +
                       std::to_string(begin.position()) + " does not hold integers");
    }
    run.end = reader_.position();
    scan_.array_bytes += run.end - begin.position();
    field_bytes_ += run.end - begin.position();
    return Status();
  }

  void TakeRaw(const SliceReader& begin, int64_t bytes) {
    field_bytes_ += reader_.position() - begin.position();
    if (scan_.raw_count < kTensorsMax) scan_.raw[scan_.raw_count] = {reader_.position(), bytes};
    ++scan_.raw_count;
    reader_.Skip(bytes);
  }

  Status TakeSmall(SliceReader begin, int64_t bytes) {
    reader_.Skip(bytes);
    const int64_t all = reader_.position() - begin.position();
    if (all > kHeaderBytesMax - scan_.header_bytes) {
      return InvalidArgument(
          "the fields other than raw, lengths, slopes, sinks and tree have at least " +
          std::to_string(scan_.header_bytes + all) + " bytes, must have at most " +
          std::to_string(kHeaderBytesMax));
    }
    begin.Read(scan_.header.data() + scan_.header_bytes, all);
    scan_.header_bytes += all;
    field_bytes_ += all;
    return Status();
  }

  SliceReader reader_;
  MessageScan& scan_;
  int64_t field_bytes_ = 0;
  int64_t sessions_ = 0;
};

}  // namespace

Status ScanMessage(std::span<const ByteSpan> slices, MessageScan& scan) {
  return Scanner(slices, scan).Run();
}

bool ScanBeginning(std::span<const ByteSpan> slices, MessageScan& scan) {
  return Scanner(slices, scan).RunToRaw();
}

}  // namespace attend
