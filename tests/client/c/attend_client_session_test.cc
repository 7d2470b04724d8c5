// SPDX-License-Identifier: Apache-2.0
//
// Sessions and streams of the C interface, and the server's information.

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "client/c/attend_client.h"
#include "tests/client/c/c_calls.h"

namespace attend::client::c::test {
namespace {

TEST(AttendClientCSessions, StreamsAndSessionsHaveTheBitsOfCalls) {
  attend_client* const client = Open();
  const attend_client_layer_shape shape = {ATTEND_CLIENT_FLOAT32, 0, 1, kDim, 0};
  attend_client_session_options options = {};
  options.struct_bytes = sizeof(options);
  options.shapes = &shape;
  options.shapes_count = 1;
  options.layers = 2;
  attend_client_session* session = nullptr;
  ASSERT_EQ(attend_client_session_create(client, &options, &session), ATTEND_CLIENT_OK)
      << attend_client_last_error();
  EXPECT_EQ(std::strlen(attend_client_session_id(session)), 32u);
  EXPECT_EQ(attend_client_session_layers(session), 2);
  EXPECT_EQ(attend_client_session_length(session, 2), -1);
  attend_client_stream* stream = nullptr;
  ASSERT_EQ(attend_client_stream_open(client, nullptr, nullptr, nullptr, 0, &stream),
            ATTEND_CLIENT_OK);
  Case c;
  c.params.request = "mask { kind: KIND_CAUSAL_BOTTOM_RIGHT }";
  for (const bool streamed : {false, true}) {
    attend_client_call* call = nullptr;
    ASSERT_EQ(attend_client_session_start(&session, 1, streamed ? 1 : 0,
                                          streamed ? stream : nullptr, &c.params, &call),
              ATTEND_CLIENT_OK);
    Call own(call);
    const attend_client_answer answer = own.Answer();
    ASSERT_EQ(answer.code, ATTEND_CLIENT_OK) << answer.message;
    ASSERT_EQ(answer.session_lengths.count, 1);
    EXPECT_EQ(answer.session_lengths.data[0], kRows);
    ExpectClose(static_cast<const float*>(answer.o.data), Right(c, true));
    EXPECT_EQ(attend_client_session_length(session, streamed ? 1 : 0), kRows);
  }
  attend_client_call* plain = nullptr;
  ASSERT_EQ(attend_client_stream_start(stream, &c.params, &plain), ATTEND_CLIENT_OK);
  EXPECT_EQ(Call(plain).Answer().code, ATTEND_CLIENT_OK);
  EXPECT_EQ(attend_client_stream_finish(stream), ATTEND_CLIENT_OK);
  attend_client_stream_close(stream);

  attend_client_session* fork = nullptr;
  ASSERT_EQ(attend_client_session_fork(session, 5, &fork), ATTEND_CLIENT_OK);
  EXPECT_EQ(attend_client_session_length(fork, 0), 5);
  const int64_t kept[] = {1, 2};
  EXPECT_EQ(attend_client_session_keep_draft(fork, 1, kept, 2), ATTEND_CLIENT_OK);
  EXPECT_EQ(attend_client_session_length(fork, 0), 3);
  EXPECT_EQ(attend_client_session_keep_draft(fork, 1, nullptr, 2), ATTEND_CLIENT_INVALID_ARGUMENT);
  ExpectSays("kept");
  EXPECT_EQ(attend_client_session_keep_draft(fork, 1, kept, -1), ATTEND_CLIENT_INVALID_ARGUMENT);
  ExpectSays("count is -1");
  EXPECT_EQ(attend_client_session_truncate(fork, 3), ATTEND_CLIENT_OK);
  EXPECT_EQ(attend_client_session_keep_alive(fork), ATTEND_CLIENT_OK);
  char* json = nullptr;
  ASSERT_EQ(attend_client_session_get(fork, &json), ATTEND_CLIENT_OK);
  EXPECT_NE(std::string(json).find("\"length\":3"), std::string::npos) << json;
  attend_client_string_free(json);
  EXPECT_EQ(attend_client_session_end(fork), ATTEND_CLIENT_OK);
  EXPECT_EQ(attend_client_session_truncate(fork, 1), ATTEND_CLIENT_FAILED_PRECONDITION);
  ExpectSays("has ended");
  attend_client_session_free(fork, 0);
  EXPECT_EQ(attend_client_session_open(client, "nonsense", &options, &fork),
            ATTEND_CLIENT_INVALID_ARGUMENT);
  ExpectSays("id is \"nonsense\"");
  attend_client_session_free(session, 0);
  ASSERT_EQ(attend_client_session_list(client, nullptr, 0, &json), ATTEND_CLIENT_OK);
  EXPECT_EQ(std::string(json), "{\"sessions\":[],\"more\":false}");
  attend_client_string_free(json);
  attend_client_close(client);
}

TEST(AttendClientCSessions, ARefusedCallsCallbackMayEndTheSessionAndFreeTheCall) {
  attend_client* const client = Open();
  const attend_client_layer_shape shape = {0, 0, 1, kDim, 0};  // float32 by default
  attend_client_session_options options = {};
  options.struct_bytes = sizeof(options);
  options.shapes = &shape;
  options.shapes_count = 1;
  struct Made {
    attend_client_session* session = nullptr;
    attend_client_call* call = nullptr;
    int32_t ended = -1;
  } made;
  ASSERT_EQ(attend_client_session_create(client, &options, &made.session), ATTEND_CLIENT_OK)
      << attend_client_last_error();
  Case c;
  c.params.q.dtype = 9;
  c.params.user = &made;
  c.params.done = [](void* user) {
    auto* const made = static_cast<Made*>(user);
    made->ended = attend_client_session_end(made->session);
    attend_client_call_free(made->call);
  };
  ASSERT_EQ(attend_client_session_start(&made.session, 1, 0, nullptr, &c.params, &made.call),
            ATTEND_CLIENT_OK);
  EXPECT_EQ(made.ended, ATTEND_CLIENT_OK);
  attend_client_session_free(made.session, 0);
  attend_client_close(client);
}

TEST(AttendClientCSessions, ReturnsInfoAndHealth) {
  attend_client* const client = Open();
  char* json = nullptr;
  ASSERT_EQ(attend_client_info(client, 0, &json), ATTEND_CLIENT_OK);
  const std::string text = json;
  attend_client_string_free(json);
  for (const char* words : {"\"devices\":[{\"name\":\"cpu\"", "\"request_bytes_max\":", "DTYPE_"}) {
    EXPECT_NE(text.find(words), std::string::npos) << text;
  }
  int32_t health = 0;
  ASSERT_EQ(attend_client_health(client, nullptr, 0, &health), ATTEND_CLIENT_OK);
  EXPECT_EQ(health, ATTEND_CLIENT_SERVING);
  EXPECT_EQ(attend_client_health(client, "no.such", 1'000'000'000, &health),
            ATTEND_CLIENT_NOT_FOUND);
  attend_client_close(client);
}

}  // namespace
}  // namespace attend::client::c::test
