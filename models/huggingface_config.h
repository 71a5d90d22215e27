#pragma once

#include <initializer_list>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/model_spec.h"
#include "planner/base/yaml.h"

namespace parplan {

// A Hugging Face config.json while a family reads it. An absent key has the value that the caller
// gives: the default of transformers' config class. Every error is a ConfigError at its key.
struct HuggingFaceConfig {
  YamlNode root;
  std::vector<std::string> notes = {};            // what was read and ignored, for the user
  std::map<std::string, std::string> keys = {};   // by field of the spec: the key that gave it, for errors
  std::set<std::string, std::less<>> asked = {};  // keys that the family looked at
  std::vector<std::string> defaulted = {};        // fields of the spec whose size the file does not give

  // The key's value; nothing where it is absent or null.
  std::optional<YamlNode> find(const char* key);
  // Whether the key is present at all: for some keys, null and absence differ.
  bool says(const char* key);

  // The whole number at a node that `key` led to; errors name the key.
  std::int64_t whole(const char* key, const YamlNode& node, std::int64_t minimum, std::int64_t maximum) const;
  // A whole number of at least 1 for the spec's `field`. Several keys name the same thing and must
  // agree.
  std::int64_t size(const std::string& field, std::initializer_list<const char*> names, std::int64_t maximum,
                    std::int64_t absent);
  // Fails where the file gave none of the keys of one of the spec's fields, which `size` read.
  void require_sizes(std::initializer_list<const char*> fields) const;
  double number(const char* key, double absent);  // above 0
  bool flag(const char* key, bool absent);

  // One of transformers' activation names (ACT2FN) that parplan has as it is; `absent` where the
  // key is absent.
  FeedForwardKind plain_activation(const char* key, FeedForwardKind absent);
  FeedForwardKind gated_activation(const char* key, FeedForwardKind absent);

  void note_dropout(std::initializer_list<const char*> names);
  // Fails where the flag is not `supported`; `reason` says what the flag means.
  void require(const char* key, bool supported, std::string_view reason);

  // An error at the key that gave `field`, or at the top of the file where a default did.
  [[noreturn]] void fail(const std::string& field, const std::string& message) const;
};

// A model_type that parplan reads.
struct HuggingFaceType {
  std::string_view name;
  void (*read)(HuggingFaceConfig&, ModelSpec&);
};
std::span<const HuggingFaceType> huggingface_types();

}  // namespace parplan
