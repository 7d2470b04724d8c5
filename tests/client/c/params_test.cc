// SPDX-License-Identifier: Apache-2.0
//
// All options of AttendRequest through the C interface's text and lists, and back into a message:
// those that the .proto gets later too.

#include "client/c/params.h"

#include <google/protobuf/reflection.h>
#include <google/protobuf/text_format.h>
#include <google/protobuf/util/field_comparator.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <bit>
#include <deque>
#include <string>
#include <vector>

#include "client/call/random.h"
#include "client/wire/message_codec.h"
#include "tests/client/support/test_seed.h"

namespace attend::client::c {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

float AnyFloat(Random& random) {
  return std::bit_cast<float>(static_cast<uint32_t>(random.Bits()));
}

bool IsGivenElsewhere(const FieldDescriptor& field) {
  const std::string& name = field.name();
  return field.type() == FieldDescriptor::TYPE_BYTES || name == "tree_tokens" ||
         name == "sessions" || name.ends_with("_placement") ||
         field.message_type() == v1::Tensor::descriptor();
}

void Fill(Random& random, Message* message);

void FillField(Random& random, const FieldDescriptor* field, Message* message) {
  const auto& r = *message->GetReflection();
  const bool many = field->is_repeated();
  for (int64_t n = many ? random.Below(5) : 1; n > 0; --n) {
    switch (field->type()) {
      case FieldDescriptor::TYPE_FLOAT:
        many ? r.AddFloat(message, field, AnyFloat(random))
             : r.SetFloat(message, field, AnyFloat(random));
        break;
      case FieldDescriptor::TYPE_INT64: {
        const auto number = static_cast<int64_t>(random.Bits());
        many ? r.AddInt64(message, field, number) : r.SetInt64(message, field, number);
        break;
      }
      case FieldDescriptor::TYPE_INT32:
        r.SetInt32(message, field, static_cast<int32_t>(random.Bits()));
        break;
      case FieldDescriptor::TYPE_UINT64:
        r.SetUInt64(message, field, random.Bits());
        break;
      case FieldDescriptor::TYPE_BOOL:
        r.SetBool(message, field, random.Below(2) == 1);
        break;
      case FieldDescriptor::TYPE_STRING:
        r.SetString(message, field, "\"\\\x01 " + std::to_string(random.Bits()) + " \u00e4\u20ac");
        break;
      case FieldDescriptor::TYPE_ENUM:
        r.SetEnum(message, field,
                  field->enum_type()->value(
                      1 + static_cast<int>(random.Below(field->enum_type()->value_count() - 1))));
        break;
      case FieldDescriptor::TYPE_MESSAGE:
        Fill(random, r.MutableMessage(message, field));
        break;
      default:
        FAIL() << field->full_name() << " has a type that this test does not know";
    }
  }
}

void Fill(Random& random, Message* message) {
  for (int i = 0; i < message->GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* const field = message->GetDescriptor()->field(i);
    if (IsGivenElsewhere(*field) || field->name() == "wanted") continue;
    FillField(random, field, message);
  }
}

v1::AttendRequest AnyOptions(Random& random) {
  v1::AttendRequest request;
  Fill(random, &request);
  request.set_o_dtype(v1::DTYPE_FLOAT32);
  for (int name = v1::TENSOR_NAME_D_Q; name <= v1::TENSOR_NAME_D_SINKS; ++name) {
    if (random.Below(2) == 1) request.mutable_backward()->add_wanted(v1::TensorName(name));
  }
  if (request.backward().wanted().empty()) request.clear_backward();
  return request;
}

// The header that a call with these params is sent with, without tensors. `id`: its request_id.
v1::AttendRequest Sent(const attend_client_params& given, const char* id) {
  const float one[] = {1};
  attend_client_params params = given;
  const attend_client_tensor q = {one, ATTEND_CLIENT_FLOAT32, 4, {1, 1, 1, 1}, 0, 0};
  params.q = params.k = params.v = params.d_o = q;
  AttentionCall call;
  const Status status = ReadParams(params, nullptr, &call);
  EXPECT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(call.request_id, id);
  v1::AttendRequest sent = RequestHeader(call);
  sent.set_request_id(id);
  sent.clear_q();
  sent.clear_k();
  sent.clear_v();
  if (!sent.has_backward()) return sent;
  v1::BackwardPass& backward = *sent.mutable_backward();
  backward.clear_o();
  backward.clear_lse();
  backward.clear_d_o();
  return sent;
}

// The field's numbers as a list of `kept` memory. The message then has others, which the list
// replaces.
template <class Number>
attend_client_list TakeList(const FieldDescriptor* field, Message* message,
                            std::deque<std::vector<Number>>* kept) {
  const auto numbers = message->GetReflection()->GetRepeatedFieldRef<Number>(*message, field);
  kept->emplace_back(numbers.begin(), numbers.end());
  message->GetReflection()->GetMutableRepeatedFieldRef<Number>(message, field).Add(Number{7});
  return {field->name().c_str(), kept->back().data(), std::ssize(kept->back())};
}

TEST(Params, EveryOptionGivenAsTextOrListIsSent) {
  ATTEND_FRESH_SEED(seed);
  Random random(seed);
  for (int n = 0; n < 300; ++n) {
    const v1::AttendRequest request = AnyOptions(random);
    v1::AttendRequest as_text = request;
    std::deque<std::vector<int64_t>> integers;
    std::deque<std::vector<float>> floats;
    std::vector<attend_client_list> lists;
    for (int i = 0; i < request.GetDescriptor()->field_count(); ++i) {
      const FieldDescriptor* const field = request.GetDescriptor()->field(i);
      if (!field->is_repeated() || IsGivenElsewhere(*field) || random.Below(2) == 0) continue;
      lists.push_back(field->type() == FieldDescriptor::TYPE_FLOAT
                          ? TakeList(field, &as_text, &floats)
                          : TakeList(field, &as_text, &integers));
    }
    std::string text;
    ASSERT_TRUE(google::protobuf::TextFormat::PrintToString(as_text, &text));
    attend_client_params params = {};
    params.request = text.c_str();
    params.lists = lists.data();
    params.lists_count = std::ssize(lists);
    google::protobuf::util::DefaultFieldComparator comparator;
    comparator.set_treat_nan_as_equal(true);
    google::protobuf::util::MessageDifferencer differencer;
    differencer.set_field_comparator(&comparator);
    std::string differences;
    differencer.ReportDifferencesToString(&differences);
    EXPECT_TRUE(differencer.Compare(request, Sent(params, request.request_id().c_str())))
        << text << "\n"
        << differences;
  }
}

}  // namespace
}  // namespace attend::client::c
