#include "runtime/launch/fingerprint.h"

#include <doctest/doctest.h>

#include <set>
#include <string>

#include "runtime/plugin/build_identity.h"

using namespace parplan;

TEST_CASE("contents that differ in a bit, in two highest bits, in length or in order have different fingerprints") {
  const std::string text(40, 'a');
  std::set<std::uint64_t> seen{fingerprint(text)};
  const auto add = [&](const std::string& other) { CHECK(seen.insert(fingerprint(other)).second); };
  for (std::size_t byte = 0; byte < text.size(); ++byte)
    for (int bit = 0; bit < 8; ++bit) {
      std::string other = text;
      other[byte] = static_cast<char>(other[byte] ^ (1 << bit));
      add(other);
      if (byte < 8) continue;
      other[byte - 8] = static_cast<char>(other[byte - 8] ^ (1 << bit));  // the same place of two words
      add(other);
    }
  add("");
  add(std::string(1, '\0'));
  add(std::string(8, '\0'));
  add(std::string(9, '\0'));
  add("0123456789abcdef");
  add("89abcdef01234567");
  CHECK(fingerprint(text) == fingerprint(std::string(40, 'a')));
  CHECK(write_fingerprint(0x1f) == "000000000000001f");
}

TEST_CASE("a build names its version, its sources, its compiler and its options") {
  const BuildIdentity identity = build_identity();
  CHECK(identity.version.find('.') != std::string_view::npos);
  CHECK(identity.sources.size() == 16);
  CHECK(identity.sources.find_first_not_of("0123456789abcdef") == std::string_view::npos);
  CHECK(identity.compiler.find(' ') != std::string_view::npos);
}
