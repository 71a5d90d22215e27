#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace parplan {

// A sequence of token ids to train on: a text file as bytes, or tokens in llm.c's layout (256 int32
// of header: magic 20240520, version 1, count; then uint16 ids), told apart by the magic number.
class TokenData {
 public:
  // ConfigError names the file when it cannot be read, is too short for one sequence, or holds an
  // id that is not below `vocabulary`.
  static TokenData load(const std::string& path, std::int64_t sequence, std::int64_t vocabulary);
  explicit TokenData(std::vector<std::int32_t> tokens) : tokens_(std::move(tokens)) {}

  // Writes sample `index` of the job (from 0, over all steps), `sequence` + 1 ids, to `to`. Samples
  // follow each other in the data and start over at its end.
  void sample(std::int64_t index, std::int64_t sequence, std::int32_t* to) const;
  std::int64_t size() const { return static_cast<std::int64_t>(tokens_.size()); }
  std::span<const std::int32_t> tokens() const { return tokens_; }

 private:
  std::vector<std::int32_t> tokens_;
};

// The sequences of one step, each `sequence` + 1 ids.
struct Batch {
  std::int64_t sequence = 0;
  std::vector<std::int32_t> ids;  // [global batch, sequence + 1]
};
// Those of step `step`, from 0.
void fill(Batch& batch, const TokenData& data, std::int64_t step, std::int64_t global_batch);
// `count` samples from number `first` on.
void fill_from(Batch& batch, const TokenData& data, std::int64_t first, std::int64_t count);

}  // namespace parplan
