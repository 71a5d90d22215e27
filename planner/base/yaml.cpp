#include "planner/base/yaml.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <sstream>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>
#include <yaml-cpp/depthguard.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include "planner/base/file.h"
#include "planner/base/text.h"
#include "planner/base/utf8.h"

namespace parplan {

struct YamlNode::Document {
  std::string file;
};

namespace {

// What `node_` points to. `path` names the node's part of the file: "training.optimizer",
// "links[2]"; it is empty at the top.
struct Entry {
  YAML::Node node;
  std::string path;
};

const Entry& entry(const std::shared_ptr<const void>& node) { return *static_cast<const Entry*>(node.get()); }

Location place(const std::string& file, const YAML::Mark& mark) {
  // yaml-cpp counts from 0, and marks a missing node with -1.
  if (mark.line < 0) return {.file = file, .line = 0, .column = 0};
  return {.file = file, .line = mark.line + 1, .column = mark.column + 1};
}

// What is larger is no model, cluster or plan.
constexpr std::size_t most_bytes = std::size_t{64} << 20;
constexpr std::int64_t most_nodes = 2'000'000;

// Walks the events of a document, each once, to find what yaml-cpp accepts silently: duplicate keys
// (the first would win), and aliases (with which a small file could unfold into a huge one).
class StrictEvents : public YAML::EventHandler {
 public:
  explicit StrictEvents(const std::string& file) : file_(file) {}

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (++documents_ > 1) throw ConfigError(place(file_, mark), "expected one document, found a second one");
  }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t) override { value(mark, std::nullopt); }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    throw ConfigError(place(file_, mark), "aliases ('*name') are not supported; write the value out");
  }
  void OnScalar(const YAML::Mark& mark, const std::string&, YAML::anchor_t, const std::string& text) override {
    value(mark, text);
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {
    value(mark, std::nullopt);
    open_.push_back({.map = false});
  }
  void OnSequenceEnd() override { open_.pop_back(); }
  void OnMapStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {
    value(mark, std::nullopt);
    open_.push_back({.map = true});
  }
  void OnMapEnd() override { open_.pop_back(); }

 private:
  struct Open {
    bool map = false;
    bool key_next = true;
    std::unordered_map<std::string, int> keys = {};  // with their lines
  };

  // A node begins; in a map, keys and values alternate.
  void value(const YAML::Mark& mark, const std::optional<std::string>& text) {
    if (++nodes_ > most_nodes)
      throw ConfigError(place(file_, mark),
                        fmt::format("more than {} keys and values, which no model, cluster or plan has", most_nodes));
    if (open_.empty() || !open_.back().map) return;
    Open& map = open_.back();
    if (map.key_next) {
      if (!text) throw ConfigError(place(file_, mark), "expected a key of plain text");
      const auto [known, is_new] = map.keys.try_emplace(*text, mark.line + 1);
      if (!is_new)
        throw ConfigError(place(file_, mark),
                          fmt::format("duplicate key '{}', first given on line {}", printable_line(*text),
                                      known->second));
    }
    map.key_next = !map.key_next;
  }

  const std::string& file_;
  int documents_ = 0;
  std::int64_t nodes_ = 0;
  std::vector<Open> open_;
};

// The lines of a plan's schedule are quoted texts of up to megabytes, of which yaml-cpp looks at
// every character several times. A short word stands for each until the document is read.
class LongTexts {
 public:
  // Lines end as they did: nothing is taken where a line holds more than one list item in quotes,
  // or anything that quotes could not hold as it stands.
  explicit LongTexts(const std::string& text) {
    if (text.find(word) != std::string::npos) return;
    std::size_t kept = 0;
    for (std::size_t begin = 0; begin < text.size();) {
      std::size_t end = text.find('\n', begin);
      if (end == std::string::npos) end = text.size();
      if (end - begin >= shortest) {
        const std::string_view line(text.data() + begin, end - begin);
        const std::size_t open = line.find_first_not_of(' ');
        if (open != std::string_view::npos && line.substr(open).starts_with("- \"") && line.ends_with('"')) {
          const std::string_view inside = line.substr(open + 3, line.size() - open - 4);
          if (std::ranges::all_of(inside, is_plain) && inside.front() != ' ' && inside.back() != ' ') {
            rest_.append(text, kept, begin + open + 3 - kept);
            rest_ += fmt::format("{}{}.", word, taken_.size());
            taken_.emplace_back(inside);
            kept = end - 1;
          }
        }
      }
      begin = end + 1;
    }
    if (!taken_.empty()) rest_.append(text, kept);
  }

  bool empty() const { return taken_.empty(); }
  // The document with words instead.
  const std::string& rest() const { return rest_; }
  // Puts the texts back, wherever in a scalar their words are.
  void put_back(YAML::Node node) const {
    if (node.IsMap())
      for (const auto& one : node) put_back(one.second);
    if (node.IsSequence())
      for (const auto& one : node) put_back(one);
    if (!node.IsScalar() || node.Scalar().find(word) == std::string::npos) return;
    std::string text = node.Scalar();
    for (std::size_t at = 0; (at = text.find(word, at)) != std::string::npos;) {
      const std::size_t number = at + word.size(), end = text.find('.', number);
      const std::string& taken = taken_[std::stoul(text.substr(number, end - number))];
      text.replace(at, end + 1 - at, taken);
      at += taken.size();
    }
    node = text;
  }

 private:
  static constexpr std::size_t shortest = 4096;
  static constexpr std::string_view word = "long-text-of-a-line-";
  // Letters, digits and spaces are the same in quotes, out of them, and in a text of several lines.
  static bool is_plain(char c) {
    return c == ' ' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  }

  std::string rest_;
  std::vector<std::string> taken_;
};

std::string found(const YAML::Node& node) {
  if (node.IsMap()) return "a map";
  if (node.IsSequence()) return "a list";
  if (node.IsScalar()) return fmt::format("'{}'", node.Scalar());
  return "nothing";
}

// The message for a node that was asked for keys and is no map.
std::string no_map(const Entry& entry, const std::string& wanted) {
  if (entry.path.empty() && entry.node.IsNull()) return fmt::format("the file is empty; expected {}", wanted);
  return fmt::format("expected {}, found {}", wanted, found(entry.node));
}

std::shared_ptr<const Entry> child(YAML::Node node, std::string path) {
  return std::make_shared<const Entry>(Entry{.node = std::move(node), .path = std::move(path)});
}

std::string path_of_key(const std::string& path, std::string_view key) {
  return path.empty() ? std::string(key) : fmt::format("{}.{}", path, key);
}

// A ConfigError's message without the "error: " that it begins with when it has no place.
std::string message_of(const ConfigError& error) {
  const std::string_view prefix = "error: ";
  const std::string_view what = error.what();
  return std::string(what.substr(what.starts_with(prefix) ? prefix.size() : 0));
}

template <typename Result>
Result parse_quantity(const YamlNode& node, Result (*parse)(std::string_view)) {
  try {
    return parse(node.as_string());
  } catch (const ConfigError& error) {
    if (std::string_view(error.what()).starts_with("error: ")) node.fail(message_of(error));
    throw;
  }
}

}  // namespace

YamlNode::YamlNode(std::shared_ptr<const Document> document, std::shared_ptr<const void> node)
    : document_(std::move(document)), node_(std::move(node)) {}

YamlNode YamlNode::parse(const std::string& text, const std::string& file_name) {
  const auto document = std::make_shared<const Document>(Document{.file = file_name});
  if (text.size() > most_bytes)
    throw ConfigError({.file = file_name, .line = 0, .column = 0},
                      fmt::format("{}; a file of parplan's has at most {}", format_bytes(Bytes(std::ssize(text))),
                                  format_bytes(Bytes(std::int64_t{most_bytes}))));
  check_utf8(text, file_name);
  try {
    const LongTexts long_texts(text);
    const std::string& read = long_texts.empty() ? text : long_texts.rest();
    std::istringstream stream(read);
    YAML::Parser parser(stream);
    StrictEvents events(document->file);
    while (parser.HandleNextDocument(events)) {
    }
    YAML::Node root = YAML::Load(read);
    if (!long_texts.empty()) long_texts.put_back(root);
    return YamlNode(document, child(std::move(root), ""));
  } catch (const YAML::DeepRecursion& error) {
    throw ConfigError(place(file_name, error.mark), "invalid YAML: nested too deeply");
  } catch (const YAML::Exception& error) {
    throw ConfigError(place(file_name, error.mark), "invalid YAML: " + error.msg);
  }
}

YamlNode YamlNode::load(const std::string& path) { return parse(read_document(path), path); }

std::string read_document(const std::filesystem::path& path) { return read_file(path, most_bytes + 1); }

bool YamlNode::is_map() const { return entry(node_).node.IsMap(); }
bool YamlNode::is_list() const { return entry(node_).node.IsSequence(); }
bool YamlNode::is_scalar() const { return entry(node_).node.IsScalar(); }
bool YamlNode::is_null() const { return entry(node_).node.IsNull(); }
Location YamlNode::location() const { return place(document_->file, entry(node_).node.Mark()); }

YamlNode YamlNode::at(std::string_view key) const {
  const Entry& map = entry(node_);
  if (!map.node.IsMap()) fail(no_map(map, fmt::format("a map with key '{}'", key)));
  YAML::Node value = map.node[std::string(key)];
  if (!value.IsDefined()) {
    fail(map.path.empty() ? fmt::format("missing key '{}' at the top level", key)
                          : fmt::format("missing key '{}' in '{}'", key, map.path));
  }
  return YamlNode(document_, child(std::move(value), path_of_key(map.path, key)));
}

std::optional<YamlNode> YamlNode::find(std::string_view key) const {
  const Entry& map = entry(node_);
  if (!map.node.IsMap()) fail(no_map(map, "a map"));
  YAML::Node value = map.node[std::string(key)];
  if (!value.IsDefined() || value.IsNull()) return std::nullopt;
  return YamlNode(document_, child(std::move(value), path_of_key(map.path, key)));
}

std::vector<std::string> YamlNode::keys() const {
  const Entry& map = entry(node_);
  if (!map.node.IsMap()) fail(no_map(map, "a map"));
  std::vector<std::string> names;
  for (const auto& pair : map.node) names.push_back(pair.first.Scalar());
  return names;
}

void YamlNode::allow_keys(const std::vector<std::string>& allowed) const {
  const Entry& map = entry(node_);
  if (!map.node.IsMap()) fail(no_map(map, "a map"));
  for (const auto& pair : map.node) {
    const std::string& key = pair.first.Scalar();
    if (std::find(allowed.begin(), allowed.end(), key) != allowed.end()) continue;
    throw ConfigError(place(document_->file, pair.first.Mark()),
                      fmt::format("unknown key '{}'; allowed: {}{}", printable_line(key), join(allowed),
                                  did_you_mean(key, allowed)));
  }
}

std::size_t YamlNode::size() const {
  const YAML::Node& list = entry(node_).node;
  if (!list.IsSequence()) fail(fmt::format("expected a list, found {}", found(list)));
  return list.size();
}

YamlNode YamlNode::operator[](std::size_t i) const {
  PARPLAN_ASSERT(i < size(), fmt::format("item {} of {}", i, size()));
  const Entry& list = entry(node_);
  return YamlNode(document_, child(list.node[i], fmt::format("{}[{}]", list.path, i)));
}

std::vector<YamlNode> YamlNode::items() const {
  std::vector<YamlNode> all;
  for (std::size_t i = 0; i < size(); ++i) all.push_back((*this)[i]);
  return all;
}

std::string YamlNode::as_string() const {
  const YAML::Node& node = entry(node_).node;
  if (!node.IsScalar()) fail(fmt::format("expected text, found {}", found(node)));
  return node.Scalar();
}

std::string YamlNode::as_name() const {
  std::string name = printable_line(as_string());
  if (name.empty()) fail("expected a name, found ''");
  return name;
}

bool YamlNode::is_quoted() const { return entry(node_).node.IsScalar() && entry(node_).node.Tag() == "!"; }

bool YamlNode::as_bool() const {
  const YAML::Node& node = entry(node_).node;
  if (node.IsScalar() && node.Scalar() == "true") return true;
  if (node.IsScalar() && node.Scalar() == "false") return false;
  fail(fmt::format("expected true or false, found {}", found(node)));
}

std::int64_t YamlNode::as_integer(std::int64_t minimum, std::int64_t maximum) const {
  const YAML::Node& node = entry(node_).node;
  if (node.IsScalar()) {
    const std::string& text = node.Scalar();
    std::int64_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    const bool whole = error == std::errc{} && end == text.data() + text.size();
    if (whole && number >= minimum && number <= maximum) return number;
  }
  std::string wanted = "a whole number";
  if (minimum != INT64_MIN && maximum != INT64_MAX) {
    wanted += fmt::format(" from {} to {}", minimum, maximum);
  } else if (minimum != INT64_MIN) {
    wanted += fmt::format(" of at least {}", minimum);
  } else if (maximum != INT64_MAX) {
    wanted += fmt::format(" of at most {}", maximum);
  }
  fail(fmt::format("expected {}, found {}", wanted, found(node)));
}

double YamlNode::as_number() const {
  const YAML::Node& node = entry(node_).node;
  if (node.IsScalar()) {
    const std::string& text = node.Scalar();
    double number = 0.0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error == std::errc{} && end == text.data() + text.size() && std::isfinite(number)) return number;
  }
  fail(fmt::format("expected a number, found {}", found(node)));
}

Bytes YamlNode::as_bytes() const { return parse_quantity(*this, parse_bytes); }
BytesPerSecond YamlNode::as_bandwidth() const { return parse_quantity(*this, parse_bandwidth); }
BytesPerSecond YamlNode::as_line_rate() const { return parse_quantity(*this, parse_line_rate); }
Seconds YamlNode::as_duration() const { return parse_quantity(*this, parse_duration); }
FlopsPerSecond YamlNode::as_flop_rate() const { return parse_quantity(*this, parse_flop_rate); }
Watts YamlNode::as_power() const { return parse_quantity(*this, parse_power); }

std::size_t YamlNode::as_choice(const std::vector<std::string>& allowed) const {
  const YAML::Node& node = entry(node_).node;
  if (!node.IsScalar()) fail(fmt::format("expected one of {}, found {}", join(allowed), found(node)));
  const std::string& text = node.Scalar();
  const auto at = std::find(allowed.begin(), allowed.end(), text);
  if (at == allowed.end()) {
    fail(fmt::format("expected one of {}, found '{}'{}", join(allowed), text, did_you_mean(text, allowed)));
  }
  return static_cast<std::size_t>(at - allowed.begin());
}

void YamlNode::fail(const std::string& message) const { throw ConfigError(location(), printable_line(message)); }

}  // namespace parplan
