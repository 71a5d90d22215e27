#include "runtime/token_data.h"

#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "planner/base/allocated.h"
#include "planner/base/error.h"
#include "runtime/checkpoint/mapped_file.h"
#include "runtime/launch/fingerprint.h"

namespace parplan {
namespace {

constexpr std::int32_t llmc_magic = 20240520;
constexpr std::size_t llmc_header_bytes = 256 * 4;

std::shared_ptr<const MappedFile> map_tokens(const std::string& path) {
  struct stat found {};
  const bool is_known = stat(path.c_str(), &found) == 0;
  if (is_known && S_ISDIR(found.st_mode))
    throw ConfigError(fmt::format("cannot read '{}': {}", path, std::strerror(EISDIR)));
  if (is_known && !S_ISREG(found.st_mode))
    throw ConfigError(fmt::format("'{}' is no regular file: its tokens are read in any order; write what comes from a "
                                  "pipe or a device to a file first",
                                  path));
  return std::make_shared<const MappedFile>(path);
}

std::int32_t integer_at(const std::byte* bytes, std::size_t index) {
  std::int32_t value = 0;
  std::memcpy(&value, bytes + 4 * index, 4);
  return value;
}

std::int32_t token_at(const std::byte* first, std::size_t width, std::int64_t index) {
  const std::byte* const at = first + static_cast<std::size_t>(index) * width;
  if (width == 1) return static_cast<unsigned char>(*at);
  if (width == 4) return integer_at(at, 0);
  std::uint16_t token = 0;
  std::memcpy(&token, at, 2);
  return token;
}

std::int64_t samples_of(std::int64_t tokens, std::int64_t sequence) {
  return std::max<std::int64_t>((tokens - 1) / sequence, 1);
}

// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
std::uint64_t mixed(std::uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

constexpr std::int64_t bytes_of_class(std::int64_t classes) {
  return classes > 256 ? 2 : 1;
}
std::int32_t class_at(const std::byte* record, std::int64_t bytes) {
  return std::to_integer<std::int32_t>(record[0]) + (bytes > 1 ? 256 * std::to_integer<std::int32_t>(record[1]) : 0);
}

// The lengths of `count` parts, each at least 1, of a text of `length`: all divisions are equally
// likely, as in T5's `_random_segmentation`.
std::vector<std::int64_t> random_parts(std::int64_t length, std::int64_t count, std::uint64_t seed) {
  std::vector<std::int64_t> ends;
  for (std::int64_t i = 0; i + 1 < count; ++i) ends.push_back(1 + shuffled(i, length - 1, seed));
  ends.push_back(length);
  std::ranges::sort(ends);
  std::adjacent_difference(ends.begin(), ends.end(), ends.begin());
  return ends;
}

}  // namespace

// A Feistel network over the next power of four, walked until it is within the range (Black and
// Rogaway, CT-RSA 2002): an order without a table of it.
std::int64_t shuffled(std::int64_t index, std::int64_t count, std::uint64_t seed) {
  if (count <= 1) return index;
  const int half = (std::bit_width(static_cast<std::uint64_t>(count) - 1) + 1) / 2;
  const std::uint64_t mask = (std::uint64_t{1} << half) - 1;
  std::uint64_t value = static_cast<std::uint64_t>(index);
  do {
    std::uint64_t left = value >> half, right = value & mask;
    for (std::uint64_t round = 0; round < 4; ++round)
      left = std::exchange(right, left ^ (mixed(mixed(seed + round) ^ right) & mask));
    value = left << half | right;
  } while (value >= static_cast<std::uint64_t>(count));
  return static_cast<std::int64_t>(value);
}

TokenData::TokenData(std::vector<std::int32_t> tokens) {
  const auto owned = std::make_shared<const std::vector<std::int32_t>>(std::move(tokens));
  shards_.push_back({.file = {},
                     .first = std::shared_ptr<const std::byte>(owned, std::as_bytes(std::span(*owned)).data()),
                     .width = 4,
                     .tokens = std::ssize(*owned)});
}

TokenData::Shard TokenData::open_shard(const std::string& path, std::int64_t sequence, std::int64_t vocabulary) {
  const std::shared_ptr<const MappedFile> mapped = map_tokens(path);
  const std::byte* const first = mapped->bytes().data();
  const std::size_t bytes = mapped->bytes().size();
  const auto at = [&](const std::byte* from) { return std::shared_ptr<const std::byte>(mapped, from); };
  Shard shard{.file = mapped, .first = at(first), .width = 1, .tokens = static_cast<std::int64_t>(bytes)};
  if (bytes >= llmc_header_bytes && integer_at(first, 0) == llmc_magic) {
    if (integer_at(first, 1) != 1)
      throw ConfigError(
          {path}, fmt::format("token file of version {}; version 1 (uint16 tokens) can be read", integer_at(first, 1)));
    const std::size_t count = static_cast<std::size_t>(std::max(integer_at(first, 2), 0));
    if (bytes != llmc_header_bytes + 2 * count)
      throw ConfigError({path}, fmt::format("the header promises {} tokens, {} bytes; the file has {}", count,
                                            llmc_header_bytes + 2 * count, bytes));
    shard = {.file = mapped,
             .first = at(first + llmc_header_bytes),
             .width = 2,
             .tokens = static_cast<std::int64_t>(count)};
  }
  if (shard.tokens < sequence + 1)
    throw ConfigError({path},
                      fmt::format("{} tokens; one sequence takes {} and the token after it", shard.tokens, sequence));
  std::int64_t largest = 0;
  for (std::int64_t i = 1; i < shard.tokens; ++i)
    if (token_at(shard.first.get(), shard.width, i) > token_at(shard.first.get(), shard.width, largest)) largest = i;
  if (const std::int32_t token = token_at(shard.first.get(), shard.width, largest); token >= vocabulary)
    throw ConfigError({path}, fmt::format("token {} at position {}; the model's vocabulary ends at {}; give others "
                                          "with --data (each byte of a text is a token, as "
                                          "of the default; or tokens in llm.c's layout)",
                                          token, largest, vocabulary - 1));
  return shard;
}

TokenData TokenData::load(std::span<const std::string> paths, std::int64_t sequence, std::int64_t vocabulary,
                          std::optional<std::uint64_t> shuffle) {
  TokenData data(std::vector<std::int32_t>{});
  data.shards_.clear();
  for (const std::string& path : paths) data.shards_.push_back(open_shard(path, sequence, vocabulary));
  data.shuffle_ = shuffle;
  return data;
}

TokenData TokenData::load_images(std::span<const std::string> paths, const LabelledImages& images, std::int64_t classes,
                                 std::optional<std::uint64_t> shuffle) {
  TokenData data(std::vector<std::int32_t>{});
  data.shards_.clear();
  data.shuffle_ = shuffle;
  const std::int64_t of_class = bytes_of_class(classes);
  data.record_ = of_class + images.channels * images.size * images.size;
  for (const std::string& path : paths) {
    const std::shared_ptr<const MappedFile> mapped = map_tokens(path);
    const std::byte* const first = mapped->bytes().data();
    const auto bytes = static_cast<std::int64_t>(mapped->bytes().size());
    if (bytes == 0 || bytes % data.record_ != 0)
      throw ConfigError({path}, fmt::format("{} bytes; an image of the model takes {} ({} of its class, and {} x {} x "
                                            "{} colours), and the file must hold whole ones; give images of that size "
                                            "in the layout of CIFAR-10's binary version",
                                            bytes, data.record_, of_class, images.channels, images.size, images.size));
    for (std::int64_t at = 0; at < bytes; at += data.record_)
      if (const std::int32_t found = class_at(first + at, of_class); found >= classes)
        throw ConfigError({path}, fmt::format("class {} of image {}; the model's classes end at {}", found,
                                              at / data.record_, classes - 1));
    data.shards_.push_back(
        {.file = mapped, .first = std::shared_ptr<const std::byte>(mapped, first), .width = 1, .tokens = bytes});
  }
  return data;
}

std::int64_t TokenData::size() const {
  std::int64_t tokens = 0;
  for (const Shard& shard : shards_) tokens += shard.tokens;
  return tokens;
}

std::int64_t TokenData::samples(std::int64_t sequence) const {
  std::int64_t all = 0;
  for (const Shard& shard : shards_) all += record_ > 0 ? shard.tokens / record_ : samples_of(shard.tokens, sequence);
  return all;
}

std::uint64_t TokenData::fingerprint() const {
  std::vector<std::uint64_t> parts;
  for (const Shard& shard : shards_)
    parts.push_back(parplan::fingerprint({shard.first.get(), static_cast<std::size_t>(shard.tokens) * shard.width}));
  return parts.size() == 1 ? parts.front() : parplan::fingerprint(std::as_bytes(std::span(parts)));
}

void TokenData::sample(std::int64_t index, std::int64_t sequence, std::int32_t* to) const {
  const std::int64_t all = samples(sequence);
  PARPLAN_ASSERT(all > 0, fmt::format("sample {} of {} files", index, shards_.size()));
  const std::int64_t epoch = index / all;
  std::int64_t place = index % all;
  if (shuffle_) place = shuffled(place, all, mixed(*shuffle_) + static_cast<std::uint64_t>(epoch));
  for (const Shard& shard : shards_) {
    const std::int64_t here = record_ > 0 ? shard.tokens / record_ : samples_of(shard.tokens, sequence);
    if (place >= here) {
      place -= here;
      continue;
    }
    const std::int64_t stride = record_ > 0 ? record_ : sequence, count = record_ > 0 ? record_ : sequence + 1;
    for (std::int64_t i = 0; i < count; ++i) to[i] = token_at(shard.first.get(), shard.width, place * stride + i);
    if (shard.file != nullptr) shard.file->check_is_whole();
    return;
  }
}

void fill(Batch& batch, const TokenData& data, std::int64_t step, std::int64_t global_batch) {
  fill_from(batch, data, step * global_batch, global_batch);
}

void fill_from(Batch& batch, const TokenData& data, std::int64_t first, std::int64_t count) {
  const std::int64_t stride = batch.sequence + 1;
  allocate(batch.ids, count * stride, "the tokens of a step");
  for (std::int64_t i = 0; i < count; ++i) data.sample(first + i, batch.sequence, batch.ids.data() + i * stride);
}

void mask(Batch& batch, const MaskedTokens& masked, std::int64_t vocabulary, std::int64_t first, std::uint64_t seed) {
  const std::int64_t stride = batch.sequence + 1, samples = std::ssize(batch.ids) / stride;
  allocate(batch.targets, samples * batch.sequence, "the targets of a step");
  std::ranges::fill(batch.targets, -1);
  for (std::int64_t sample = 0; sample < samples; ++sample) {
    const std::uint64_t own = mixed(mixed(seed) ^ static_cast<std::uint64_t>(first + sample));
    for (std::int64_t i = 0; i < masked.count; ++i) {
      const std::int64_t position = shuffled(i, batch.sequence, own);
      std::int32_t& id = batch.ids[sample * stride + position];
      batch.targets[sample * batch.sequence + position] = id;
      const std::uint64_t draw = mixed(own + static_cast<std::uint64_t>(i) + 1);
      if (draw % 10 < 8) {
        id = static_cast<std::int32_t>(masked.token);
      } else if (draw % 10 == 8) {
        id = static_cast<std::int32_t>(draw / 10 % static_cast<std::uint64_t>(vocabulary));
      }
    }
  }
}

void corrupt(Batch& batch, const CorruptedSpans& corrupted, std::int64_t vocabulary, std::int64_t first,
             std::uint64_t seed) {
  const std::int64_t stride = batch.sequence + 1, samples = std::ssize(batch.ids) / stride;
  const std::int64_t spans = corrupted.spans, decoder = corrupted.decoder, encoder = batch.sequence - decoder;
  // Behind the text of each side is its end, and each span has a sentinel on both.
  const std::int64_t told = decoder - spans - 1, kept = encoder - spans - 1;
  PARPLAN_ASSERT(spans >= 1 && told >= spans && kept >= spans && spans <= vocabulary,
                 fmt::format("{} spans of {} tokens told and {} kept", spans, told, kept));
  allocate(batch.targets, samples * batch.sequence, "the targets of a step");
  std::ranges::fill(batch.targets, -1);
  std::vector<std::int32_t> text;
  for (std::int64_t sample = 0; sample < samples; ++sample) {
    const std::uint64_t own = mixed(mixed(seed) ^ static_cast<std::uint64_t>(first + sample));
    const std::vector<std::int64_t> of_told = random_parts(told, spans, own);
    const std::vector<std::int64_t> of_kept = random_parts(kept, spans, mixed(own));
    std::int32_t* const ids = batch.ids.data() + sample * stride;
    text.assign(ids, ids + told + kept);
    const std::int32_t* from = text.data();
    std::int32_t* target = batch.targets.data() + sample * batch.sequence;
    std::int32_t* read = ids + decoder;  // by the encoder
    for (std::int64_t span = 0; span < spans; ++span) {
      const auto sentinel = static_cast<std::int32_t>(vocabulary - 1 - span);
      read = std::copy_n(from, of_kept[span], read);
      *read++ = sentinel;
      *target++ = sentinel;
      from += of_kept[span];
      target = std::copy_n(from, of_told[span], target);
      from += of_told[span];
    }
    *read = *target = static_cast<std::int32_t>(corrupted.end);
    ids[0] = static_cast<std::int32_t>(corrupted.start);
    std::copy_n(target + 1 - decoder, decoder - 1, ids + 1);
  }
}

void fill_images(Batch& batch, const TokenData& data, const LabelledImages& images, std::int64_t classes,
                 std::int64_t first, std::int64_t count, std::uint64_t seed) {
  const std::int64_t of_class = bytes_of_class(classes), side = images.size / images.patch;
  batch.colours_of_patch = images.colours();
  batch.colours_of_sample = images.patches() * images.colours();
  allocate(batch.colours, count * batch.colours_of_sample, "the images of a step");
  allocate(batch.targets, count * batch.sequence, "the targets of a step");
  std::ranges::fill(batch.targets, -1);
  std::vector<std::int32_t> record;
  allocate(record, of_class + batch.colours_of_sample, "an image");
  const std::int64_t samples = data.samples(batch.sequence);
  for (std::int64_t sample = 0; sample < count; ++sample) {
    if (samples > 0) {
      data.sample(first + sample, batch.sequence, record.data());
    } else {
      const std::uint64_t own = mixed(mixed(seed) ^ static_cast<std::uint64_t>(first + sample));
      const auto drawn = static_cast<std::int32_t>(own % static_cast<std::uint64_t>(classes));
      record[0] = drawn % 256;
      if (of_class > 1) record[1] = drawn / 256;
      for (std::int64_t i = of_class; i < std::ssize(record); ++i)
        record[i] = static_cast<std::int32_t>(mixed(own + static_cast<std::uint64_t>(i)) >> 56);
    }
    batch.targets[sample * batch.sequence] = record[0] + (of_class > 1 ? 256 * record[1] : 0);
    std::uint8_t* to = batch.colours.data() + sample * batch.colours_of_sample;
    for (std::int64_t patch = 0; patch < images.patches(); ++patch)
      for (std::int64_t channel = 0; channel < images.channels; ++channel)
        for (std::int64_t y = 0; y < images.patch; ++y)
          for (std::int64_t x = 0; x < images.patch; ++x) {
            const std::int64_t row = patch / side * images.patch + y, column = patch % side * images.patch + x;
            *to++ = static_cast<std::uint8_t>(record[of_class + (channel * images.size + row) * images.size + column]);
          }
  }
}

}  // namespace parplan
