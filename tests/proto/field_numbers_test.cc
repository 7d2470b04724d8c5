// SPDX-License-Identifier: Apache-2.0
//
// The wire format of every message, enum and method compared with field_numbers.txt, so that
// clients and servers of different versions remain compatible.

#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "attend/v1/admin.pb.h"
#include "attend/v1/attention.pb.h"
#include "attend/v1/session.pb.h"
#include "attend/v1/shared_memory.pb.h"
#include "inference/grpc_service.pb.h"
#include "inference/model_config.pb.h"

namespace attend {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::EnumDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::FileDescriptor;
using google::protobuf::MethodDescriptor;
using google::protobuf::ServiceDescriptor;

using Lines = std::vector<std::string>;

std::string TypeOf(const FieldDescriptor& field) {
  if (field.message_type() != nullptr) return field.message_type()->full_name();
  if (field.enum_type() != nullptr) return field.enum_type()->full_name();
  return field.type_name();
}

// "attend.v1.Tensor.shape = 2 repeated int64"
std::string LineOf(const FieldDescriptor& field) {
  std::string line = field.full_name() + " = " + std::to_string(field.number()) + " ";
  if (field.is_repeated()) line += "repeated ";
  if (field.is_repeated() && field.is_packable() && !field.is_packed()) line += "unpacked ";
  if (field.has_optional_keyword() && field.message_type() == nullptr) line += "optional ";
  line += TypeOf(field);
  const auto* const oneof = field.real_containing_oneof();
  return oneof == nullptr ? line : line + " in " + oneof->name();
}

void AddEnum(const EnumDescriptor& type, Lines& lines) {
  for (int i = 0; i < type.value_count(); ++i) {
    lines.push_back(type.full_name() + "." + type.value(i)->name() + " = " +
                    std::to_string(type.value(i)->number()));
  }
}

void AddMessage(const Descriptor& type, Lines& lines) {
  for (int i = 0; i < type.field_count(); ++i) lines.push_back(LineOf(*type.field(i)));
  for (int i = 0; i < type.enum_type_count(); ++i) AddEnum(*type.enum_type(i), lines);
  for (int i = 0; i < type.nested_type_count(); ++i) AddMessage(*type.nested_type(i), lines);
}

// "attend.v1.AttentionService.Attend: attend.v1.AttendRequest -> attend.v1.AttendResponse"
void AddService(const ServiceDescriptor& service, Lines& lines) {
  for (int i = 0; i < service.method_count(); ++i) {
    const MethodDescriptor& method = *service.method(i);
    lines.push_back(method.full_name() + ": " + (method.client_streaming() ? "stream " : "") +
                    method.input_type()->full_name() + " -> " +
                    (method.server_streaming() ? "stream " : "") +
                    method.output_type()->full_name());
  }
}

void AddFile(const FileDescriptor& file, Lines& lines) {
  for (int i = 0; i < file.message_type_count(); ++i) AddMessage(*file.message_type(i), lines);
  for (int i = 0; i < file.enum_type_count(); ++i) AddEnum(*file.enum_type(i), lines);
  for (int i = 0; i < file.service_count(); ++i) AddService(*file.service(i), lines);
}

Lines LinesOfProtocol() {
  Lines lines;
  for (const FileDescriptor* const file :
       {v1::AttendRequest::descriptor()->file(), v1::CreateSessionRequest::descriptor()->file(),
        v1::RegionRequest::descriptor()->file(), v1::DrainRequest::descriptor()->file(),
        inference::ModelConfig::descriptor()->file(),
        inference::ModelInferRequest::descriptor()->file()}) {
    AddFile(*file, lines);
  }
  return lines;
}

Lines LinesOfListing() {
  std::ifstream file(FIELD_NUMBERS);
  EXPECT_TRUE(file.is_open()) << FIELD_NUMBERS;
  Lines lines;
  for (std::string line; std::getline(file, line);) {
    if (!line.empty() && line[0] != '#') lines.push_back(line);
  }
  return lines;
}

TEST(FieldNumbersTest, TheWireFormatHasNotChanged) {
  const Lines now = LinesOfProtocol();
  const std::set<std::string> known(now.begin(), now.end());
  for (const std::string& line : LinesOfListing()) {
    EXPECT_TRUE(known.contains(line))
        << "the protocol no longer has\n  " << line
        << "\nwhich clients or servers of other versions send. Put it back as it was: a field that "
           "is "
           "not used any more stays, and a new one takes a new number.";
  }
}

TEST(FieldNumbersTest, NewFieldsAreListed) {
  const Lines listing = LinesOfListing();
  const std::set<std::string> listed(listing.begin(), listing.end());
  EXPECT_EQ(listed.size(), listing.size()) << "a line stands twice in " << FIELD_NUMBERS;
  for (const std::string& line : LinesOfProtocol()) {
    EXPECT_TRUE(listed.contains(line))
        << "new in the protocol? Then add this line to " << FIELD_NUMBERS << ":\n"
        << line;
  }
}

}  // namespace
}  // namespace attend
