#include <doctest/doctest.h>

#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
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
    TokenData::load(std::vector{path}, sequence, vocabulary);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("tokens that were cut off while they are read are an error, not zeros") {
  const testing::TemporaryFolder folder;
  const std::string path = folder.write("text", std::string(100, 'a'));
  const TokenData data = TokenData::load(std::vector{path}, 3, 256);
  std::int32_t ids[4] = {};
  CHECK_NOTHROW(data.sample(0, 3, ids));
  std::filesystem::resize_file(path, 50);  // within the page that is mapped: its rest reads as zeros
  CHECK_THROWS_WITH_AS(data.sample(20, 3, ids),
                       ("cannot read '" + path + "' any more: it was cut off while it was being read").c_str(),
                       RunError);
}

TEST_CASE("a text is read as bytes and starts over at its end") {
  const testing::TemporaryFolder folder;
  const TokenData data = TokenData::load(std::vector{folder.write("text.txt", "abcdefghi")}, 4, 256);
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
  const std::string file = folder.write("tokens.bin", llmc(1, 4, {7, 50256, 0, 9}));
  const TokenData data = TokenData::load(std::vector{file}, 3, 50257);
  std::vector<std::int32_t> sample(4);
  data.sample(0, 3, sample.data());
  CHECK(sample == std::vector<std::int32_t>{7, 50256, 0, 9});
}

TEST_CASE("several files are taken one after the other, and no sequence crosses their border") {
  const testing::TemporaryFolder folder;
  const std::vector<std::string> files = {folder.write("a.txt", "abcdef"),
                                          folder.write("b.bin", llmc(1, 5, {1, 2, 3, 4, 5}))};
  const TokenData data = TokenData::load(files, 2, 256);
  CHECK(data.size() == 11);
  CHECK(data.samples(2) == 4);
  std::vector<std::vector<std::int32_t>> all(5, std::vector<std::int32_t>(3));
  for (std::size_t i = 0; i < all.size(); ++i) data.sample(static_cast<std::int64_t>(i), 2, all[i].data());
  CHECK(all == std::vector<std::vector<std::int32_t>>{
                   {'a', 'b', 'c'}, {'c', 'd', 'e'}, {1, 2, 3}, {3, 4, 5}, {'a', 'b', 'c'}});
  CHECK(data.fingerprint() != TokenData::load(std::vector{files[1], files[0]}, 2, 256).fingerprint());
}

TEST_CASE("an order holds each place once, and another one for another seed") {
  for (const std::int64_t count : {1, 2, 3, 4, 5, 63, 64, 65, 1000}) {
    std::vector<std::int64_t> places;
    int moved = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      places.push_back(shuffled(i, count, 7));
      moved += places.back() != shuffled(i, count, 8) ? 1 : 0;
    }
    if (count > 60) CHECK(moved > count / 2);
    std::ranges::sort(places);
    for (std::int64_t i = 0; i < count; ++i) CHECK(places[static_cast<std::size_t>(i)] == i);
  }
}

TEST_CASE("a shuffled epoch has every sequence once, each epoch in an order of its own") {
  const testing::TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 101; ++i) text += static_cast<char>(i);
  const std::vector<std::string> file = {folder.write("text.txt", text)};
  const TokenData data = TokenData::load(file, 1, 256, 42), same = TokenData::load(file, 1, 256, 42);
  std::vector<std::vector<std::int32_t>> epochs(2);
  std::vector<std::int32_t> sample(2), again(2);
  for (std::int64_t i = 0; i < 200; ++i) {
    data.sample(i, 1, sample.data());
    same.sample(i, 1, again.data());
    CHECK(sample == again);
    epochs[static_cast<std::size_t>(i / 100)].push_back(sample[0]);
  }
  CHECK(epochs[0] != epochs[1]);
  for (std::vector<std::int32_t>& epoch : epochs) {
    CHECK_FALSE(std::ranges::is_sorted(epoch));
    std::ranges::sort(epoch);
    for (int i = 0; i < 100; ++i) CHECK(epoch[static_cast<std::size_t>(i)] == i);
  }
}

TEST_CASE("of each sample some tokens are masked, by its number and the seed, whoever else is in the batch") {
  constexpr std::int64_t sequence = 20, vocabulary = 1000, samples = 500;
  const MaskedTokens masked{.count = 3, .token = 999};
  std::vector<std::int32_t> tokens(samples * sequence + 1);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::int32_t>(i % 900);
  const TokenData data(tokens);
  const auto batch_of = [&](std::int64_t first, std::int64_t count, std::uint64_t seed) {
    Batch batch{.sequence = sequence, .ids = {}};
    fill_from(batch, data, first, count);
    mask(batch, masked, vocabulary, first, seed);
    return batch;
  };
  const Batch all = batch_of(0, samples, 1);
  Batch plain{.sequence = sequence, .ids = {}};
  fill_from(plain, data, 0, samples);
  std::int64_t hidden = 0, kept = 0, positions[sequence] = {};
  for (std::int64_t sample = 0; sample < samples; ++sample) {
    std::int64_t targets = 0;
    for (std::int64_t i = 0; i < sequence; ++i) {
      const std::int32_t target = all.targets[sample * sequence + i];
      const std::int32_t before = plain.ids[sample * (sequence + 1) + i], now = all.ids[sample * (sequence + 1) + i];
      if (target < 0) {
        CHECK(target == -1);
        CHECK(now == before);
        continue;
      }
      ++targets;
      ++positions[i];
      CHECK(target == before);
      CHECK((now >= 0 && now < vocabulary));
      hidden += now == masked.token ? 1 : 0;
      kept += now == before ? 1 : 0;
    }
    CHECK(targets == masked.count);
  }
  // 80% and 10% of 1500, within four standard deviations; each position 75 times.
  CHECK(std::abs(hidden - 1200) < 62);
  CHECK(std::abs(kept - 150) < 47);
  for (const std::int64_t count : positions) CHECK(std::abs(count - 75) < 32);

  const Batch some = batch_of(100, 8, 1), other = batch_of(100, 8, 2), later = batch_of(100 + samples, 8, 1);
  CHECK(std::equal(some.ids.begin(), some.ids.end(), all.ids.begin() + 100 * (sequence + 1)));
  CHECK(std::equal(some.targets.begin(), some.targets.end(), all.targets.begin() + 100 * sequence));
  CHECK(some.targets != other.targets);
  CHECK(some.targets != later.targets);  // the same samples in the next epoch
}

TEST_CASE("spans of a text go to the decoder behind sentinels, and the rest with the sentinels to the encoder") {
  constexpr std::int64_t sequence = 40, vocabulary = 2000, samples = 300, decoder = 14, encoder = sequence - decoder;
  const CorruptedSpans corrupted{.decoder = decoder, .spans = 3, .start = 1900, .end = 1901};
  std::vector<std::int32_t> tokens(samples * sequence + 1);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::int32_t>(i % 1000);
  const TokenData data(tokens);
  const auto batch_of = [&](std::int64_t first, std::int64_t count, std::uint64_t seed) {
    Batch batch{.sequence = sequence, .ids = {}};
    fill_from(batch, data, first, count);
    corrupt(batch, corrupted, vocabulary, first, seed);
    return batch;
  };
  const Batch all = batch_of(0, samples, 1);
  Batch plain{.sequence = sequence, .ids = {}};
  fill_from(plain, data, 0, samples);
  const auto is_sentinel = [&](std::int32_t id) { return id > vocabulary - 1 - corrupted.spans; };
  std::int64_t longest = 0;
  for (std::int64_t sample = 0; sample < samples; ++sample) {
    const std::int32_t* const ids = all.ids.data() + sample * (sequence + 1);
    const std::int32_t* const targets = all.targets.data() + sample * sequence;
    // The decoder reads what it has told so far; nothing is told behind its end.
    CHECK(ids[0] == corrupted.start);
    CHECK(std::equal(targets, targets + decoder - 1, ids + 1));
    CHECK(targets[decoder - 1] == corrupted.end);
    CHECK(std::all_of(targets + decoder, targets + sequence, [](std::int32_t id) { return id == -1; }));
    CHECK(ids[sequence - 1] == corrupted.end);
    // Each sentinel of the encoder, replaced by what the decoder tells behind it: the text again.
    std::vector<std::int32_t> text;
    std::int32_t next = vocabulary - 1;
    for (std::int64_t i = 0; i + 1 < encoder; ++i) {
      if (!is_sentinel(ids[decoder + i])) {
        text.push_back(ids[decoder + i]);
        continue;
      }
      CHECK(ids[decoder + i] == next);
      const std::int32_t* told = std::find(targets, targets + decoder, next--);
      REQUIRE(told != targets + decoder);
      const std::size_t before = text.size();
      for (++told; *told < 1000; ++told) text.push_back(*told);
      CHECK(text.size() > before);
      longest = std::max(longest, static_cast<std::int64_t>(text.size() - before));
    }
    CHECK(next == vocabulary - 1 - corrupted.spans);
    CHECK(std::ssize(text) == sequence - 2 * (corrupted.spans + 1));
    CHECK(std::equal(text.begin(), text.end(), plain.ids.begin() + sample * (sequence + 1)));
  }
  CHECK(longest == decoder - 1 - corrupted.spans - 2);  // the others have one token each

  const Batch some = batch_of(100, 8, 1), other = batch_of(100, 8, 2), later = batch_of(100 + samples, 8, 1);
  CHECK(std::equal(some.ids.begin(), some.ids.end(), all.ids.begin() + 100 * (sequence + 1)));
  CHECK(std::equal(some.targets.begin(), some.targets.end(), all.targets.begin() + 100 * sequence));
  CHECK(some.targets != other.targets);
  CHECK(some.targets != later.targets);  // the same samples in the next epoch
}

TEST_CASE("images are records of a class and of colours, which come patch by patch") {
  const testing::TemporaryFolder folder;
  // 4 x 4 pixels of two colours in patches of 2 x 2: a number says its colour, row and column.
  const LabelledImages images{.size = 4, .patch = 2, .channels = 2};
  std::string bytes;
  for (int image = 0; image < 3; ++image) {
    bytes += static_cast<char>(image + 5);
    for (int channel = 0; channel < 2; ++channel)
      for (int y = 0; y < 4; ++y)
        for (int x = 0; x < 4; ++x) bytes += static_cast<char>(64 * image + 16 * channel + 4 * y + x);
  }
  const std::string file = folder.write("images.bin", bytes);
  const TokenData data = TokenData::load_images(std::vector{file}, images, 8);
  CHECK(data.samples(5) == 3);
  Batch batch{.sequence = 5, .ids = {}};
  fill_images(batch, data, images, 8, 1, 4, 1);  // the third, then the first again
  REQUIRE(batch.colours.size() == 4 * 32);
  CHECK(batch.targets ==
        std::vector<std::int32_t>{6, -1, -1, -1, -1, 7, -1, -1, -1, -1, 5, -1, -1, -1, -1, 6, -1, -1, -1, -1});
  const std::vector<std::uint8_t> first_patch(batch.colours.begin(), batch.colours.begin() + 8);
  CHECK(first_patch == std::vector<std::uint8_t>{64, 65, 68, 69, 80, 81, 84, 85});
  const std::vector<std::uint8_t> last_patch(batch.colours.begin() + 24, batch.colours.begin() + 32);
  CHECK(last_patch == std::vector<std::uint8_t>{74, 75, 78, 79, 90, 91, 94, 95});

  // More than 256 classes have two bytes, the lower one first.
  std::string two;
  two += static_cast<char>(44);
  two += static_cast<char>(1);
  two += std::string(32, '\3');
  fill_images(batch, TokenData::load_images(std::vector{folder.write("two.bin", two)}, images, 301), images, 301, 0, 1,
              1);
  CHECK(batch.targets.front() == 300);
  CHECK(batch.colours == std::vector<std::uint8_t>(32, 3));

  const auto refusal = [&](const std::string& content, std::int64_t classes) -> std::string {
    try {
      TokenData::load_images(std::vector{folder.write("bad.bin", content)}, images, classes);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  };
  const std::string bad = folder.path("bad.bin");
  CHECK(refusal(bytes + "x", 8) ==
        bad +
            ": error: 100 bytes; an image of the model takes 33 (1 of its class, and 2 x 4 x 4 colours), and the file "
            "must hold whole ones; give images of that size in the layout of CIFAR-10's binary version");
  CHECK(refusal("", 8).find(": error: 0 bytes;") != std::string::npos);
  CHECK(refusal(bytes, 6) == bad + ": error: class 6 of image 1; the model's classes end at 5");
}

TEST_CASE("without data, images are noise that follows from the seed and the number of the sample alone") {
  const LabelledImages images{.size = 8, .patch = 4, .channels = 3};
  const TokenData none = TokenData::load_images({}, images, 10);
  CHECK(none.samples(5) == 0);
  Batch all{.sequence = 5, .ids = {}}, some{.sequence = 5, .ids = {}}, other{.sequence = 5, .ids = {}};
  fill_images(all, none, images, 10, 0, 64, 7);
  fill_images(some, none, images, 10, 32, 32, 7);
  fill_images(other, none, images, 10, 0, 64, 8);
  CHECK(std::equal(some.colours.begin(), some.colours.end(), all.colours.begin() + 32 * all.colours_of_sample));
  CHECK(std::equal(some.targets.begin(), some.targets.end(), all.targets.begin() + 32 * 5));
  CHECK(all.colours != other.colours);
  std::vector<int> seen(256), classes(10);
  for (const std::uint8_t colour : all.colours) ++seen[colour];
  for (std::size_t i = 0; i < all.targets.size(); i += 5) ++classes[static_cast<std::size_t>(all.targets[i])];
  CHECK(std::ranges::all_of(seen, [](int count) { return count > 0; }));
  CHECK(std::ranges::all_of(classes, [](int count) { return count > 0; }));
}

TEST_CASE("what cannot be mapped is refused, and nothing waits for a pipe's writer") {
  const testing::TemporaryFolder folder;
  const std::string pipe = folder.path("pipe");
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  const std::string reason = " is no regular file: its tokens are read in any order; write what comes from a pipe or a "
                             "device to a file first";
  CHECK(message_of(pipe, 3, 256) == "error: '" + pipe + "'" + reason);
  CHECK(message_of("/dev/zero", 3, 256) == "error: '/dev/zero'" + reason);
  CHECK(message_of(folder.path(""), 3, 256).find("Is a directory") != std::string::npos);
  CHECK(message_of(folder.write("empty.txt", ""), 3, 256).find("0 tokens; one sequence takes 3") != std::string::npos);
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
