#include "runtime/measure_kernels.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>

#include <fmt/format.h>

#include "planner/base/error.h"

namespace parplan {
namespace {

struct Piece {
  std::int64_t elements = 0;
  DataType type = DataType::fp32;
  OperandContent content = OperandContent::values;
  Bytes bytes() const { return align_up(Bytes(elements * size_of(type)), 256); }
};

// The type with which its kernel is called: for products in fp8 that of their factors before the
// cast.
DataType called_in(const KernelMeasurement& kernel) {
  return kernel.type == DataType::fp8 ? in_memory(kernel.type) : kernel.type;
}

// The operands of a kernel, from its row, without the workspace.
std::vector<Piece> operands_of(const KernelMeasurement& kernel) {
  std::vector<Piece> pieces;
  for (const OperandRow& operand : row_of(kernel.kind).operands) {
    const OperandSize& size = operand.size;
    if (operand.source == OperandSource::workspace || !is_present(operand, kernel.shape, false)) continue;
    pieces.push_back({.elements = size.elements(kernel.shape),
                      .type = type_of(size.content, called_in(kernel)),
                      .content = size.content == OperandContent::fp32 ? OperandContent::values : size.content});
  }
  return pieces;
}

Bytes workspace_of(const KernelMeasurement& kernel, bool on_cpu) {
  const OpRow& row = row_of(kernel.kind);
  const auto workspace = on_cpu ? row.cpu_workspace : row.cuda_workspace;
  return workspace ? align_up(workspace(kernel.shape), 256) : Bytes(0);
}

// The median on a device of its own; the lower quartile on a CPU, where other programs can only
// lengthen runs.
Seconds typical(std::vector<Seconds> values, bool on_cpu) {
  const auto chosen = values.begin() + static_cast<std::ptrdiff_t>(values.size() / (on_cpu ? 4 : 2));
  std::nth_element(values.begin(), chosen, values.end());
  return *chosen;
}

// splitmix64 (Steele, Lea, Flood 2014).
std::uint64_t next_random(std::uint64_t& state) {
  std::uint64_t z = state += 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// A word of numbers between 1/2 and 1 of either sign: sign and fraction are random, the exponent is
// that of 1/2.
std::uint32_t word_of(OperandContent content, DataType type, std::uint64_t random, std::int64_t valid) {
  const std::uint32_t bits = static_cast<std::uint32_t>(random >> 32);
  if (content == OperandContent::ids)
    return static_cast<std::uint32_t>((random >> 33) % static_cast<std::uint64_t>(std::max<std::int64_t>(valid, 1)));
  if (content == OperandContent::non_negative) return 0x3c23d70au;  // 0.01f
  switch (type) {
    case DataType::bf16: return (bits & 0x807f807fu) | 0x3f003f00u;
    case DataType::fp16: return (bits & 0x83ff83ffu) | 0x38003800u;
    default: return (bits & 0x807fffffu) | 0x3f000000u;
  }
}

// The state of measuring on one backend: the memory that kernels work in, and numbers to fill it
// with.
class Bench {
 public:
  Bench(Backend& backend, const MeasureOptions& options)
      : backend_(backend), options_(options), on_cpu_(std::string_view(backend.name()) == "cpu") {
    host_ = backend_.allocate_host(pattern_bytes);
    pool_ = backend_.allocate(options_.memory);
  }
  ~Bench() {
    backend_.release(pool_);
    backend_.release_host(host_);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  // Nothing where the pool is too small, or a single run takes longer than `share`.
  std::optional<Seconds> time(const KernelMeasurement& kernel, Seconds share) {
    const std::vector<Piece> pieces = operands_of(kernel);
    const Bytes workspace = workspace_of(kernel, on_cpu_);
    Bytes set;
    for (const Piece& piece : pieces) set += piece.bytes();
    if (set + workspace > options_.memory) return std::nullopt;
    constexpr std::int64_t most_sets = 1024;
    std::vector<std::vector<void*>> operands;
    std::byte* next = static_cast<std::byte*>(pool_) + workspace.count;
    const auto add_set = [&] {
      std::vector<void*>& one = operands.emplace_back();
      for (const Piece& piece : pieces) {
        fill(next, piece, kernel.shape.valid);
        one.push_back(next);
        next += piece.bytes().count;
      }
      if (workspace.count > 0) one.push_back(pool_);
    };
    const auto run = [&](std::int64_t i) {
      const std::vector<void*>& one = operands[static_cast<std::size_t>(i) % operands.size()];
      backend_.run(0, {.kind = kernel.kind, .shape = kernel.shape, .type = called_in(kernel), .operands = one});
    };

    // One run chooses algorithms and touches memory, the next shows how long a run takes.
    add_set();
    run(0);
    backend_.synchronize();
    backend_.mark(0, 0);
    run(0);
    backend_.mark(0, 1);
    backend_.synchronize();
    const Seconds once = std::max(backend_.time_at(1), Seconds(1e-7));
    if (once > share) return std::nullopt;

    // Many runs in a row, so that the clock between them does not count and operands come from
    // memory, as far as the share allows.
    constexpr Seconds long_enough(200e-6);
    constexpr double fewest_rows = 8.0;  // warm-up and runs
    const std::int64_t sets = std::clamp<std::int64_t>(
        std::min(ceil_div(options_.footprint.count, set.count), (options_.memory - workspace).count / set.count), 1,
        most_sets);
    const double wanted =
        std::max(static_cast<double>(sets), std::min(long_enough / once, static_cast<double>(most_sets)));
    const std::int64_t in_a_row =
        std::max<std::int64_t>(1, static_cast<std::int64_t>(std::min(wanted, share / fewest_rows / once)));
    while (static_cast<std::int64_t>(operands.size()) < std::min(sets, in_a_row)) add_set();
    const Seconds row_time = once * static_cast<double>(in_a_row);
    const std::int64_t key = next_key_++;
    const auto row = [&] {
      backend_.repeat(0, key, [&] {
        for (std::int64_t i = 0; i < in_a_row; ++i) run(i);
      });
    };
    return typical_of(row, share / row_time) / static_cast<double>(in_a_row);
  }

  // The time of a kernel with almost no work.
  Seconds launch(bool replayed) {
    constexpr int in_a_row = 100;
    const KernelMeasurement kernel = measured_kernel(OpKind::accumulate, DataType::fp32, {.rows = 16});
    std::byte* memory = static_cast<std::byte*>(pool_);
    std::vector<void*> operands;
    for (const Piece& piece : operands_of(kernel)) {
      fill(memory, piece, 0);
      operands.push_back(memory);
      memory += piece.bytes().count;
    }
    const auto work = [&] {
      for (int i = 0; i < in_a_row; ++i)
        backend_.run(0, {.kind = kernel.kind, .shape = kernel.shape, .type = kernel.type, .operands = operands});
    };
    const std::int64_t key = next_key_++;
    const auto row = [&] {
      if (replayed)
        backend_.repeat(0, key, work);
      else
        work();
    };
    constexpr double runs = 50.0;
    return typical_of(row, runs) / in_a_row;
  }

  Seconds copy(CopyRoute route, Bytes bytes) {
    void* outside = route == CopyRoute::on_device ? nullptr : backend_.allocate_host(bytes);
    std::byte* inside = static_cast<std::byte*>(pool_);
    void* from = route == CopyRoute::to_device ? outside : inside;
    void* to = route == CopyRoute::to_host     ? outside
               : route == CopyRoute::to_device ? inside
                                               : inside + options_.memory.count / 2;
    const Seconds time = typical_of([&] { backend_.copy(0, to, from, bytes); }, 10.0);
    if (outside != nullptr) backend_.release_host(outside);
    return time;
  }

 private:
  static constexpr Bytes pattern_bytes{4 << 20};

  // Runs one after another, each timed by itself: `runs` times, but at least 5 and at most 50,
  // after 3 that are not counted.
  template <class Row>
  Seconds typical_of(const Row& row, double runs) {
    const int count = static_cast<int>(std::clamp(runs, 5.0, 50.0));
    for (int i = 0; i < 3; ++i) row();
    backend_.synchronize();
    backend_.mark(0, 0);
    for (int i = 0; i < count; ++i) {
      row();
      backend_.mark(0, i + 1);
    }
    backend_.synchronize();
    std::vector<Seconds> times;
    Seconds last;
    for (int i = 0; i < count; ++i) {
      const Seconds end = backend_.time_at(i + 1);
      times.push_back(end - last);
      last = end;
    }
    return typical(std::move(times), on_cpu_);
  }

  void fill(std::byte* memory, const Piece& piece, std::int64_t valid) {
    const std::int64_t bytes = piece.bytes().count;
    const std::tuple pattern{piece.content, piece.type, piece.content == OperandContent::ids ? valid : 0};
    if (pattern != pattern_) {
      backend_.synchronize();  // copies from it may be in progress
      std::uint64_t state = 20260101;
      for (std::int64_t i = 0; i < pattern_bytes.count / 4; ++i)
        static_cast<std::uint32_t*>(host_)[i] = word_of(piece.content, piece.type, next_random(state), valid);
      pattern_ = pattern;
    }
    // From the host once, then from what has been copied: twice as much each time.
    const std::int64_t first = std::min(bytes, pattern_bytes.count);
    backend_.copy(0, memory, host_, Bytes(first));
    for (std::int64_t done = first; done < bytes;) {
      const std::int64_t more = std::min(done, bytes - done);
      backend_.copy(0, memory + done, memory, Bytes(more));
      done += more;
    }
  }

  Backend& backend_;
  const MeasureOptions& options_;
  bool on_cpu_;
  void* host_ = nullptr;
  void* pool_ = nullptr;
  std::int64_t next_key_ = 1;
  std::optional<std::tuple<OperandContent, DataType, std::int64_t>> pattern_;
};

struct Features {
  std::int64_t out = 0;
  std::int64_t in = 0;
};
struct Sizes {
  std::vector<std::int64_t> tokens;
  std::vector<Features> features;
  std::vector<OpShape> products;  // in addition to tokens times features
  std::vector<std::int64_t> sequences;
  std::int64_t attention_tokens = 0;
  std::vector<std::int64_t> head_dims;
  std::int64_t heads = 0;
  std::vector<OpShape> elementwise;
  std::vector<OpShape> vocabulary;
  std::vector<std::int64_t> flat;
};

// Features are those of GPT-2 (768, 1280, 1600) and of Llama 3.2 1B (2048); the additional products
// fill no tile, or are deep, or narrow.
Sizes gpu_sizes() {
  return {.tokens = {1024, 4096, 16384},
          .features = {{768, 768},
                       {2304, 768},
                       {3072, 768},
                       {768, 3072},
                       {3840, 1280},
                       {1280, 5120},
                       {6400, 1600},
                       {1600, 6400},
                       {3072, 2048},
                       {8192, 2048},
                       {2048, 8192}},
          .products = {{.rows = 4096, .columns = 4096, .inner = 4096},
                       {.rows = 8192, .columns = 8192, .inner = 8192},
                       {.rows = 1000, .columns = 1000, .inner = 1000},
                       {.rows = 333, .columns = 776, .inner = 552},
                       {.rows = 128, .columns = 128, .inner = 8192},
                       {.rows = 64, .columns = 4096, .inner = 4096},
                       {.rows = 8192, .columns = 50304, .inner = 768}},
          .sequences = {512, 1024, 2048, 4096, 8192},
          .attention_tokens = 16384,
          .head_dims = {64, 128},
          .heads = 16,
          .elementwise = {{.rows = 256, .columns = 768},
                          {.rows = 2048, .columns = 768},
                          {.rows = 8192, .columns = 1600},
                          {.rows = 16384, .columns = 3072}},
          .vocabulary = {{.rows = 256, .columns = 50304},
                         {.rows = 1024, .columns = 50304},
                         {.rows = 4096, .columns = 50304}},
          .flat = {1 << 16, 1 << 20, 1 << 23, 1 << 25}};
}
Sizes cpu_sizes() {
  return {.tokens = {32, 128, 512},
          .features = {{768, 768}, {2304, 768}, {3072, 768}, {768, 3072}},
          .products = {{.rows = 256, .columns = 256, .inner = 256},
                       {.rows = 512, .columns = 512, .inner = 512},
                       {.rows = 1024, .columns = 1024, .inner = 1024},
                       {.rows = 333, .columns = 776, .inner = 552},
                       {.rows = 100, .columns = 100, .inner = 1000}},
          .sequences = {64, 128, 256, 512},
          .attention_tokens = 512,
          .head_dims = {32, 64, 128},
          .heads = 4,
          .elementwise = {{.rows = 32, .columns = 256},
                          {.rows = 128, .columns = 768},
                          {.rows = 512, .columns = 768},
                          {.rows = 512, .columns = 3072}},
          .vocabulary = {{.rows = 16, .columns = 8192}, {.rows = 64, .columns = 8192}, {.rows = 128, .columns = 50304}},
          .flat = {1 << 12, 1 << 16, 1 << 20, 1 << 22}};
}

// The sizes with which kinds of a row's `measured_over` are timed.
std::vector<OpShape> shapes_of(MeasuredOver over, const Sizes& sizes) {
  std::vector<OpShape> shapes;
  switch (over) {
    case MeasuredOver::nothing: break;
    case MeasuredOver::products:
      shapes = sizes.products;
      for (const std::int64_t tokens : sizes.tokens)
        for (const Features& features : sizes.features)
          shapes.push_back({.rows = tokens, .columns = features.out, .inner = features.in});
      break;
    case MeasuredOver::attention:
      for (const std::int64_t head_dim : sizes.head_dims)
        for (const std::int64_t sequence : sizes.sequences) {
          // With equal numbers of tokens, the launch and the cost per token could not be
          // distinguished.
          const std::int64_t most = std::max<std::int64_t>(sizes.attention_tokens / sequence, 1);
          for (const std::int64_t batch : std::set{most, std::max<std::int64_t>(most / 4, 1)})
            shapes.push_back({.sequence = sequence,
                              .batch = batch,
                              .heads = sizes.heads,
                              .kv_heads = sizes.heads,
                              .head_dim = head_dim});
        }
      break;
    case MeasuredOver::elementwise: return sizes.elementwise;
    case MeasuredOver::vocabulary: return sizes.vocabulary;
    case MeasuredOver::heads:
      for (const std::int64_t sequence : sizes.sequences)
        shapes.push_back(
            {.sequence = sequence, .batch = 2, .heads = sizes.heads, .kv_heads = sizes.heads, .head_dim = 64});
      break;
    case MeasuredOver::flat:
    case MeasuredOver::flat_fp32:
      for (const std::int64_t rows : sizes.flat) shapes.push_back({.rows = rows});
      break;
  }
  return shapes;
}

bool is_measured_in(const OpRow& row, DataType type) {
  const bool matrix = row.cost == CostClass::product || row.cost == CostClass::attention;
  if (type == DataType::tf32) return matrix;  // the rest is the same as in fp32
  if (type == DataType::fp8) return row.casts != nullptr;
  return row.measured_over != MeasuredOver::flat_fp32 || type == DataType::fp32;
}

}  // namespace

std::vector<KernelMeasurement> kernels_to_measure(BackendKind backend, const std::vector<DataType>& types) {
  const Sizes sizes = backend == BackendKind::cuda ? gpu_sizes() : cpu_sizes();
  std::vector<KernelMeasurement> kernels;
  for (const DataType type : types)
    for (const OpRow& row : op_rows())
      if (is_measured_in(row, type))
        for (const OpShape& shape : shapes_of(row.measured_over, sizes)) {
          KernelMeasurement kernel = measured_kernel(row.kind, type, shape);
          if (type != DataType::fp8 || multiplies_in_fp8(kernel.shape)) kernels.push_back(std::move(kernel));
        }
  return kernels;
}

Measurements measure_kernels(Backend& backend, const std::vector<KernelMeasurement>& kernels,
                             const MeasureOptions& options) {
  backend.attach_thread();
  backend.set_scalars({.step = 1000, .learning_rate = 1e-4});
  Measurements measurements;
  Bench bench(backend, options);
  measurements.launch = bench.launch(false);
  measurements.replayed_launch = bench.launch(true);
  const int all = static_cast<int>(kernels.size());
  // Warm-up and filling operands come on top of the counted runs, which get half of the budget.
  const Seconds share = options.budget * 0.5 / std::max(all, 1);
  for (int i = 0; i < all; ++i) {
    options.progress(i, all);
    KernelMeasurement kernel = kernels[i];
    if (const auto time = bench.time(kernel, share)) {
      kernel.time = *time;
      measurements.kernels.push_back(kernel);
    }
  }
  for (const CopyRoute route : {CopyRoute::on_device, CopyRoute::to_device, CopyRoute::to_host})
    for (const Bytes bytes : options.copies)
      if (2 * bytes <= options.memory)
        measurements.copies.push_back({.route = route, .bytes = bytes, .time = bench.copy(route, bytes)});
  options.progress(all, all);
  const Bytes used = backend.memory().used;
  if (std::string_view(backend.name()) != "cpu")
    measurements.library_memory = std::max(used - options.memory, Bytes(0));
  return measurements;
}

}  // namespace parplan
