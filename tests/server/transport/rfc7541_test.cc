// SPDX-License-Identifier: Apache-2.0
//
// RFC 7541: HPACK. A block that cannot be decoded is a connection error (RFC 9113, 4.3).

#include "tests/server/support/violations.h"

namespace attend::http2 {
namespace {

class Rfc7541 : public Violations {};

TEST_P(Rfc7541, ViolationsAreConnectionErrors) {
  Judge(GetParam(), std::string(kPreface) + Settings() + SettingsAck());
}

Verdict Undecodable() { return Connection(NGHTTP2_COMPRESSION_ERROR); }
// A request with these bytes at the end of its header block, or at its beginning.
std::string With(std::string_view bytes) { return Headers(1, Fields().append(bytes)); }
std::string After(std::string_view bytes) { return Headers(1, std::string(bytes) + Fields()); }
// A header with the name "a" and a Huffman-coded value of these bytes.
std::string Coded(std::string_view bytes) {
  return std::string(1, '\0') + Text("a") + Integer(bytes.size(), 7, 0x80).append(bytes);
}
// A header that is added to the dynamic table.
std::string Kept(std::string_view name, std::string_view value) {
  return "\x40" + Text(name) + Text(value);
}

constexpr uint64_t kFirst = 62;  // index of the dynamic table
constexpr uint64_t kBytesMax = 4096;

const Rule kTables[] = {
    {"2.3.2", "newest entry", With(Kept("key", "value") + Indexed(kFirst)), Taken()},
    {"2.3.2", "entry of an earlier block",
     Headers(1, Fields() + Kept("key", "value")) + Headers(3, Fields() + Indexed(kFirst)), Taken()},
    {"2.3.3", "index beyond the tables", With(Indexed(kFirst)), Undecodable()},
    {"2.3.3", "index beyond a table of one", With(Kept("key", "value") + Indexed(kFirst + 1)),
     Undecodable()},
    {"4.2", "table of no bytes", After(TableSize(0)), Taken()},
    {"4.2", "two sizes", After(TableSize(0) + TableSize(kBytesMax)), Taken()},
    {"4.2", "size after a header", With(TableSize(0)), Undecodable()},
    {"4.2", "size between two headers", With(TableSize(0) + Field("key", "value")), Undecodable()},
    {"4.3", "entry that a smaller table has lost",
     Headers(1, Fields() + Kept("key", "value")) +
         Headers(3, TableSize(0) + TableSize(kBytesMax) + Fields() + Indexed(kFirst)),
     Undecodable()},
    {"4.4", "entry larger than the table",
     Headers(1, TableSize(34) + Fields() + Kept("key", "value")), Taken()},
    {"4.4", "entry that was larger than the table",
     Headers(1, TableSize(34) + Fields() + Kept("key", "value") + Indexed(kFirst)), Undecodable()},
};
INSTANTIATE_TEST_SUITE_P(Tables, Rfc7541, ::testing::ValuesIn(kTables), NameOf);

const Rule kForms[] = {
    {"5.1", "integer of two bytes", With(Field("key", std::string(127, 'v'))), Taken()},
    {"5.1", "integer of more bytes than it needs",
     With(std::string(1, '\0') + Text("key") + std::string("\x7f\x80\x80\x00", 4) +
          std::string(127, 'v')),
     Taken()},
    {"5.1", "integer beyond 64 bits", With("\xff" + std::string(10, '\xff') + "\x01"),
     Undecodable()},
    {"5.1", "integer that does not end", With("\xff\x80\x80"), Undecodable()},
    {"5.2", "Huffman's code", With(Coded("\x63")), Taken()},
    {"5.2", "padding of zeros", With(Coded("\x60")), Undecodable()},
    {"5.2", "padding of eight bits", With(Coded("\x63\xff")), Undecodable()},
    {"5.2", "end of string within one", With(Coded("\xff\xff\xff\xff")), Undecodable()},
    {"5.2", "text beyond its block", With(std::string(1, '\0') + Text("key") + Integer(9, 7) + "v"),
     Undecodable()},
    {"5.2", "length beyond its block",
     With(std::string(1, '\0') + Text("key") + Integer(1 << 30, 7)), Undecodable()},
    {"5.2", "name without a value", With(std::string(1, '\0') + Text("key")), Undecodable()},
    {"6.1", "index of nothing", With(Indexed(0)), Undecodable()},
    {"6.2.1", "name beyond the tables", With(Integer(kFirst, 6, 0x40) + Text("value")),
     Undecodable()},
    {"6.2.2", "name beyond the tables", With(Integer(kFirst, 4) + Text("value")), Undecodable()},
    {"6.2.3", "header that is never kept", With("\x10" + Text("key") + Text("value")), Taken()},
    {"6.2.3", "name beyond the tables", With(Integer(kFirst, 4, 0x10) + Text("value")),
     Undecodable()},
    {"6.3", "largest table", After(TableSize(kBytesMax)), Taken()},
    {"6.3", "table beyond the largest", After(TableSize(kBytesMax + 1)), Undecodable()},
};
INSTANTIATE_TEST_SUITE_P(Forms, Rfc7541, ::testing::ValuesIn(kForms), NameOf);

}  // namespace
}  // namespace attend::http2
