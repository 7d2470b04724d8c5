// SPDX-License-Identifier: Apache-2.0
//
// A ModelInferRequest decodes to the same as the equivalent AttendRequest, byte for byte. Refusals
// name the field, the value and the bound.

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "tests/server/support/infer_fixture.h"

namespace attend {
namespace {

using inference::ModelInferRequest;
using test::Decoded;
using test::InferRequestTest;
using test::PlainInfer;
using test::Sent;
using test::ToInfer;

TEST_F(InferRequestTest, DecodesToTheEquivalentAttendRequest) {
  const uint64_t seed = test::FreshSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  int compared = 0, typed = 0;
  for (int i = 0; i < 600; ++i) {
    const test::WireProblem problem = test::RandomWireProblem(seed + i, 2e4, /*trees=*/false);
    if (!test::IsInferable(problem.request)) continue;
    const bool typable = test::MayBeTyped(problem.request);
    const Sent sent = typable && random() % 2 == 0 ? Sent::kTyped : Sent::kRaw;
    typed += sent == Sent::kTyped ? 1 : 0;
    const ModelInferRequest infer = ToInfer(problem.request, sent, random);
    Decoded expected, got;
    Decode(AttendFormat(), Buffer(problem.request.SerializeAsString(), random), expected);
    ASSERT_TRUE(expected.status.ok()) << expected.status.ToString();
    Decode(format_, Buffer(test::Shuffled(infer.SerializeAsString(), random), random), got);
    ASSERT_TRUE(got.status.ok()) << got.status.ToString()
                                 << infer.ShortDebugString().substr(0, 999);
    const Problem& p = got.request.attention.problem;
    const Problem& q = expected.request.attention.problem;
    ASSERT_EQ(Describe(p), Describe(q));
    ASSERT_EQ(p.scale, q.scale);
    ASSERT_EQ(p.softcap, q.softcap);
    ASSERT_EQ(p.dropout, q.dropout);
    ASSERT_EQ(got.request.attention.dropout.seed, expected.request.attention.dropout.seed);
    ASSERT_EQ(got.request.layout, expected.request.layout);
    ASSERT_EQ(got.plan.output_bytes, expected.plan.output_bytes);
    ASSERT_EQ(got.plan.input_bytes, expected.plan.input_bytes);
    if (got.plan.input_bytes > 0) {
      ASSERT_EQ(std::memcmp(got.request.input.data(), expected.request.input.data(),
                            static_cast<size_t>(got.plan.input_bytes)),
                0);
    }
    ++compared;
  }
  EXPECT_GT(compared, 200);
  EXPECT_GT(typed, 20);
}

// PlainInfer with typed q, k and v, partly as single numbers and partly packed: q is 0, 1..., k is
// 100, 101..., v is 200, 201...
std::string PlainInferInRuns() {
  ModelInferRequest infer = PlainInfer();
  infer.clear_raw_input_contents();
  std::string wire;
  for (int n = 0; n < 3; ++n) {
    std::string contents;
    for (int i = 0; i < 32; ++i) {
      const float value = static_cast<float>(n * 100 + i);
      // Field 6: 30 single fixed32 values, then two in one packed run.
      if (i == 30) contents += std::string("\x32\x08", 2);
      if (i < 30) contents += '\x35';
      contents.append(reinterpret_cast<const char*>(&value), sizeof(value));
    }
    const std::string tensor = infer.inputs(n).SerializeAsString() + '\x2a' +
                               std::string(1, static_cast<char>((contents.size() & 0x7f) | 0x80)) +
                               std::string(1, static_cast<char>(contents.size() >> 7)) + contents;
    wire += '\x2a' + std::string(1, static_cast<char>((tensor.size() & 0x7f) | 0x80)) +
            std::string(1, static_cast<char>(tensor.size() >> 7)) + tensor;
  }
  infer.clear_inputs();
  return infer.SerializeAsString() + wire;
}

TEST_F(InferRequestTest, TypedNumbersMayBeSplitIntoAnyRuns) {
  std::mt19937_64 random(7);
  Decoded out;
  Decode(format_, Buffer(PlainInferInRuns(), random), out);
  ASSERT_TRUE(out.status.ok()) << out.status.ToString();
  const auto* const k = static_cast<const float*>(out.request.attention.k.data);
  for (int i = 0; i < 32; ++i) EXPECT_EQ(k[i], static_cast<float>(100 + i));
}

// They are counted as array bytes, so that large ones are not decoded on the loop.
TEST_F(InferRequestTest, TypedNumbersCountAsArrayBytes) {
  const auto numbers = [&](const std::string& bytes) {
    std::mt19937_64 random(7);
    MessageSlices slices;
    slices.Take(Buffer(bytes, random));
    RequestMessage message;
    message.slices = slices.spans();
    Request request;
    EXPECT_TRUE(format_.Scan(message, request).ok());
    return message.scan.array_bytes;
  };
  // Per tensor: 30 numbers of 5 bytes and a run of two.
  EXPECT_EQ(numbers(PlainInferInRuns()), 3 * (30 * 5 + 10));
  ModelInferRequest one_run = PlainInfer();
  one_run.clear_raw_input_contents();
  for (auto& each : *one_run.mutable_inputs()) {
    for (int i = 0; i < 32; ++i) each.mutable_contents()->add_fp32_contents(1);
  }
  EXPECT_EQ(numbers(one_run.SerializeAsString()), 0);
}

TEST_F(InferRequestTest, RefusesInputsThatNoModelHas) {
  const auto set = [](auto&& change) { return [=](ModelInferRequest& m) { change(m); }; };
  ExpectRefused(set([](auto& m) { m.set_model_name("resnet"); }), Code::kNotFound,
                "unknown model: 'resnet'");
  ExpectRefused(set([](auto& m) { m.set_model_version("2"); }), Code::kNotFound, "version '2'");
  ExpectRefused(set([](auto& m) { m.mutable_inputs(1)->set_name("keys"); }), Code::kInvalidArgument,
                "unexpected inference input 'keys'");
  ExpectRefused(set([](auto& m) { m.mutable_inputs(1)->set_name("q"); }), Code::kInvalidArgument,
                "'q' is given twice");
  ExpectRefused(set([](auto& m) { m.mutable_inputs(1)->set_name("bias"); }), Code::kInvalidArgument,
                "unexpected inference input 'bias'");
  ExpectRefused(set([](auto& m) {
                  m.mutable_inputs()->RemoveLast();
                  m.mutable_raw_input_contents()->RemoveLast();
                }),
                Code::kInvalidArgument, "input 'v' is missing");
  ExpectRefused(set([](auto& m) { m.mutable_inputs(2)->set_datatype("BF16"); }),
                Code::kInvalidArgument, "v.datatype is 'BF16', must be FP32");
  ExpectRefused(set([](auto& m) { m.set_id(std::string(129, 'x')); }), Code::kInvalidArgument,
                "id has 129 bytes, must have at most 128");
  ExpectRefused(set([](auto& m) {
                  for (int i = 0; i < 11; ++i) m.add_inputs()->set_name("q");
                }),
                Code::kInvalidArgument, "inputs has more than 10 entries");
  ExpectRefused(set([](auto& m) { m.set_model_name(std::string(30000, 'x')); }),
                Code::kInvalidArgument, "must have at most 20480");
}

TEST_F(InferRequestTest, RefusesBytesThatDoNotFitTheirShape) {
  ExpectRefused([](auto& m) { m.mutable_raw_input_contents(1)->resize(127); },
                Code::kInvalidArgument, "k.byte_length is 127, must be 128");
  ExpectRefused([](auto& m) { m.mutable_inputs(0)->set_shape(2, -4); }, Code::kInvalidArgument,
                "q.shape[2] is -4, must be at least 0");
  ExpectRefused(
      [](auto& m) {
        m.mutable_inputs(0)->set_shape(0, INT64_MAX / 2);
        m.mutable_inputs(0)->set_shape(1, INT64_MAX / 2);
      },
      Code::kInvalidArgument, "overflows 64 bits");
  ExpectRefused([](auto& m) { m.mutable_inputs(0)->add_shape(1); }, Code::kInvalidArgument,
                "has 5 dimensions, must have 4");
  ExpectRefused([](auto& m) { m.mutable_raw_input_contents()->RemoveLast(); },
                Code::kInvalidArgument, "unable to find data for input tensor 'v'");
  ExpectRefused([](auto& m) { m.add_raw_input_contents("x"); }, Code::kInvalidArgument,
                "raw_input_contents has 4 entries, must have 3");
  ExpectRefused([](auto& m) { m.clear_raw_input_contents(); }, Code::kInvalidArgument,
                "unable to find data for input tensor 'q'");
  ExpectRefused([](auto& m) { m.mutable_inputs(0)->mutable_contents()->add_fp32_contents(1); },
                Code::kInvalidArgument, "contents field must not be specified");
  ExpectRefused(
      [](auto& m) {
        m.clear_raw_input_contents();
        for (auto& each : *m.mutable_inputs()) each.mutable_contents()->add_int_contents(1);
      },
      Code::kInvalidArgument, "q.contents has field 2, must have field 6");
}

TEST_F(InferRequestTest, RefusesWrongNumbers) {
  const auto packed = [](int32_t last, int64_t shape) {
    return [=](ModelInferRequest& m) {
      for (auto& each : *m.mutable_inputs()) {
        each.clear_shape();
        for (const int64_t dim : {4, 1, 8}) each.add_shape(dim);
      }
      for (const char* const name : {"cu_q", "cu_kv"}) {
        auto* const input = m.add_inputs();
        input->set_name(name);
        input->set_datatype("INT32");
        input->add_shape(shape);
        const int32_t numbers[] = {0, last};
        m.add_raw_input_contents(std::string(reinterpret_cast<const char*>(numbers), 8));
      }
    };
  };
  const std::string model = "attention_fp32_packed_full";
  ModelInferRequest good = PlainInfer(model);
  packed(4, 2)(good);
  EXPECT_TRUE(Refusal(good.SerializeAsString()).ok())
      << Refusal(good.SerializeAsString()).message();
  ExpectRefused(packed(5, 2), Code::kInvalidArgument, "cu_q[1] is 5, must be in [0, 4]", model);
  ExpectRefused(packed(-1, 2), Code::kInvalidArgument, "cu_q[1] is -1, must be at least 0", model);
  ExpectRefused(packed(4, 3), Code::kInvalidArgument, "cu_q.shape is [3], must have the 2", model);
  ExpectRefused(
      [&](auto& m) {
        packed(4, 2)(m);
        m.mutable_inputs(3)->set_datatype("FP32");
      },
      Code::kInvalidArgument, "cu_q.datatype is 'FP32', must be INT32 or INT64", model);
  ExpectRefused(
      [&](auto& m) {
        packed(4, 2)(m);
        m.set_raw_input_contents(3, std::string((5 << 20), '\0'));
      },
      Code::kInvalidArgument, "must have at most 4194304", model);
}

TEST_F(InferRequestTest, RefusesWrongParameters) {
  const auto with = [](const char* name, const auto& set) {
    return [=](ModelInferRequest& m) { set((*m.mutable_parameters())[name]); };
  };
  const auto text = [](const char* value) {
    return [=](inference::InferParameter& p) { p.set_string_param(value); };
  };
  const auto number = [](int64_t value) {
    return [=](inference::InferParameter& p) { p.set_int64_param(value); };
  };
  const Code invalid = Code::kInvalidArgument;
  ExpectRefused(with("sofcap", number(1)), invalid, "parameter sofcap is unknown");
  ExpectRefused(with("triton_x", number(1)), invalid, "parameter triton_x is unknown");
  ExpectRefused(with("alibi_slopes", number(1)), invalid, "parameter alibi_slopes is unknown");
  ExpectRefused(with("scale", text("much")), invalid,
                "parameter scale is \"much\", must be a number");
  ExpectRefused(with("scale", text("1e300")), invalid, "scale is inf");
  ExpectRefused(with("softcap", number(-1)), invalid, "softcap is -1");
  ExpectRefused(with("softcap", text("1e-50")), invalid, "softcap is 1e-45");
  ExpectRefused(with("causal", text("true")), invalid,
                "parameter causal is \"true\", must be false for model");
  ExpectRefused(with("alignment", text("left")), invalid,
                "parameter alignment is \"left\", must be");
  ExpectRefused(with("window_left", number(-2)), invalid, "mask.window_left is -2");
  ExpectRefused(with("priority", number(202)), invalid, "parameter priority is 202, must be an");
  ExpectRefused(with("timeout", number(-1)), invalid, "parameter timeout is -1, must be");
  ExpectRefused(with("o_dtype", text("INT8")), invalid,
                "parameter o_dtype is \"INT8\", must be \"FP32\"");
  ExpectRefused(with("kernel", number(1)), invalid, "parameter kernel is 1, must be a string");
  ExpectRefused(with("sequence_id", number(7)), Code::kUnimplemented, "sessions are in attend.v1");
}

TEST_F(InferRequestTest, RefusesWrongOutputs) {
  ExpectRefused([](auto& m) { m.add_outputs()->set_name("attention"); }, Code::kInvalidArgument,
                "unexpected inference output 'attention'");
  ExpectRefused(
      [](auto& m) {
        m.add_outputs()->set_name("o");
        m.add_outputs()->set_name("o");
      },
      Code::kInvalidArgument, "output 'o' is requested twice");
  ExpectRefused(
      [](auto& m) {
        m.add_outputs()->set_name("o");
        (*m.mutable_outputs(0)->mutable_parameters())["shared_memory_region"].set_string_param("r");
      },
      Code::kInvalidArgument, "output 'o' has no parameter shared_memory_byte_size");
  ExpectRefused(
      [](auto& m) {
        m.add_outputs()->set_name("o");
        auto& parameters = *m.mutable_outputs(0)->mutable_parameters();
        parameters["shared_memory_region"].set_string_param("r");
        parameters["shared_memory_byte_size"].set_int64_param(128);
      },
      Code::kNotFound, "Unable to find shared memory region: 'r'");
  ExpectRefused(
      [](auto& m) {
        m.add_outputs()->set_name("o");
        (*m.mutable_outputs(0)->mutable_parameters())["classification"].set_int64_param(3);
      },
      Code::kUnimplemented, "attention has no classes");
}

}  // namespace
}  // namespace attend
