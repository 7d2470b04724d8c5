// SPDX-License-Identifier: Apache-2.0

#include "client/wire/json.h"

#include <google/protobuf/message.h>

#include <nlohmann/json.hpp>

namespace attend::client {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using nlohmann::ordered_json;

ordered_json Tree(const Message& message);

// `index`: in a repeated field; -1 for others.
ordered_json Value(const Message& message, const FieldDescriptor* field, int index) {
  const auto& r = *message.GetReflection();
  const bool one = index < 0;
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return one ? r.GetInt32(message, field) : r.GetRepeatedInt32(message, field, index);
    case FieldDescriptor::CPPTYPE_INT64:
      return one ? r.GetInt64(message, field) : r.GetRepeatedInt64(message, field, index);
    case FieldDescriptor::CPPTYPE_UINT32:
      return one ? r.GetUInt32(message, field) : r.GetRepeatedUInt32(message, field, index);
    case FieldDescriptor::CPPTYPE_UINT64:
      return one ? r.GetUInt64(message, field) : r.GetRepeatedUInt64(message, field, index);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return one ? r.GetDouble(message, field) : r.GetRepeatedDouble(message, field, index);
    case FieldDescriptor::CPPTYPE_FLOAT:
      return one ? r.GetFloat(message, field) : r.GetRepeatedFloat(message, field, index);
    case FieldDescriptor::CPPTYPE_BOOL:
      return one ? r.GetBool(message, field) : r.GetRepeatedBool(message, field, index);
    case FieldDescriptor::CPPTYPE_ENUM:
      return (one ? r.GetEnum(message, field) : r.GetRepeatedEnum(message, field, index))->name();
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return Tree(one ? r.GetMessage(message, field) : r.GetRepeatedMessage(message, field, index));
    case FieldDescriptor::CPPTYPE_STRING:
      break;
  }
  const std::string text =
      one ? r.GetString(message, field) : r.GetRepeatedString(message, field, index);
  return field->type() == FieldDescriptor::TYPE_BYTES ? Hex(text) : text;
}

ordered_json Tree(const Message& message) {
  const auto& reflection = *message.GetReflection();
  ordered_json tree = ordered_json::object();
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* const field = message.GetDescriptor()->field(i);
    if (field->is_repeated()) {
      ordered_json& list = tree[field->name()] = ordered_json::array();
      for (int n = 0; n < reflection.FieldSize(message, field); ++n) {
        list.push_back(Value(message, field, n));
      }
    } else if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE ||
               reflection.HasField(message, field)) {
      tree[field->name()] = Value(message, field, -1);
    }
  }
  return tree;
}

constexpr std::string_view kDigits = "0123456789abcdef";

}  // namespace

std::string JsonOf(const Message& message, int indent) {
  // Text from outside may be invalid UTF-8, and terminals obey some characters beyond ASCII.
  return Tree(message).dump(indent, ' ', /*ensure_ascii=*/true,
                            nlohmann::json::error_handler_t::replace);
}

std::string Hex(const std::string& bytes) {
  std::string digits;
  for (const char each : bytes) {
    const auto byte = static_cast<unsigned char>(each);
    digits += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return digits;
}

std::string FromHex(const std::string& digits) {
  std::string bytes;
  if (digits.size() % 2 != 0) return bytes;
  for (size_t i = 0; i < digits.size(); i += 2) {
    const size_t high = kDigits.find(digits[i]), low = kDigits.find(digits[i + 1]);
    if (high == std::string_view::npos || low == std::string_view::npos) return "";
    bytes.push_back(static_cast<char>(high << 4 | low));
  }
  return bytes;
}

}  // namespace attend::client
