#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "planner/graph/op_graph.h"

namespace parplan {

class MappedFile;

// Sequences of token ids to train on, from files that are mapped: the processes of a node share one
// copy. A file is a text, read as bytes, or tokens in llm.c's layout (256 int32 of header: magic
// 20240520, version 1, count; then uint16 ids), told apart by the magic number.
class TokenData {
 public:
  // The files' sequences, file after file; none goes on in the next file. With `shuffle`, each
  // epoch has them in an order of its own that follows from this seed alone.
  // ConfigError names the file when it cannot be read or mapped (a pipe, a device), is too short
  // for one sequence, or holds an id that is not below `vocabulary`.
  static TokenData load(std::span<const std::string> paths, std::int64_t sequence, std::int64_t vocabulary,
                        std::optional<std::uint64_t> shuffle = {});
  explicit TokenData(std::vector<std::int32_t> tokens);
  // Records of images in the layout of CIFAR-10's binary version (Krizhevsky 2009,
  // https://www.cs.toronto.edu/~kriz/cifar.html): the class, then the colours of all pixels, a byte
  // each, colour by colour and row by row. The class has two bytes, the lower one first, where
  // there are more than 256. Its sequences are these bytes. ConfigError as above, and where a file
  // does not hold whole records.
  static TokenData load_images(std::span<const std::string> paths, const LabelledImages& images,
                               std::int64_t classes, std::optional<std::uint64_t> shuffle = {});

  // Writes sample `index` of the job (from 0, over all steps), `sequence` + 1 ids, to `to`. Samples
  // follow each other in the data, and start over at its end. RunError where a file was cut off.
  void sample(std::int64_t index, std::int64_t sequence, std::int32_t* to) const;
  // Samples of one epoch.
  std::int64_t samples(std::int64_t sequence) const;
  std::int64_t size() const;  // tokens
  std::optional<std::uint64_t> shuffle() const { return shuffle_; }
  // That of all tokens, in their order.
  std::uint64_t fingerprint() const;

 private:
  // Ids of one file, `width` bytes each.
  struct Shard {
    std::shared_ptr<const MappedFile> file;  // null for tokens in memory
    std::shared_ptr<const std::byte> first;
    std::size_t width = 0;
    std::int64_t tokens = 0;
  };
  static Shard open_shard(const std::string& path, std::int64_t sequence, std::int64_t vocabulary);

  std::vector<Shard> shards_;
  std::int64_t record_ = 0;  // bytes of an image; 0: a text
  std::optional<std::uint64_t> shuffle_;
};

// The place of `index` of [0, count) in an order of them that `seed` gives: each place once.
std::int64_t shuffled(std::int64_t index, std::int64_t count, std::uint64_t seed);

// The sequences of one step, each `sequence` + 1 ids.
struct Batch {
  std::int64_t sequence = 0;
  std::vector<std::int32_t> ids;  // [global batch, sequence + 1]
  // [global batch, sequence], negative where a token has none. Empty: each token's is the next id.
  std::vector<std::int32_t> targets = {};
  // Where a model reads images, instead of ids: [global batch, patches, colours of a patch],
  // colour by colour and row by row as in transformers' ViTPatchEmbeddings.
  std::vector<std::uint8_t> colours = {};
  std::int64_t colours_of_sample = 0, colours_of_patch = 0;
};
// Those of step `step`, from 0.
void fill(Batch& batch, const TokenData& data, std::int64_t step, std::int64_t global_batch);
// `count` samples from number `first` on.
void fill_from(Batch& batch, const TokenData& data, std::int64_t first, std::int64_t count);

// Masks tokens of a batch whose first sample has the number `first` of the job: of each sample,
// `masked.count` positions have their own id for a target. Eight of ten of these become the mask
// token, one any id of the vocabulary, and one stays (Devlin et al. 2019, arXiv:1810.04805, section
// 3.1). Which, follows from the seed and the number of the sample alone, so that every epoch masks
// others (Liu et al. 2019, RoBERTa, arXiv:1907.11692, section 4.1) and no layout changes them.
void mask(Batch& batch, const MaskedTokens& masked, std::int64_t vocabulary, std::int64_t first, std::uint64_t seed);

// Cuts spans out of the texts of a batch, of which a sample takes as many tokens as fill both
// sides, and leaves the rest out. A sample's ids become those that the decoder reads, then the
// encoder's; its targets are the ids that the decoder tells, and none behind them. Which spans,
// follows from the seed and the number of the sample alone, as above.
void corrupt(Batch& batch, const CorruptedSpans& corrupted, std::int64_t vocabulary, std::int64_t first,
             std::uint64_t seed);

// The images and classes of `count` samples from number `first` on: those of the data, or, where it
// holds none, noise and a class that follow from the seed and the number of the sample alone.
void fill_images(Batch& batch, const TokenData& data, const LabelledImages& images, std::int64_t classes,
                 std::int64_t first, std::int64_t count, std::uint64_t seed);

}  // namespace parplan
