// SPDX-License-Identifier: Apache-2.0

#include "server/trace/otlp_codec.h"

#include <algorithm>
#include <optional>

#include "kernels/util/utf8.h"

namespace attend {
namespace {

// Field numbers, by message.
namespace field {
enum ExportTraceServiceRequest : uint32_t { kResourceSpans = 1 };
enum ResourceSpans : uint32_t { kResource = 1, kScopeSpans = 2 };
enum Resource : uint32_t { kResourceAttributes = 1 };
enum ScopeSpans : uint32_t { kScope = 1, kSpans = 2 };
enum InstrumentationScope : uint32_t { kScopeName = 1, kScopeVersion = 2 };
enum Span : uint32_t {
  kTraceId = 1,
  kSpanId = 2,
  kParentSpanId = 4,
  kName = 5,
  kKind = 6,
  kStartTimeUnixNano = 7,
  kEndTimeUnixNano = 8,
  kAttributes = 9,
  kStatus = 15,
  kFlags = 16
};
enum SpanStatus : uint32_t { kMessage = 2, kCode = 3 };
enum KeyValue : uint32_t { kKey = 1, kValue = 2 };
enum AnyValue : uint32_t { kStringValue = 1, kIntValue = 3 };
enum ExportTraceServiceResponse : uint32_t { kPartialSuccess = 1 };
enum ExportTracePartialSuccess : uint32_t { kRejectedSpans = 1, kErrorMessage = 2 };
}  // namespace field

enum Kind : uint64_t { kInternal = 1, kServer = 2 };
constexpr uint64_t kStatusError = 2;
constexpr uint32_t kSampledFlag = 1;
constexpr size_t kTextBytesMax = 256;

enum WireType : uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

class Message {
 public:
  const std::string& bytes() const { return bytes_; }

  void AddVarint(uint32_t number, uint64_t value) {
    Tag(number, kVarint);
    Varint(value);
  }
  void AddFixed64(uint32_t number, uint64_t value) {
    Tag(number, kFixed64);
    LittleEndian(value, 8);
  }
  void AddFixed32(uint32_t number, uint32_t value) {
    Tag(number, kFixed32);
    LittleEndian(value, 4);
  }
  void Add(uint32_t number, std::string_view bytes) {
    Tag(number, kBytes);
    Varint(bytes.size());
    bytes_ += bytes;
  }
  void Add(uint32_t number, const Message& message) { Add(number, message.bytes()); }
  void AddText(uint32_t number, std::string_view text) { Add(number, ToUtf8(text, kTextBytesMax)); }

 private:
  void Tag(uint32_t number, WireType type) { Varint(uint64_t{number} << 3 | type); }
  void Varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_ += static_cast<char>(value | 0x80);
    bytes_ += static_cast<char>(value);
  }
  void LittleEndian(uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i, value >>= 8) bytes_ += static_cast<char>(value);
  }

  std::string bytes_;
};

// Ids are bytes, the most significant first.
std::string IdBytes(std::initializer_list<uint64_t> words) {
  std::string bytes;
  for (const uint64_t word : words) {
    for (int shift = 56; shift >= 0; shift -= 8) bytes += static_cast<char>(word >> shift);
  }
  return bytes;
}

void AddAttribute(uint32_t number, std::string_view key, const Message& value, Message& to) {
  Message attribute;
  attribute.Add(field::kKey, key);
  attribute.Add(field::kValue, value);
  to.Add(number, attribute);
}

void AddText(uint32_t number, std::string_view key, std::string_view text, Message& to) {
  if (text.empty()) return;
  Message value;
  value.AddText(field::kStringValue, text);
  AddAttribute(number, key, value, to);
}

void AddNumber(uint32_t number, std::string_view key, int64_t amount, Message& to) {
  Message value;
  value.AddVarint(field::kIntValue, static_cast<uint64_t>(amount));
  AddAttribute(number, key, value, to);
}

uint64_t UnixNanoseconds(SpanTime time) {
  const auto since = std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch());
  return static_cast<uint64_t>(std::max<int64_t>(0, since.count()));
}

Message BeginSpan(const CallSpan& call, uint64_t span, uint64_t parent, std::string_view name,
                  Kind kind, SpanTime begin, SpanTime end) {
  Message message;
  message.Add(field::kTraceId, IdBytes({call.own.trace_high, call.own.trace_low}));
  message.Add(field::kSpanId, IdBytes({span}));
  if (parent != 0) message.Add(field::kParentSpanId, IdBytes({parent}));
  message.AddText(field::kName, name);
  message.AddVarint(field::kKind, kind);
  message.AddFixed64(field::kStartTimeUnixNano, UnixNanoseconds(begin));
  message.AddFixed64(field::kEndTimeUnixNano, UnixNanoseconds(std::max(begin, end)));
  message.AddFixed32(field::kFlags, kSampledFlag);
  return message;
}

// The call's own, with OpenTelemetry's names where it has some.
Message EncodeCall(const CallSpan& call) {
  std::string_view name = call.method;
  if (name.starts_with('/')) name.remove_prefix(1);
  Message span = BeginSpan(call, call.own.span, call.parent, name, kServer, call.begin, call.end);
  const size_t slash = name.rfind('/');
  const auto text = [&span](std::string_view key, std::string_view value) {
    AddText(field::kAttributes, key, value, span);
  };
  text("rpc.system", "grpc");
  if (slash != std::string_view::npos) {
    text("rpc.service", name.substr(0, slash));
    text("rpc.method", name.substr(slash + 1));
  }
  AddNumber(field::kAttributes, "rpc.grpc.status_code", static_cast<int64_t>(call.code), span);
  text("attend.request_id", call.request_id);
  text("attend.tenant", call.tenant);
  text("attend.transport", call.transport);
  text("attend.dtype", call.dtype);
  text("attend.kernel", call.kernel);
  text("attend.device", call.device);
  if (call.batch_requests > 0) {
    AddNumber(field::kAttributes, "attend.batch_requests", call.batch_requests, span);
  }
  AddNumber(field::kAttributes, "attend.bytes_in", call.bytes_in, span);
  AddNumber(field::kAttributes, "attend.bytes_out", call.bytes_out, span);
  if (call.code != Code::kOk) {
    Message status;
    status.AddText(field::kMessage, call.error);
    status.AddVarint(field::kCode, kStatusError);
    span.Add(field::kStatus, status);
  }
  return span;
}

// Reads a message's fields one by one.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}

  struct Field {
    uint64_t number = 0;
    uint64_t value = 0;      // of a varint
    std::string_view bytes;  // of kBytes
  };
  bool done() const { return rest_.empty(); }
  std::optional<Field> Next() {
    const std::optional<uint64_t> tag = Varint();
    if (!tag) return std::nullopt;
    Field field{*tag >> 3, 0, {}};
    uint64_t skipped = 0;
    switch (*tag & 7) {
      case kVarint: {
        const std::optional<uint64_t> value = Varint();
        if (!value) return std::nullopt;
        field.value = *value;
        return field;
      }
      case kBytes: {
        const std::optional<uint64_t> size = Varint();
        if (!size || *size > rest_.size()) return std::nullopt;
        field.bytes = rest_.substr(0, *size);
        skipped = *size;
        break;
      }
      case kFixed64:
        skipped = 8;
        break;
      case kFixed32:
        skipped = 4;
        break;
      default:
        return std::nullopt;
    }
    if (skipped > rest_.size()) return std::nullopt;
    rest_.remove_prefix(skipped);
    return field;
  }

 private:
  std::optional<uint64_t> Varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
      const auto byte = static_cast<unsigned char>(rest_.front());
      rest_.remove_prefix(1);
      value |= uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return value;
    }
    return std::nullopt;
  }

  std::string_view rest_;
};

}  // namespace

std::string EncodeSpans(const SpanResource& resource, std::span<const CallSpan> calls) {
  Message about;
  AddText(field::kResourceAttributes, "service.name", resource.service, about);
  AddText(field::kResourceAttributes, "service.version", resource.version, about);
  AddText(field::kResourceAttributes, "service.instance.id", resource.instance, about);
  Message scope;
  scope.AddText(field::kScopeName, "attend");
  scope.AddText(field::kScopeVersion, resource.version);
  Message spans;
  spans.Add(field::kScope, scope);
  for (const CallSpan& call : calls) {
    spans.Add(field::kSpans, EncodeCall(call));
    for (size_t n = 0; n < call.phase_count; ++n) {
      const CallSpan::Phase& phase = call.phases[n];
      spans.Add(field::kSpans, BeginSpan(call, phase.span, call.own.span, phase.name, kInternal,
                                         phase.begin, phase.end));
    }
  }
  Message whole;
  whole.Add(field::kResource, about);
  whole.Add(field::kScopeSpans, spans);
  Message request;
  request.Add(field::kResourceSpans, whole);
  return request.bytes();
}

Result<PartialSuccess> DecodeExportResponse(std::string_view message) {
  const Status wrong = InvalidArgument("the collector's answer is no ExportTraceServiceResponse");
  PartialSuccess partial;
  for (Reader response(message); !response.done();) {
    const std::optional<Reader::Field> each = response.Next();
    if (!each) return wrong;
    if (each->number != field::kPartialSuccess) continue;
    for (Reader inner(each->bytes); !inner.done();) {
      const std::optional<Reader::Field> part = inner.Next();
      if (!part) return wrong;
      if (part->number == field::kRejectedSpans) {
        partial.rejected = static_cast<int64_t>(part->value);
      } else if (part->number == field::kErrorMessage) {
        partial.error = ToUtf8(part->bytes, kTextBytesMax);
      }
    }
  }
  return partial;
}

}  // namespace attend
