#include "runtime/checkpoints.h"

#include <unistd.h>

#include <algorithm>
#include <future>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <utility>

#include <fmt/format.h>

#include "planner/base/allocated.h"
#include "planner/base/error.h"
#include "planner/base/file.h"
#include "planner/base/json.h"
#include "planner/base/text.h"
#include "planner/graph/dynamic_quantization.h"
#include "planner/program/bucket_work.h"
#include "planner/program/orthogonalize.h"
#include "runtime/checkpoint/safetensors.h"
#include "runtime/checkpoint/shard_writer.h"
#include "runtime/device/cpu/host_conversion.h"
#include "runtime/launch/fingerprint.h"
#include "runtime/parameters.h"
#include "runtime/run_facts.h"

namespace parplan {
namespace {

constexpr std::chrono::milliseconds between_looks(100);

// Calls `work` for every hosted rank, each in a thread; the first exception is thrown here.
void for_each_hosted(const LocalJob& job, const std::function<void(std::size_t, int)>& work) {
  std::vector<std::future<void>> threads;
  for (std::size_t i = 0; i < job.hosted().size(); ++i)
    threads.push_back(std::async(std::launch::async, work, i, job.hosted()[i]));
  for (std::future<void>& thread : threads) thread.wait();
  for (std::future<void>& thread : threads) thread.get();
}

std::string quoted(const std::vector<std::string>& lines) {
  constexpr std::size_t shown = 3;
  std::vector<std::string> some;
  for (const std::string& line : lines)
    if (some.size() < shown) some.push_back(fmt::format("'{}'", line));
  if (lines.size() > shown) some.push_back(fmt::format("{} more", lines.size() - shown));
  return join(some);
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);)
    if (!line.empty() && !line.starts_with('#') && !line.starts_with("name:")) lines.push_back(line);
  return lines;
}

std::vector<std::string> lines_beyond(const std::string& text, const std::string& other) {
  const std::vector<std::string> known = lines_of(other);
  std::vector<std::string> beyond;
  for (const std::string& line : lines_of(text))
    if (std::ranges::find(known, line) == known.end()) beyond.push_back(line);
  return beyond;
}

const Fact* find_fact(const std::vector<Fact>& facts, const std::string& name) {
  const auto found = std::ranges::find(facts, name, &Fact::name);
  return found == facts.end() ? nullptr : &*found;
}

// First moments have a sign.
bool is_signed(State state) {
  return state == State::first_moment;
}

void write_codes(const Arena& arena, const StateBuffer& state, const std::vector<float>& values) {
  const std::int64_t count = std::ssize(values);
  auto codes = allocated<std::uint8_t>(count, "what a checkpoint holds of a block");
  auto scales = allocated<float>(quantization_blocks(count), "what a checkpoint holds of a block");
  quantize(is_signed(state.state), values.data(), count, codes.data(), scales.data());
  arena.write(state.buffer, codes.data(), Bytes(count));
  arena.write(*state.scales, scales.data(), Bytes(std::ssize(scales) * size_of(DataType::fp32)));
}

// Reads so many elements of a slice from its first one on, in fp32.
void read_elements(const Arena& arena, const WrittenSlice& written, std::int64_t count, std::byte* to,
                   const std::string& file) {
  const std::string what = fmt::format("the checkpoint's file {}", file);
  const std::int64_t held = size_of(written.type);
  if (held == size_of(DataType::fp32))
    return arena.read(written.buffer, to, Bytes(count * held), Bytes(written.at * held));
  auto narrow = allocated<std::byte>(count * held, what);
  arena.read(written.buffer, narrow.data(), Bytes(count * held), Bytes(written.at * held));
  auto wide = allocated<float>(count, what);
  if (written.scales) {
    const std::int64_t first = written.at / quantization_block;
    auto scales = allocated<float>(quantization_blocks(written.at + count) - first, what);
    arena.read(*written.scales, scales.data(), Bytes(std::ssize(scales) * size_of(DataType::fp32)),
               Bytes(first * size_of(DataType::fp32)));
    dequantize(is_signed(written.state), reinterpret_cast<const std::uint8_t*>(narrow.data()), scales.data(),
               written.at % quantization_block, count, wide.data());
  } else {  // frozen parameters have no master copy
    widen(written.type, narrow.data(), count, wide.data());
  }
  std::ranges::copy(std::as_bytes(std::span(wide)), to);
}

// Whether a file of a checkpoint is written piece by piece, before the run goes on: where it has
// something that is on NVMe, of which the host then never has more than a piece.
bool is_streamed(const Program& program, const std::vector<WrittenSlice>& slices) {
  return std::ranges::any_of(
      slices, [&](const WrittenSlice& written) { return program.buffers[written.buffer].home == Home::nvme; });
}

// Calls visit(slice, elements before it) for pieces of a slice, each of at most so many elements,
// which lie one behind the other.
template <class Visit>
void for_each_piece(const LogicalSlice& slice, std::int64_t most, Visit visit) {
  const std::int64_t rows = std::max<std::int64_t>(most / std::max<std::int64_t>(slice.columns, 1), 1);
  const std::int64_t columns = std::min(slice.columns, most);
  for (std::int64_t row = 0; row < slice.rows; row += rows)
    for (std::int64_t column = 0; column < slice.columns; column += columns)
      visit(LogicalSlice{.row = slice.row + row,
                         .column = slice.column + column,
                         .rows = std::min(rows, slice.rows - row),
                         .columns = std::min(columns, slice.columns - column)},
            row * slice.columns + column);
}

// The states that a plan's training keeps of a parameter.
std::vector<State> states_of(const TrainingSpec& training, const Tensor& parameter) {
  const OptimizerState kept = optimizer_state(training);
  std::vector<State> states{State::parameter};
  if (parameter.frozen) return states;
  if (kept.first_moment) states.push_back(State::first_moment);
  if (kept.second_moment && !is_orthogonalized(parameter, training)) states.push_back(State::second_moment);
  return states;
}

std::vector<std::int64_t> sizes_of(const Tensor& tensor) {
  std::vector<std::int64_t> sizes;
  for (const TensorDim& dim : tensor.dims) sizes.push_back(dim.size);
  return sizes;
}

// What differs so that the checkpoint cannot be gone on from.
std::vector<std::string> contradictions(const CheckpointReader& reader, const OpGraph& graph, const Plan& plan,
                                        const std::vector<Fact>& facts) {
  const CheckpointIndex& index = reader.index();
  std::vector<std::string> all;
  const std::vector<std::string> there = lines_beyond(index.model, plan.model_text);
  const std::vector<std::string> here = lines_beyond(plan.model_text, index.model);
  if (!there.empty()) all.push_back(fmt::format("the model has {} only there", quoted(there)));
  if (!here.empty()) all.push_back(fmt::format("the model has {} only in the plan", quoted(here)));
  for (const Fact& fact : facts) {
    const Fact* const written = find_fact(index.facts, fact.name);
    const std::string before = written == nullptr ? std::string(value_before(fact.name)) : written->value;
    if (has_to_match(fact.name) && before != fact.value)
      all.push_back(fmt::format("{} is {} there and {} in the plan", fact.name, before, fact.value));
  }
  if (!all.empty()) return all;
  for (const TensorId id : parameters(graph))
    for (const State state : states_of(plan.training, graph.tensors[id])) {
      const Tensor& tensor = graph.tensors[id];
      const std::string name = state_name(state, tensor, plan.training);
      const CheckpointTensor* const found = reader.find(name);
      if (found == nullptr || found->shape != sizes_of(tensor) || found->dtype != "F32")
        return {fmt::format("there is no {} of the plan's shape", name)};
    }
  return all;
}

}  // namespace

std::string state_name(State state, const Tensor& tensor, const TrainingSpec& training) {
  if (state == State::parameter) return tensor.name;
  const bool is_momentum = training.optimizer == Optimizer::sgd || is_orthogonalized(tensor, training);
  const char* const kind = is_momentum ? "momentum_buffer" : state == State::first_moment ? "exp_avg" : "exp_avg_sq";
  return fmt::format("optimizer.state.{}.{}", kind, tensor.name);
}

std::unique_ptr<FolderClaim> claim_folder(const CheckpointOptions& options, Rendezvous& rendezvous) {
  std::unique_ptr<FolderClaim> claim;
  std::string text;
  agree(rendezvous, [&] {
    if (rendezvous.process() != 0) return;
    const std::vector<std::int64_t> steps = complete_checkpoints(options.folder);
    if (!options.resume && !steps.empty())
      throw ConfigError(
          fmt::format("'{}' holds checkpoints up to step {}; go on from there with --resume, or give a "
                      "folder of its own to a run from the first step",
                      options.folder, steps.back()));
    std::random_device random;
    text = fmt::format("parplan {} {:08x}{:08x}\n", getpid(), random(), random());
    make_folder(options.folder);
    claim = std::make_unique<FolderClaim>(options.folder, text);
    remove_leftovers(options.folder);
  });
  text = text_of(broadcast(rendezvous, std::as_bytes(std::span(text)), 0));
  agree(rendezvous, [&] {
    if (!sees_claim(options.folder, text))
      throw ConfigError(
          fmt::format("'{}' is not the folder that process 0 sees under this name; checkpoints need one "
                      "that all machines share",
                      options.folder));
  });
  return claim;
}

std::unique_ptr<CheckpointReader> find_checkpoint(const std::string& folder, const OpGraph& graph, const Plan& plan,
                                                  const std::vector<Fact>& facts, Rendezvous& rendezvous) {
  std::string path;  // process 0 decides which one
  agree(rendezvous, [&] {
    if (rendezvous.process() != 0) return;
    const std::vector<std::int64_t> steps = complete_checkpoints(folder);
    if (!steps.empty()) path = path_of_checkpoint(folder, steps.back());
  });
  path = text_of(broadcast(rendezvous, std::as_bytes(std::span(path)), 0));
  if (path.empty()) return nullptr;
  std::unique_ptr<CheckpointReader> reader;
  std::string text;
  agree(rendezvous, [&] {
    const std::string file = path + '/' + index_name;
    text = read_file(file);
    reader = std::make_unique<CheckpointReader>(path, read_index(text, file));
    const std::vector<std::string> all = contradictions(*reader, graph, plan, facts);
    if (!all.empty())
      throw ConfigError({file}, fmt::format("this checkpoint is not of the plan's training: {}; resume with the plan's "
                                            "own checkpoints, or give another folder",
                                            join(all, "; ")));
    const std::vector<CheckpointFile>& files = reader->index().files;
    for (std::size_t i = 0; i < files.size(); ++i)
      if (static_cast<int>(i % static_cast<std::size_t>(rendezvous.processes())) == rendezvous.process())
        check_file(path, files[i]);
  });
  agree_on(rendezvous, std::vector<Fact>{{"checkpoint", fmt::format("'{}' (fingerprint {})", path,
                                                                    write_fingerprint(fingerprint(text)))}});
  return reader;
}

std::vector<std::string> changed_facts(const CheckpointIndex& index, const std::vector<Fact>& facts) {
  std::vector<std::string> all;
  for (const Fact& fact : facts) {
    const Fact* const written = find_fact(index.facts, fact.name);
    if (written != nullptr && written->value != fact.value)
      all.push_back(fmt::format("{} is {}, and was {} in the checkpoint", fact.name, fact.value, written->value));
  }
  return all;
}

void restore(LocalJob& job, const OpGraph& graph, const TrainingSpec& training, const CheckpointReader& from,
             std::int64_t piece_bytes) {
  for_each_hosted(job, [&](std::size_t, int rank) {
    const Program& program = job.programs()[rank];
    const Arena& arena = job.arena(rank);
    for (std::size_t b = 0; b < program.buckets.size(); ++b)
      for (const StateBuffer& state : all_state(program, program.buckets[b], training.precision)) {
        // Codes share scales, so that a block of them is made whole. Else what lies between slices
        // is as it was initialised.
        auto values =
            allocated<float>(state.scales ? state.elements() : 0, "what a checkpoint holds of a block");
        for (const HeldSlice& held : slices_of(graph, program, static_cast<int>(b), state.held)) {
          const std::string name = state_name(state.state, graph.tensors[held.tensor], training);
          const CheckpointTensor* const tensor = from.find(name);
          PARPLAN_ASSERT(tensor != nullptr, name);
          const std::int64_t at = held.at;
          if (state.scales) {
            from.read(*tensor, held.slice, values.data() + at);
            continue;
          }
          const std::int64_t most = piece_bytes / size_of(DataType::fp32);
          auto piece = allocated<float>(std::min(most, held.slice.elements()), "a piece of a checkpoint");
          for_each_piece(held.slice, most, [&](const LogicalSlice& slice, std::int64_t before) {
            from.read(*tensor, slice, piece.data());
            write_numbers(arena, state.buffer, state.type, piece.data(), slice.elements(), at + before);
          });
        }
        if (state.scales) write_codes(arena, state, values);
      }
    const std::optional<LossScale>& scale = from.index().loss_scale;
    if (program.loss_scale_buffer && scale) arena.write(*program.loss_scale_buffer, &*scale, Bytes(sizeof *scale));
  });
  job.set_skipped(from.index().skipped_steps);
}

Checkpoints::Checkpoints(CheckpointOptions options, const LocalJob& job, const OpGraph& graph, const Plan& plan,
                         std::vector<Fact> facts, Rendezvous& rendezvous, Talk talk)
    : options_(std::move(options)),
      job_(job),
      graph_(graph),
      training_(plan.training),
      model_(plan.model_text),
      facts_(std::move(facts)),
      rendezvous_(rendezvous),
      talk_(std::move(talk)),
      shards_(lay_out_shards()) {}

// A tensor has its own name in every file: where a rank has several slices of one, each lies in
// another file.
std::vector<Checkpoints::ShardLayout> Checkpoints::lay_out_shards() const {
  std::vector<ShardLayout> layouts;
  const std::vector<std::vector<WrittenSlice>> divided = divide_state(graph_, job_.programs(), training_.precision);
  for (std::size_t rank = 0; rank < divided.size(); ++rank) {
    std::vector<ShardLayout> own;
    std::map<std::pair<State, TensorId>, std::size_t> count;
    for (const WrittenSlice& slice : divided[rank]) {
      if (options_.parameters_only && slice.state != State::parameter) continue;
      const std::size_t number = count[{slice.state, slice.tensor}]++;
      if (number == own.size())
        own.push_back({.name = fmt::format("rank-{:05}-of-{:05}{}.safetensors", rank, divided.size(),
                                           number == 0 ? "" : fmt::format("-rest-{}", number)),
                       .rank = static_cast<int>(rank),
                       .slices = {},
                       .header = {}});
      own[number].slices.push_back(slice);
    }
    for (ShardLayout& layout : own) layouts.push_back(std::move(layout));
  }
  for (ShardLayout& layout : layouts) {
    SafetensorsHeader header;
    Json offsets = Json::object();
    std::int64_t end = 0;
    for (const WrittenSlice& written : layout.slices) {
      const Tensor& tensor = graph_.tensors[written.tensor];
      const bool matrix = tensor.dims.size() == 2;
      const LogicalSlice& slice = written.slice;
      SafetensorsEntry entry{.name = state_name(written.state, tensor, training_),
                             .dtype = "F32",
                             .shape = matrix ? std::vector{slice.rows, slice.columns} : std::vector{slice.rows},
                             .begin = end,
                             .end = end + slice.elements() * size_of(DataType::fp32)};
      end = entry.end;
      offsets[entry.name]["saved_offsets"] = matrix ? std::vector{slice.row, slice.column} : std::vector{slice.row};
      header.entries.push_back(std::move(entry));
    }
    // As PyTorch's distributed checkpoints say where a shard lies in its tensor
    // (HuggingFaceStorageWriter), so that its tools join the files.
    header.metadata = {{"format", "pt"}, {"DCP_SHARDING_INFO", offsets.dump()}};
    layout.header = write_safetensors_header(header);
  }
  return layouts;
}

std::vector<CheckpointTensor> Checkpoints::list_tensors() const {
  std::map<std::pair<TensorId, State>, CheckpointTensor> tensors;
  for (std::size_t file = 0; file < shards_.size(); ++file)
    for (const WrittenSlice& written : shards_[file].slices) {
      CheckpointTensor& tensor = tensors[{written.tensor, written.state}];
      tensor.parts.push_back({.file = static_cast<int>(file), .slice = written.slice});
    }
  std::vector<CheckpointTensor> list;
  for (auto& [key, tensor] : tensors) {
    tensor.name = state_name(key.second, graph_.tensors[key.first], training_);
    tensor.dtype = "F32";
    tensor.shape = sizes_of(graph_.tensors[key.first]);
    list.push_back(std::move(tensor));
  }
  return list;
}

Shard Checkpoints::snapshot(const ShardLayout& layout) const {
  const Arena& arena = job_.arena(layout.rank);
  std::int64_t elements = 0;
  for (const WrittenSlice& written : layout.slices) elements += written.slice.elements();
  constexpr std::int64_t element = size_of(DataType::fp32);
  Shard shard{.name = layout.name, .header = layout.header, .data = {}};
  allocate(shard.data, elements * element, fmt::format("the checkpoint's file {}", layout.name));
  std::byte* to = shard.data.data();
  for (const WrittenSlice& written : layout.slices) {
    read_elements(arena, written, written.slice.elements(), to, layout.name);
    to += written.slice.elements() * element;
  }
  return shard;
}

CheckpointFile Checkpoints::stream(const ShardLayout& layout, const std::string& folder) const {
  constexpr std::int64_t element = size_of(DataType::fp32);
  const std::int64_t most = options_.piece_bytes / element;
  const Arena& arena = job_.arena(layout.rank);
  std::vector<std::byte> piece;
  std::size_t slice = 0;
  std::int64_t done = 0;  // of it
  return write_shard(folder, layout.name, layout.header, [&]() -> std::span<const std::byte> {
    while (slice < layout.slices.size() && done == layout.slices[slice].slice.elements()) ++slice, done = 0;
    if (slice == layout.slices.size()) return {};
    WrittenSlice rest = layout.slices[slice];
    const std::int64_t count = std::min(most, rest.slice.elements() - done);
    rest.at += done;
    done += count;
    allocate(piece, count * element, fmt::format("a piece of the checkpoint's file {}", layout.name));
    read_elements(arena, rest, count, piece.data(), layout.name);
    return piece;
  });
}

void Checkpoints::save(const TrainingPosition& position) {
  finish();
  last_step_ = position.step;
  const int first = job_.hosted().front();
  index_ = {.step = position.step,
            .skipped_steps = position.skipped_steps,
            .next_sample = position.next_sample,
            .model = model_,
            .facts = facts_};
  if (const auto buffer = job_.programs()[first].loss_scale_buffer) {
    index_.loss_scale.emplace();
    job_.arena(first).read(*buffer, &*index_.loss_scale, Bytes(sizeof(LossScale)));
  }
  std::string refused;  // by the file system of process 0
  if (rendezvous_.process() == 0) {
    try {
      begin_checkpoint(options_.folder, position.step);
    } catch (const RunError& error) {
      refused = error.what();
    }
  }
  std::vector<std::vector<Shard>> by_rank(job_.hosted().size());
  for_each_hosted(job_, [&](std::size_t i, int rank) {
    for (const ShardLayout& layout : shards_)
      if (layout.rank == rank && !is_streamed(job_.programs()[rank], layout.slices))
        by_rank[i].push_back(snapshot(layout));
  });
  refused = text_of(broadcast(rendezvous_, std::as_bytes(std::span(refused)), 0));
  if (!refused.empty()) {
    fail(refused);
    return;
  }
  const std::string folder = path_of_incomplete(options_.folder, position.step);
  std::vector<Shard> own;
  for (std::vector<Shard>& shards : by_rank) std::ranges::move(shards, std::back_inserter(own));
  WrittenShards streamed;
  std::mutex mutex;
  for_each_hosted(job_, [&](std::size_t, int rank) {
    try {
      for (const ShardLayout& layout : shards_) {
        if (layout.rank != rank || !is_streamed(job_.programs()[rank], layout.slices)) continue;
        CheckpointFile file = stream(layout, folder);
        const std::scoped_lock lock(mutex);
        streamed.files.push_back(std::move(file));
      }
    } catch (const RunError& error) {
      const std::scoped_lock lock(mutex);
      streamed.failure = error.what();
    }
  });
  writer_ = std::make_unique<ShardWriter>(folder, std::move(own), std::move(streamed));
}

std::int64_t Checkpoints::held() const {
  return writer_ == nullptr ? 0 : writer_->held();
}

void Checkpoints::poll() {
  if (writer_ != nullptr && is_written(std::chrono::milliseconds(0))) complete();
}

void Checkpoints::finish() {
  if (writer_ == nullptr) return;
  while (!is_written(between_looks)) {
  }
  complete();
}

// Each process says nothing while it writes, and then how that ended. All see the same.
bool Checkpoints::is_written(std::chrono::milliseconds patience) {
  if (outcomes_.empty() && writer_->is_done(patience)) {
    try {
      outcomes_.emplace_back("written");
      for (const CheckpointFile& file : writer_->files())
        outcomes_.back() += fmt::format("\n{} {} {}", file.name, file.bytes, file.crc32);
    } catch (const RunError& error) {
      outcomes_.back() = fmt::format("failed\n{}", error.what());
    }
  }
  const std::string own = outcomes_.empty() ? "" : outcomes_.front();
  std::vector<std::string> all;
  for (const std::vector<std::byte>& bytes : rendezvous_.all_gather(std::as_bytes(std::span(own))))
    all.push_back(text_of(bytes));
  if (std::ranges::any_of(all, [](const std::string& outcome) { return outcome.empty(); })) return false;
  outcomes_ = std::move(all);
  return true;
}

void Checkpoints::complete() {
  writer_.reset();
  const std::vector<std::string> outcomes = std::exchange(outcomes_, {});
  std::string failure;
  std::map<std::string, CheckpointFile> files;
  for (const std::string& outcome : outcomes) {
    std::istringstream lines(outcome);
    std::string word;
    std::getline(lines, word);
    if (word != "written" && failure.empty()) std::getline(lines, failure);
    for (CheckpointFile file; word == "written" && lines >> file.name >> file.bytes >> file.crc32;)
      files[file.name] = file;
  }
  if (rendezvous_.process() == 0) {
    try {
      if (!failure.empty()) throw RunError(failure);
      for (const ShardLayout& layout : shards_) index_.files.push_back(files.at(layout.name));
      index_.tensors = list_tensors();
      complete_checkpoint(options_.folder, index_);
    } catch (const RunError& error) {
      failure = error.what();
      abandon_checkpoint(options_.folder, index_.step);
    }
  }
  failure = text_of(broadcast(rendezvous_, std::as_bytes(std::span(failure)), 0));
  if (!failure.empty()) {
    fail(failure);
    return;
  }
  last_written_ = index_.step;
  talk_.say(fmt::format("wrote checkpoint {}", path_of_checkpoint(options_.folder, index_.step)));
  if (rendezvous_.process() != 0 || options_.keep == 0) return;
  try {
    keep_newest(options_.folder, static_cast<std::size_t>(options_.keep));
  } catch (const RunError& error) {
    talk_.complain(fmt::format("{}; an old checkpoint stays", error.what()));
  }
}

void Checkpoints::fail(const std::string& reason) {
  ++failures_;
  talk_.complain(fmt::format("no checkpoint of step {}: {}; the run goes on", index_.step, reason));
}

}  // namespace parplan
