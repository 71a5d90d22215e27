#include "planner/base/text.h"

#include <doctest/doctest.h>

using namespace parplan;

TEST_CASE("The nearest word is offered when it is near enough to have been meant") {
  const std::vector<std::string> keys = {"hidden", "heads", "layers"};
  CHECK(nearest("hiden", keys) == "hidden");
  CHECK(nearest("hidden", keys) == "hidden");
  CHECK(nearest("gtp2", {"gpt2", "gemma"}) == "gpt2");  // a swap of neighbours is one edit
  CHECK(nearest("hdn", keys) == "");     // three edits of three letters
  CHECK(nearest("widths", keys) == "");
  CHECK(nearest("x", {"a", "b"}) == "");  // every letter is one edit from every other
  CHECK(nearest("ab", {"ac", "ad"}) == "ac");
  CHECK(nearest("", keys) == "");
  CHECK(nearest("gelu", {"relu", "gelu_tanh"}) == "gelu_tanh");
  CHECK(nearest("relu", {"relu_squared", "relu"}) == "relu");
  CHECK(nearest("ge", {"relu", "gelu_tanh"}) == "");
}

TEST_CASE("did_you_mean ends a message or adds nothing") {
  CHECK(did_you_mean("layer", {"hidden", "layers"}) == "; did you mean 'layers'?");
  CHECK(did_you_mean("depth", {"hidden", "layers"}) == "");
}

TEST_CASE("Words are joined by commas") {
  CHECK(join({"a", "b", "c"}) == "a, b, c");
  CHECK(join({"a", "b"}, "|") == "a|b");
  CHECK(join({}) == "");
}
