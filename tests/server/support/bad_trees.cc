// SPDX-License-Identifier: Apache-2.0
//
// Bad trees, and what the server must say of each.

#include <limits>

#include "tests/server/support/bad_requests.h"

namespace attend::test {
namespace {

// A tree of three tokens has a row of bits in each byte.
void AddTree(v1::AttendRequest& r) {
  r.set_tree("\x01\x03\x05");
  r.set_tree_tokens(3);
}

std::vector<BadRequest> BadForms() {
  return {
      {"more tokens than a draft may have",
       [](auto& r) {
         r.set_tree(std::string(1025 * 129, '\xff'));
         r.set_tree_tokens(1025);
       },
       {"tree_tokens is 1025, must be in [1, 1024]"}},
      {"no number of tokens",
       [](auto& r) { r.set_tree("\x01"); },
       {"tree_tokens is 0, must be in [1, 1024]"}},
      {"least number of tokens",
       [](auto& r) {
         AddTree(r);
         r.set_tree_tokens(std::numeric_limits<int64_t>::min());
       },
       {"tree_tokens is -9223372036854775808, must be in [1, 1024]"}},
      {"tokens without a tree",
       [](auto& r) { r.set_tree_tokens(3); },
       {"tree_tokens is 3, must be 0 without a tree"}},
      {"lengths without a tree",
       [](auto& r) { r.add_tree_lengths(3); },
       {"tree_lengths has 1 entries, must have none without a tree"}},
      {"a row of bits too few",
       [](auto& r) {
         AddTree(r);
         r.set_tree("\x01\x03");
       },
       {"tree has 2 bytes, must have 3, those of one tree of 3 tokens, or 3, those of B = 1"}},
      {"two trees of one sequence",
       [](auto& r) {
         AddTree(r);
         r.set_tree(r.tree() + r.tree());
       },
       {"tree has 6 bytes, must have 3"}},
      {"nine bits to a row",
       [](auto& r) {
         r.set_tree(std::string(9, '\xff'));
         r.set_tree_tokens(9);
       },
       {"tree has 9 bytes, must have 18"}},
  };
}

}  // namespace

std::vector<BadRequest> BadTrees() {
  std::vector<BadRequest> all = BadForms();
  const std::vector<BadRequest> others = {
      {"lengths of two sequences",
       [](auto& r) {
         AddTree(r);
         r.add_tree_lengths(3);
         r.add_tree_lengths(3);
       },
       {"tree_lengths has 2 entries, must have B = 1, or 0"}},
      {"a draft longer than its tree",
       [](auto& r) {
         AddTree(r);
         r.add_tree_lengths(4);
       },
       {"tree_lengths[0] is 4, must be in [0, 3]: the tree has 3 tokens"}},
      {"a negative draft",
       [](auto& r) {
         AddTree(r);
         r.add_tree_lengths(-1);
       },
       {"tree_lengths[0] is -1, must be in [0, 3]: the tree has 3 tokens"}},
      {"a draft of more tokens than queries",
       [](auto& r) {
         AddTree(r);
         r.add_q_lengths(2);
       },
       {"tree_tokens is 3, must be in [0, 2]: sequence 0 has 2 queries and 8 keys"}},
      {"a draft of more tokens than keys",
       [](auto& r) {
         AddTree(r);
         r.add_tree_lengths(2);
         r.add_kv_lengths(1);
       },
       {"tree_lengths[0] is 2, must be in [0, 1]: sequence 0 has 8 queries and 1 keys"}},
      {"a tree and a bias",
       [](auto& r) {
         AddTree(r);
         r.mutable_bias()->set_dtype(v1::DTYPE_BIT);
         for (const int64_t dim : {1, 1, 1, 8}) r.mutable_bias()->add_shape(dim);
         r.add_raw("\xff");
       },
       {"tree has 3 bytes, must be empty with a bias"}},
      {"a tree and keys after it",
       [](auto& r) {
         AddTree(r);
         r.mutable_mask()->set_keys_after(5);
       },
       {"mask.keys_after is 5, must be 0 with a tree"}},
  };
  all.insert(all.end(), others.begin(), others.end());
  return all;
}

}  // namespace attend::test
