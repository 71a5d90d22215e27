#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "planner/graph/stored_weights.h"
#include "planner/graph/tensor.h"

namespace parplan {

class MappedFile;

// The weights of a model as Hugging Face's libraries save them: one file `model.safetensors`, or
// several with `model.safetensors.index.json`. They are mapped: what nobody asks for is not read.
class WeightFiles {
 public:
  // ConfigError names the file that is missing or is not what the index says.
  explicit WeightFiles(const std::string& folder);
  ~WeightFiles();
  WeightFiles(const WeightFiles&) = delete;
  WeightFiles& operator=(const WeightFiles&) = delete;

  struct Weights {
    std::vector<std::int64_t> shape;
    std::string dtype;
    DataType type{};
    const std::byte* data = nullptr;
    std::size_t bytes = 0;
    std::string file;
  };
  // Those of every tensor of the list, in its order. ConfigError where one is missing, has another
  // shape, or numbers other than F32, F16 and BF16.
  std::vector<Weights> find(const std::vector<StoredTensor>& tensors) const;
  // The names of all that the list does not have.
  std::vector<std::string> beyond(const std::vector<StoredTensor>& tensors) const;
  // RunError names a file that was cut off since.
  void check_are_whole() const;
  // Changes with the names, shapes and places of the tensors, and with their values at the
  // beginning, in the middle and at the end of each: to compare all bytes, each process would have
  // to read all of them.
  std::uint64_t sampled_fingerprint() const;

 private:
  void add_file(const std::string& path);

  std::string folder_;
  std::vector<std::unique_ptr<MappedFile>> mappings_;
  std::map<std::string, Weights> weights_;
  std::uint64_t headers_ = 0;  // the fingerprint of those of all files
};

}  // namespace parplan
