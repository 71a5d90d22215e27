#include "runtime/token_data.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "planner/base/error.h"
#include "planner/base/file.h"

namespace parplan {
namespace {

constexpr std::int32_t llmc_magic = 20240520;
constexpr std::size_t llmc_header_bytes = 256 * 4;

std::int32_t integer_at(const std::string& bytes, std::size_t index) {
  std::int32_t value = 0;
  std::memcpy(&value, bytes.data() + 4 * index, 4);
  return value;
}

}  // namespace

TokenData TokenData::load(const std::string& path, std::int64_t sequence, std::int64_t vocabulary) {
  const std::string bytes = read_file(path);
  std::vector<std::int32_t> tokens;
  if (bytes.size() >= llmc_header_bytes && integer_at(bytes, 0) == llmc_magic) {
    if (integer_at(bytes, 1) != 1)
      throw ConfigError(
          {path}, fmt::format("token file of version {}; version 1 (uint16 tokens) can be read", integer_at(bytes, 1)));
    const std::size_t count = static_cast<std::size_t>(std::max(integer_at(bytes, 2), 0));
    if (bytes.size() != llmc_header_bytes + 2 * count)
      throw ConfigError({path}, fmt::format("the header promises {} tokens, {} bytes; the file has {}", count,
                                            llmc_header_bytes + 2 * count, bytes.size()));
    tokens.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      std::uint16_t token = 0;
      std::memcpy(&token, bytes.data() + llmc_header_bytes + 2 * i, 2);
      tokens[i] = token;
    }
  } else {
    tokens.reserve(bytes.size());
    for (const char c : bytes) tokens.push_back(static_cast<unsigned char>(c));
  }
  if (static_cast<std::int64_t>(tokens.size()) < sequence + 1)
    throw ConfigError({path},
                      fmt::format("{} tokens; one sequence takes {} and the token after it", tokens.size(), sequence));
  const auto largest = std::max_element(tokens.begin(), tokens.end());
  if (*largest >= vocabulary)
    throw ConfigError({path}, fmt::format("token {} at position {}; the model's vocabulary ends at {}; give others "
                                          "with --data (each byte of a text is a token, as "
                                          "of the default; or tokens in llm.c's layout)",
                                          *largest, largest - tokens.begin(), vocabulary - 1));
  return TokenData(std::move(tokens));
}

void TokenData::sample(std::int64_t index, std::int64_t sequence, std::int32_t* to) const {
  const std::int64_t starts = std::max<std::int64_t>((size() - 1) / sequence, 1);
  const std::int64_t begin = index % starts * sequence;
  std::copy_n(tokens_.begin() + begin, sequence + 1, to);
}

void fill(Batch& batch, const TokenData& data, std::int64_t step, std::int64_t global_batch) {
  fill_from(batch, data, step * global_batch, global_batch);
}

void fill_from(Batch& batch, const TokenData& data, std::int64_t first, std::int64_t count) {
  const std::int64_t stride = batch.sequence + 1;
  batch.ids.resize(static_cast<std::size_t>(count * stride));
  for (std::int64_t i = 0; i < count; ++i) data.sample(first + i, batch.sequence, batch.ids.data() + i * stride);
}

}  // namespace parplan
