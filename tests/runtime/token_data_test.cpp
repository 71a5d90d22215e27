#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "planner/base/error.h"
#include "runtime/token_data.h"
#include "tests/temporary_folder.h"

namespace parplan {
namespace {

std::string integers(std::initializer_list<std::int32_t> values) {
  std::string bytes;
  for (const std::int32_t value : values) bytes.append(reinterpret_cast<const char*>(&value), 4);
  return bytes;
}

// llm.c's layout: a header of 256 int32, then uint16 tokens.
std::string llmc(std::int32_t version, std::int32_t promised, std::initializer_list<std::uint16_t> tokens) {
  std::string bytes = integers({20240520, version, promised});
  bytes.resize(1024);
  for (const std::uint16_t token : tokens) bytes.append(reinterpret_cast<const char*>(&token), 2);
  return bytes;
}

std::string message_of(const std::string& path, std::int64_t sequence, std::int64_t vocabulary) {
  try {
    TokenData::load(path, sequence, vocabulary);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("a text is read as bytes and starts over at its end") {
  const testing::TemporaryFolder folder;
  const TokenData data = TokenData::load(folder.write("text.txt", "abcdefghi"), 4, 256);
  CHECK(data.size() == 9);
  std::vector<std::int32_t> sample(5);
  data.sample(0, 4, sample.data());
  CHECK(sample == std::vector<std::int32_t>{'a', 'b', 'c', 'd', 'e'});
  data.sample(1, 4, sample.data());
  CHECK(sample == std::vector<std::int32_t>{'e', 'f', 'g', 'h', 'i'});
  data.sample(2, 4, sample.data());
  CHECK(sample == std::vector<std::int32_t>{'a', 'b', 'c', 'd', 'e'});
}

TEST_CASE("tokens in llm.c's layout are read as tokens") {
  const testing::TemporaryFolder folder;
  const TokenData data = TokenData::load(folder.write("tokens.bin", llmc(1, 4, {7, 50256, 0, 9})), 3, 50257);
  std::vector<std::int32_t> sample(4);
  data.sample(0, 3, sample.data());
  CHECK(sample == std::vector<std::int32_t>{7, 50256, 0, 9});
}

TEST_CASE("data that cannot be trained on is refused with its reason") {
  const testing::TemporaryFolder folder;
  const std::string file = folder.path("tokens.bin");
  const auto refusal = [&](const std::string& bytes, std::int64_t sequence, std::int64_t vocabulary) {
    return message_of(folder.write("tokens.bin", bytes), sequence, vocabulary);
  };
  CHECK(refusal("abc", 3, 256) == file + ": error: 3 tokens; one sequence takes 3 and the token after it");
  CHECK(refusal("abcd", 3, 99) ==
        file +
            ": error: token 100 at position 3; the model's vocabulary ends at 98; give others with --data (each byte "
            "of a text is a token, as of the default; or tokens in llm.c's layout)");
  CHECK(refusal(llmc(2, 4, {1, 2, 3, 4}), 3, 256) ==
        file + ": error: token file of version 2; version 1 (uint16 tokens) can be read");
  CHECK(refusal(llmc(1, 5, {1, 2, 3, 4}), 3, 256) ==
        file + ": error: the header promises 5 tokens, 1034 bytes; the file has 1032");
  CHECK(message_of("no-such-file.txt", 3, 256) == "error: cannot read 'no-such-file.txt': No such file or directory");
}

}  // namespace parplan
