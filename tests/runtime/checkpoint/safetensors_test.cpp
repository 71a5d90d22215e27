#include "runtime/checkpoint/safetensors.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "runtime/checkpoint/checkpoint_index.h"
#include "runtime/checkpoint/crc32.h"
#include "tests/temporary_folder.h"

namespace parplan {
namespace {

// A file with this header and as many bytes of tensors.
std::string file_of(const std::string& header, std::size_t data, std::uint64_t length) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + header + std::string(data, 'x');
}
std::string file_of(const std::string& header, std::size_t data) {
  return file_of(header, data, header.size());
}

std::string refusal_of(const std::string& bytes) {
  try {
    parse_safetensors_header(bytes, static_cast<std::int64_t>(bytes.size()), "f");
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

const std::string entry_a = R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";

TEST_CASE("a header reads back as it was written, and tensors begin at a multiple of 64 bytes") {
  const SafetensorsHeader header{.entries = {{.name = "a", .dtype = "F32", .shape = {2, 3}, .begin = 0, .end = 24},
                                             {.name = "b", .dtype = "BF16", .shape = {}, .begin = 24, .end = 26},
                                             {.name = "c", .dtype = "F32", .shape = {0}, .begin = 26, .end = 26}},
                                 .metadata = {{"format", "pt"}},
                                 .data_begin = 0};
  const std::string written = write_safetensors_header(header);
  CHECK(written.size() % 64 == 0);
  const std::string file = written + std::string(26, 'x');
  SafetensorsHeader read = parse_safetensors_header(file, static_cast<std::int64_t>(file.size()), "f");
  CHECK(read.data_begin == static_cast<std::int64_t>(written.size()));
  read.data_begin = 0;
  CHECK(read == header);
}

TEST_CASE("what is no safetensors file is refused with the place") {
  struct Case {
    std::string file, message;
  };
  const std::vector<Case> cases = {
      {"short", "f: error: 5 bytes; a safetensors file has at least 8"},
      {file_of("{}", 0, 1'000'000'000),
       "f: error: a header of 1000000000 bytes is promised, at most 100000000 are "
       "read; this is no safetensors file"},
      {file_of("{}", 0, ~std::uint64_t{0}),
       "f: error: a header of 9223372036854775807 bytes is promised, at most 100000000 are read; this is no "
       "safetensors file"},
      {file_of("{}", 0, 3), "f: error: a header of 3 bytes is promised, and the file has 10 bytes: it is cut off"},
      {file_of("[]", 0), "f: error: the header at byte 8 does not begin with '{'"},
      {file_of("{\"a\":", 0), "f: error: invalid JSON at byte 6 of 5"},
      {file_of("{\"a\":1}", 0), "f: error: tensor \"a\": expected an object, found 1"},
      {file_of("{" + entry_a + "," + entry_a + "}", 8), "f: error: the key \"a\" stands there twice"},
      {file_of(R"({"a":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}})", 8),
       "f: error: the key \"dtype\" stands there twice"},
      {file_of("{" + entry_a + R"(,"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", 12),
       "f: error: tensor \"b\": its bytes begin at 4, within those of the one before, which end at 8"},
      {file_of("{" + entry_a + R"(,"b":{"dtype":"F32","shape":[2],"data_offsets":[12,20]}})", 20),
       "f: error: tensor \"b\": its bytes begin at 12, behind those of the one before, which end at 8"},
      {file_of("{" + entry_a + "}", 12), "f: error: the tensors end at byte 8 of 12 behind the header"},
      {file_of("{" + entry_a + "}", 4), "f: error: tensor \"a\": bytes 0 to 8 of 4 bytes of tensors"},
      {file_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8),
       "f: error: tensor \"a\": bytes 8 to 0 of 8 bytes of tensors"},
      {file_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}})", 8),
       "f: error: tensor \"a\".data_offsets: expected a whole number of at least 0, found -8"},
      {file_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,18446744073709551615]}})", 8),
       "f: error: tensor \"a\".data_offsets: expected a whole number of at least 0, found 18446744073709551615"},
      {file_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,1e400]}})", 8),
       "f: error: a number in it is too large"},
      {file_of(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8),
       "f: error: tensor \"a\": 8 bytes from 0 to 8; F32 of shape [3] takes 12"},
      {file_of(R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]}})", 8),
       "f: error: tensor \"a\": 8 bytes from 0 to 8; F32 of shape [4611686018427387904, 4] takes more than there can "
       "be"},
      {file_of(R"({"a":{"dtype":"F4","shape":[2],"data_offsets":[0,8]}})", 8),
       "f: error: tensor \"a\": unknown dtype \"F4\"; allowed: BOOL, U8, I8, F8_E5M2, F8_E4M3, F8_E8M0, I16, U16, "
       "F16, BF16, I32, U32, F32, F64, I64, U64"},
      {file_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}})", 8),
       "f: error: tensor \"a\": unknown key \"x\"; allowed: dtype, shape, data_offsets"},
      {file_of(R"({"a":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,2],"data_offsets":[0,8]}})", 8),
       "f: error: tensor \"a\": 9 dims; at most 8"},
      {file_of("{\"\x1b[2J\":1}", 0), "f: error: invalid JSON at byte 3 of 10"},
      {file_of(R"({"\u001b[2J":1})", 0), "f: error: tensor \"\\u001b[2J\": expected an object, found 1"},
      {file_of(R"({"__metadata__":{"a":1}})", 0), "f: error: __metadata__: expected a text, found 1"},
      {file_of(std::string(100'000, '[').insert(0, "{\"a\":") + "}", 0),
       "f: error: JSON of more than 8 levels; no such file has them"},
  };
  for (const Case& one : cases) {
    CAPTURE(one.message);
    CHECK(refusal_of(one.file) == one.message);
  }
}

TEST_CASE("headers that were altered anywhere are read or refused, and nothing else") {
  std::mt19937 random(20261122);
  const std::string good = file_of("{\"__metadata__\":{\"format\":\"pt\"}," + entry_a +
                                       R"(,"b":{"dtype":"BF16","shape":[2,1],"data_offsets":[8,12]}})",
                                   12);
  CHECK(refusal_of(good).empty());
  int refused = 0;
  constexpr int trials = 20'000;
  for (int trial = 0; trial < trials; ++trial) {
    std::string bytes = good;
    for (std::uint32_t edits = 1 + random() % 3; edits > 0; --edits) {
      const std::size_t at = random() % bytes.size();
      switch (random() % 4) {
        case 0:
          bytes[at] = static_cast<char>(random());
          break;
        case 1:
          bytes.erase(at, 1 + random() % 4);
          break;
        case 2:
          bytes.insert(at, 1, "[]{}:,\"0123456789-e."[random() % 20]);
          break;
        default:
          bytes = bytes.substr(0, at);
          break;
      }
      if (bytes.empty()) break;
    }
    if (!refusal_of(bytes).empty()) ++refused;
  }
  CHECK(refused > trials / 2);
  CHECK(refused < trials);
}

TEST_CASE("files are read from the disk, and folders, pipes and missing files are refused") {
  const testing::TemporaryFolder folder;
  const std::string file = folder.write("a.safetensors", file_of("{" + entry_a + "}", 8));
  CHECK(read_safetensors_header(file).entries.size() == 1);
  CHECK_THROWS_WITH_AS(read_safetensors_header(folder.path("none")),
                       fmt::format("error: cannot read '{}': No such file or directory", folder.path("none")).c_str(),
                       ConfigError);
  CHECK_THROWS_WITH_AS(read_safetensors_header(folder.root().string()),
                       fmt::format("error: cannot read '{}': it is no regular file", folder.root().string()).c_str(),
                       ConfigError);
  CHECK_THROWS_AS(read_safetensors_header("/dev/zero"), ConfigError);
}

TEST_CASE("checksums are those of zlib, in whatever pieces the bytes come") {
  const std::string text = "123456789";
  for (std::size_t cut = 0; cut <= text.size(); ++cut) {
    Crc32 crc;
    crc.add(std::as_bytes(std::span(text).first(cut)));
    crc.add(std::as_bytes(std::span(text).subspan(cut)));
    CHECK(crc.value() == 0xCBF43926u);  // the check value of CRC-32/ISO-HDLC
  }
}

CheckpointIndex small_index() {
  CheckpointIndex index{.step = 7, .skipped_steps = 1, .next_sample = 56, .loss_scale = LossScale{.scale = 3.0f}};
  index.model = "name: a\nlayers: 2\n";
  index.facts = {{"optimizer", "adamw"}, {"seed", "1"}};
  index.files = {{.name = "one.safetensors", .bytes = 100, .crc32 = 0xABu}, {.name = "two.safetensors", .bytes = 9}};
  index.tensors = {
      {.name = "w",
       .dtype = "F32",
       .shape = {4, 3},
       .parts = {{.file = 0, .slice = {.rows = 4, .columns = 2}},
                 {.file = 1, .slice = {.column = 2, .rows = 4, .columns = 1}}}},
      {.name = "b", .dtype = "F32", .shape = {5}, .parts = {{.file = 1, .slice = {.rows = 5, .columns = 1}}}}};
  return index;
}

TEST_CASE("an index reads back as it was written") {
  const CheckpointIndex index = small_index();
  const std::string text = write_index(index);
  const CheckpointIndex read = read_index(text, "checkpoint.json");
  CHECK(write_index(read) == text);
  CHECK(read.step == 7);
  CHECK(read.skipped_steps == 1);
  CHECK(read.next_sample == 56);
  CHECK(read.loss_scale->scale == 3.0f);
  CHECK(read.model == index.model);
  CHECK(read.facts == index.facts);
  CHECK(read.files == index.files);
  CHECK(read.tensors == index.tensors);
}

TEST_CASE("an index that was altered in any byte is refused") {
  const std::string text = write_index(small_index());
  for (std::size_t at = 0; at < text.size(); ++at) {
    std::string altered = text;
    altered[at] = static_cast<char>(altered[at] ^ 1);
    CHECK_THROWS_AS(read_index(altered, "i"), ConfigError);
    CHECK_THROWS_AS(read_index(text.substr(0, at), "i"), ConfigError);
  }
}

TEST_CASE("an index whose parts overlap, leave something out or lie elsewhere is refused") {
  const auto refusal = [](const auto& change) {
    CheckpointIndex index = small_index();
    change(index);
    try {
      read_index(write_index(index), "i");
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(refusal([](CheckpointIndex& i) { i.tensors[0].parts[1].slice.column = 1; }) ==
        "i: error: tensors.\"w\": the parts at [0, 0] and [0, 1] overlap");
  CHECK(refusal([](CheckpointIndex& i) { i.tensors[0].parts.pop_back(); }) ==
        "i: error: tensors.\"w\": the parts have 8 elements of 12");
  CHECK(refusal([](CheckpointIndex& i) { i.tensors[0].parts[1].slice.column = 3; }) ==
        "i: error: tensors.\"w\".parts[1]: [4, 1] from [0, 3] on does not lie in [4, 3]");
  CHECK(refusal([](CheckpointIndex& i) { i.tensors[0].parts[1].slice.row = INT64_MAX; }) ==
        "i: error: tensors.\"w\".parts[1]: [4, 1] from [9223372036854775807, 2] on does not lie in [4, 3]");
  CHECK(refusal([](CheckpointIndex& i) { i.tensors[1].parts[0].file = 2; }) ==
        "i: error: tensors.\"b\".parts[0].file: 2 of 2 files");
  CHECK(refusal([](CheckpointIndex& i) {
          i.tensors[0].shape = {INT64_MAX, 4};
        }) == "i: error: tensors.\"w\".shape: [9223372036854775807, 4] cannot be");
  CHECK(refusal([](CheckpointIndex& i) { i.files[1].name = "../two"; }) ==
        "i: error: files[1].name: a file of this folder is wanted, found \"../two\"");
  CHECK(refusal([](CheckpointIndex& i) { i.files[1].name = i.files[0].name; }) ==
        "i: error: files: one.safetensors stands there twice");
}

}  // namespace
}  // namespace parplan
