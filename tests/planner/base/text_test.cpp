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

TEST_CASE("Capitals do not matter, and all that a word begins are named") {
  const std::vector<std::string> kinds = {"a100", "h100-nvl", "h100-pcie", "h100-sxm", "h200-sxm", "PCI_BUS_ID"};
  CHECK(did_you_mean("h100", kinds) == "; did you mean 'h100-nvl', 'h100-pcie' or 'h100-sxm'?");
  CHECK(did_you_mean("H100-P", kinds) == "; did you mean 'h100-pcie'?");
  CHECK(did_you_mean("H200", kinds) == "; did you mean 'h200-sxm'?");
  CHECK(did_you_mean("H200-SMX", kinds) == "; did you mean 'h200-sxm'?");
  CHECK(did_you_mean("A100", {"a100-40gb", "a100", "a100-80gb"}) == "; did you mean 'a100'?");
  CHECK(did_you_mean("h1", kinds) == "");
  CHECK(nearest("pci_bus_id", kinds) == "PCI_BUS_ID");
  CHECK(nearest("H100", kinds) == "h100-nvl");
}

TEST_CASE("A noun has its plural except behind 1") {
  CHECK(pluralized(0, "node") == "0 nodes");
  CHECK(pluralized(1, "node") == "1 node");
  CHECK(pluralized(2, "node") == "2 nodes");
}

TEST_CASE("Words are joined by commas") {
  CHECK(join({"a", "b", "c"}) == "a, b, c");
  CHECK(join({"a", "b"}, "|") == "a|b");
  CHECK(join({}) == "");
}

TEST_CASE("Control characters and marks of direction are escaped, other text is not") {
  CHECK(printable("gr\u00fc\u00dfe, \u65e5\u672c\n") == "gr\u00fc\u00dfe, \u65e5\u672c\n");
  CHECK(printable_line("a\x1b[0m\r\nb\x7f") == "a\\u001b[0m\\u000d\\u000ab\\u007f");
  CHECK(printable("\u0085\u009b \u202e \u2066 \u200f \u061c") == "\\u0085\\u009b \\u202e \\u2066 \\u200f \\u061c");
  CHECK(printable("\xe2") == "\xe2");  // cut off
}
