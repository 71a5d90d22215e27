#include "planner/graph/op_kind.h"

#include <cmath>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

#include "planner/base/error.h"
#include "planner/graph/cpu_workspace.h"
#include "planner/graph/local_op.h"
#include "planner/graph/relative_position.h"
#include "tests/planner/graph/small_graphs.h"

namespace parplan {
namespace {

// A plausible size in every field.
OpShape plausible() {
  return {.rows = 64,
          .columns = 96,
          .inner = 32,
          .sequence = 16,
          .batch = 4,
          .heads = 4,
          .kv_heads = 2,
          .head_dim = 8,
          .all_heads = 4,
          .keys = 16,
          .buckets = 8,
          .most_distance = 12,
          .begin = 0,
          .valid = 90,
          .bias = true,
          .second = true,
          .apart = true};
}

bool has(const OpRow& row, OperandSource source) {
  for (const OperandRow& operand : row.operands)
    if (operand.source == source) return true;
  return false;
}

TEST_CASE("every op kind has its row at its place, under a name of its own") {
  std::set<std::string_view> names;
  REQUIRE(op_rows().size() == static_cast<std::size_t>(OpKind::count_));
  for (std::size_t i = 0; i < op_rows().size(); ++i) {
    const OpRow& row = op_rows()[i];
    CHECK(static_cast<std::size_t>(row.kind) == i);
    CHECK(&row_of(row.kind) == &row);
    CHECK(std::string_view(name(row.kind)) == row.name);
    CHECK(names.insert(row.name).second);
  }
  CHECK_THROWS_AS(row_of(OpKind::count_), InternalError);
}

TEST_CASE("every row has operands, does work, and has a workspace operand exactly where a workspace is promised") {
  for (const OpRow& row : op_rows()) {
    CAPTURE(row.name);
    CHECK(!row.operands.empty());
    REQUIRE(static_cast<bool>(row.work));
    for (DataType type : {DataType::fp32, DataType::bf16}) {
      const OpWork work = row.work(plausible(), type);
      CHECK(work.bytes > Bytes(0));
      CHECK(work.flops.value >= 0.0);
      CHECK((!work.matrix || work.flops.value > 0.0));
    }
    CHECK(has(row, OperandSource::workspace) == (row.cpu_workspace != nullptr || row.cuda_workspace != nullptr));
    if (has(row, OperandSource::workspace)) CHECK(row.operands.back().source == OperandSource::workspace);
    if (row.cpu_workspace) CHECK(row.cpu_workspace(plausible()) > Bytes(0));
    if (row.cuda_workspace) CHECK(row.cuda_workspace(plausible()) > Bytes(0));
  }
}

TEST_CASE("a kernel receives the operands of its row that its shape and its backend's workspace say") {
  const auto count = [](OpKind kind, const OpShape& shape, bool workspace) {
    return operand_count(row_of(kind), shape, workspace);
  };
  CHECK(count(OpKind::linear, {}, false) == 3);                 // x, weight, y
  CHECK(count(OpKind::linear, {.bias = true}, true) == 5);
  CHECK(count(OpKind::add, {.second = true}, false) == 3);      // a, b, sum
  CHECK(count(OpKind::add, {.bias = true, .second = true}, false) == 4);
  CHECK(count(OpKind::bias_gradient, {.bias = true}, true) == 3);
  CHECK(count(OpKind::adamw, {}, false) == 4);                  // gradient, parameter, m, v
  CHECK(count(OpKind::adamw, {.second = true, .norm = true, .master = true, .scaled = true}, false) == 7);
  CHECK(count(OpKind::adamw_8bit, {}, false) == 6);  // and the scales of m and v
  CHECK(count(OpKind::adamw_8bit, {.second = true, .norm = true, .master = true, .scaled = true}, false) == 9);
  CHECK(count(OpKind::sgd, {}, false) == 2);
  CHECK(count(OpKind::sgd, {.second = true, .norm = true, .master = true, .scaled = true}, false) == 6);
  CHECK(count(OpKind::muon_momentum, {}, false) == 2);
  CHECK(count(OpKind::muon_momentum, {.norm = true, .scaled = true}, false) == 4);
  CHECK(count(OpKind::muon, {.norm = true, .master = true, .scaled = true}, false) == 5);
  CHECK(count(OpKind::cross_entropy_gradient, {}, false) == 5);
  CHECK(count(OpKind::cross_entropy_gradient, {.scaled = true}, false) == 6);
  CHECK(count(OpKind::update_loss_scale, {}, false) == 2);
}

TEST_CASE("two ops in one kernel do the work of both and move less by what the second does not read again") {
  const OpShape shape{.rows = 64, .columns = 96, .inner = 32, .bias = true, .second = true};
  struct Pair {
    OpKind first, second, fused;
    OpShape of_second;
    std::int64_t saved;  // elements: the sum once; `before` once; the gradient between them written and read
  };
  const Pair pairs[] = {
      {OpKind::add, OpKind::layer_norm, OpKind::add_layer_norm, shape, 64 * 96},
      {OpKind::add, OpKind::rms_norm, OpKind::add_rms_norm, shape, 64 * 96},
      {OpKind::linear, OpKind::activation, OpKind::linear_gelu, shape, 64 * 96},
      {OpKind::linear_input_gradient, OpKind::activation_gradient, OpKind::linear_input_gradient_gelu,
       {.rows = 64, .columns = 32}, 2 * 64 * 32},
  };
  for (const Pair& pair : pairs)
    for (DataType type : {DataType::fp32, DataType::bf16}) {
      CAPTURE(name(pair.fused));
      const OpWork first = row_of(pair.first).work(shape, type),
                   second = row_of(pair.second).work(pair.of_second, type);
      const OpWork fused = row_of(pair.fused).work(shape, type);
      CHECK(fused.flops == first.flops + second.flops);
      CHECK(fused.bytes == first.bytes + second.bytes - Bytes(pair.saved * size_of(type)));
      CHECK(fused.matrix == first.matrix);
    }
}

TEST_CASE("every forward row says its local shape, and every operand but workspaces its size") {
  for (const OpRow& row : op_rows()) {
    CAPTURE(row.name);
    CHECK((row.localize != nullptr) == (row.sharding != ShardingRule::none));
    const bool heads = row.sharding == ShardingRule::heads || row.sharding == ShardingRule::head_sums;
    CHECK((row.widths != nullptr) == heads);
    for (const OperandRow& operand : row.operands) {
      CHECK((operand.size.elements == nullptr) == (operand.source == OperandSource::workspace));
      if (operand.size.elements != nullptr) CHECK(operand.size.elements(plausible()) > 0);
    }
  }
}

TEST_CASE("a row's cost class, its product and its work agree") {
  for (const OpRow& row : op_rows()) {
    CAPTURE(row.name);
    CHECK((row.product != nullptr) == (row.cost == CostClass::product));
    const bool matrix = row.cost == CostClass::product || row.cost == CostClass::attention;
    CHECK(matrix == row.work(plausible(), DataType::fp32).matrix);
    CHECK((row.unmeasured_share < 1.0) == (row.cost == CostClass::attention));
    // Products of forward ops are all that model FLOPs count.
    if (row.sharding != ShardingRule::none) CHECK((row.model_products != nullptr) == matrix);
    if (row.sharding == ShardingRule::none) CHECK((row.model_products == nullptr));
  }
}

TEST_CASE("what prices a kind without a measurement is measured itself, and costs alike") {
  for (const OpRow& row : op_rows()) {
    CAPTURE(row.name);
    CHECK(!row.measured_sizes.empty());
    if (!row.made_of) continue;
    const OpRow& other = row_of(*row.made_of);
    CHECK(other.measured_over != MeasuredOver::nothing);
    CHECK(!other.made_of);
    CHECK((other.cost == CostClass::product) == (row.cost == CostClass::product));
  }
}

TEST_CASE("an op on one rank that holds everything has the sizes of its tensors") {
  const OpGraph graph = small_gpt2(1);
  for (const Op& op : graph.ops) {
    const OpShape shape = shape_of(whole(graph, op));
    CAPTURE(op.name);
    CHECK(shape.rows == 4);
    if (op.kind == OpKind::attention) {
      CHECK(shape.heads == 2);
      CHECK(shape.sequence == 4);
    }
    if (op.kind == OpKind::embedding) CHECK(shape.valid == 11);
    if (op.kind == OpKind::linear) {
      CHECK(shape.columns == graph.tensors[op.parameters[0]].dims[0].size);
      CHECK(shape.inner == graph.tensors[op.parameters[0]].dims[1].size);
    }
  }
  Op update = graph.ops[0];
  update.kind = OpKind::adamw;
  CHECK_THROWS_AS(shape_of(whole(graph, update)), InternalError);
}

// Values of transformers' T5Attention._relative_position_bucket (5.24), with which 600 distances on
// each side agree for 32 and 8 buckets.
TEST_CASE("a distance has the bucket that transformers gives it, as long as single ones last and then by logarithms") {
  const auto both = [](std::int64_t distance) { return relative_bucket(distance, 32, 128, true); };
  const auto causal = [](std::int64_t distance) { return relative_bucket(distance, 32, 128, false); };
  for (std::int64_t distance = 0; distance < 8; ++distance) {
    CHECK(both(-distance) == distance);
    CHECK(both(distance) == (distance == 0 ? 0 : 16 + distance));
    CHECK(causal(-distance) == distance);
    CHECK(causal(distance) == 0);
  }
  // Bounds: 8 times powers of sqrt(2).
  const std::int64_t first[] = {8, 12, 16, 23, 32, 46, 64, 91};
  for (std::int64_t i = 0; i < 8; ++i) {
    CHECK(both(-first[i]) == 8 + i);
    CHECK(both(-first[i] + 1) == 7 + i);
    CHECK(both(first[i]) == 24 + i);
  }
  CHECK(both(-100'000) == 15);
  CHECK(both(100'000) == 31);
  CHECK(causal(-16) == 16);
  CHECK(causal(-127) == 31);
  CHECK(causal(-100'000) == 31);
  CHECK(relative_bucket(3, 8, 20, true) == 6);
  CHECK(relative_bucket(11, 8, 20, true) == 7);
}

TEST_CASE("tf32 lies in memory as fp32") {
  CHECK(size_of(DataType::tf32) == 4);
  CHECK(in_memory(DataType::tf32) == DataType::fp32);
  CHECK(in_memory(DataType::bf16) == DataType::bf16);
  CHECK(!is_half(DataType::tf32));
  CHECK(std::string_view(name(DataType::tf32)) == "tf32");
}

// Ops that families write, or that stand for them under other engines.
bool is_forward(OpKind kind) {
  return kind <= OpKind::cross_entropy_loss || (kind >= OpKind::attention_scores && kind <= OpKind::widen);
}

TEST_CASE("forward rows have a sharding rule and read no gradients, other rows have none") {
  for (const OpRow& row : op_rows()) {
    CAPTURE(row.name);
    const bool forward = is_forward(row.kind);
    CHECK((row.sharding != ShardingRule::none) == forward);
    if (!forward) CHECK(row.gradients.empty());
    if (forward) CHECK(!has(row, OperandSource::output_gradient));
  }
}

TEST_CASE("the gradients of a row write a gradient for each parameter and each input that has one") {
  for (const OpRow& row : op_rows()) {
    CAPTURE(row.name);
    const bool differentiable = is_forward(row.kind) && row.kind != OpKind::cross_entropy_max &&
                                row.kind != OpKind::cross_entropy_sums &&
                                row.kind != OpKind::normalize_pixels &&  // of whole numbers
                                row.kind != OpKind::quantize;            // what it reads has the gradient (unquantized)
    CHECK(row.gradients.empty() == !differentiable);
    for (const OperandRow& operand : row.operands) {
      const bool wants = operand.source == OperandSource::parameter && differentiable;
      bool written = false;
      for (const OpKind gradient : row.gradients)
        for (const OperandRow& candidate : row_of(gradient).operands)
          written =
              written || (candidate.source == OperandSource::parameter_gradient && candidate.index == operand.index &&
                          candidate.access == Access::update && candidate.optional == operand.optional);
      if (wants) CHECK(written);
    }
    bool input_gradient = row.passes_gradient;
    for (const OpKind gradient : row.gradients)
      input_gradient = input_gradient || has(row_of(gradient), OperandSource::input_gradient);
    CHECK(input_gradient == (differentiable && row.kind != OpKind::embedding));
  }
}

TEST_CASE("what may share storage is a read operand and a written one") {
  std::vector<std::string_view> in_place;
  for (const OpRow& row : op_rows()) {
    CAPTURE(row.name);
    if (!row.in_place) continue;
    in_place.push_back(row.name);
    CHECK(row.operands[row.in_place->read].access == Access::read);
    CHECK(row.operands[row.in_place->write].access == Access::write);
  }
  CHECK(in_place == std::vector<std::string_view>{
                        "add_position", "rotary", "activation", "gate", "scale", "softcap", "add", "put_rows",
                        "add_layer_norm", "add_rms_norm", "head_norm_gradient", "query_key_norm_gradient",
                        "rotary_gradient", "activation_gradient", "gate_gradient", "scale_gradient",
                        "softcap_gradient", "put_rows_gradient", "cross_entropy_gradient",
                        "attention_softmax_gradient", "dropout_gradient"});
}

TEST_CASE("the gradients that can be added to are those of norms, of sums of squares, of linear and of scores") {
  std::vector<std::string_view> accumulating;
  for (const OpRow& row : op_rows())
    if (row.accumulates) accumulating.push_back(row.name);
  CHECK(accumulating == std::vector<std::string_view>{
                        "layer_norm_gradient", "rms_norm_gradient", "query_key_squares_gradient",
                        "linear_input_gradient", "take_rows_gradient", "attention_scores_gradient"});
}

TEST_CASE("a linear layer multiplies rows x columns x inner and moves its three matrices and the bias once") {
  const OpShape shape{.rows = 10, .columns = 6, .inner = 4, .bias = true};
  const OpWork forward = row_of(OpKind::linear).work(shape, DataType::bf16);
  CHECK(forward.flops == Flops(2 * 10 * 6 * 4 + 10 * 6));
  CHECK(forward.bytes == Bytes(2 * (10 * 4 + 6 * 4 + 10 * 6 + 6)));
  CHECK(forward.matrix);
  // Gradients of parameters are fp32, read and written.
  const OpWork weight = row_of(OpKind::linear_weight_gradient).work(shape, DataType::bf16);
  CHECK(weight.flops == forward.flops);
  CHECK(weight.bytes == Bytes(2 * (10 * 6 + 10 * 4) + 8 * (6 * 4 + 6)));
  OpShape input = shape;
  CHECK(row_of(OpKind::linear_input_gradient).work(input, DataType::fp32).bytes == Bytes(4 * (60 + 24 + 40)));
  input.accumulate = true;
  CHECK(row_of(OpKind::linear_input_gradient).work(input, DataType::fp32).bytes == Bytes(4 * (60 + 24 + 2 * 40)));
  CHECK(row_of(OpKind::linear_input_gradient).work(input, DataType::fp32).flops == Flops(2 * 10 * 6 * 4));
}

TEST_CASE(
    "causal attention multiplies each pair of a query and a key not behind it, two and a half times in the gradient") {
  const OpShape shape{.rows = 6, .columns = 8, .sequence = 3, .batch = 2, .heads = 4, .kv_heads = 1, .head_dim = 2};
  const double pairs = (1 + 2 + 3) * 2 * 4;
  CHECK(row_of(OpKind::attention).work(shape, DataType::fp32).flops == Flops(4 * pairs * 2));
  CHECK(row_of(OpKind::attention_gradient).work(shape, DataType::fp32).flops == Flops(10 * pairs * 2));
  const std::int64_t fused = 6 * (4 + 2) * 2, heads = 6 * 8, statistics = 6 * 4;
  CHECK(row_of(OpKind::attention).work(shape, DataType::bf16).bytes == Bytes(2 * (fused + heads) + 4 * statistics));
  CHECK(row_of(OpKind::attention_gradient).work(shape, DataType::bf16).bytes ==
        Bytes(4 * (fused + heads) + 4 * statistics));
}

TEST_CASE("bidirectional attention multiplies all pairs, with the keys of other ranks and around a ring, too") {
  OpShape shape{.sequence = 6, .batch = 2, .heads = 4, .kv_heads = 1, .head_dim = 2, .bidirectional = true};
  const auto flops = [&](OpKind kind) { return row_of(kind).work(shape, DataType::fp32).flops; };
  CHECK(flops(OpKind::attention) == Flops(4.0 * 2 * 6 * 6 * 2 * 4));
  CHECK(flops(OpKind::attention_gradient) == Flops(10.0 * 2 * 6 * 6 * 2 * 4));
  shape.gathered = true;
  shape.chunks = {.ranks = 4, .rank = 1, .size = 3};  // 24 positions, 6 of them this rank's
  CHECK(flops(OpKind::attention) == Flops(4.0 * 2 * 6 * 24 * 2 * 4));
  for (const std::int64_t holder : {0, 1, 2}) {
    shape.chunks.holder = holder;
    CHECK(flops(OpKind::attention) == Flops(4.0 * 2 * 6 * 6 * 2 * 4));
  }
}

TEST_CASE("a LayerNorm without beta reads one parameter, and normed heads with their own gammas theirs") {
  OpShape shape{.rows = 10, .columns = 4};
  const OpWork whole = row_of(OpKind::layer_norm).work(shape, DataType::fp32);
  shape.without_beta = true;
  const OpWork without = row_of(OpKind::layer_norm).work(shape, DataType::fp32);
  CHECK(whole.bytes - without.bytes == Bytes(4 * 4));
  CHECK(whole.flops == Flops(8 * 40));
  CHECK(without.flops == Flops(7 * 40));
  OpShape heads{.sequence = 5, .batch = 1, .heads = 4, .kv_heads = 2, .head_dim = 8};
  const Bytes shared = row_of(OpKind::head_norm).work(heads, DataType::bf16).bytes;
  heads.centered = true;
  CHECK(row_of(OpKind::head_norm).work(heads, DataType::bf16).bytes - shared == Bytes(2 * (6 - 2) * 8));
}

TEST_CASE("attention with a window multiplies the pairs inside it alone") {
  for (const std::int64_t sequence : {1, 5, 16})
    for (const std::int64_t window : {1, 2, 5, 16, 100}) {
      std::int64_t pairs = 0;
      for (std::int64_t query = 0; query < sequence; ++query)
        for (std::int64_t key = 0; key <= query; ++key) pairs += query - key < window ? 1 : 0;
      const OpShape shape{.sequence = sequence, .batch = 2, .heads = 4, .kv_heads = 1, .head_dim = 2, .window = window};
      CHECK(row_of(OpKind::attention).work(shape, DataType::fp32).flops ==
            Flops(4.0 * 2 * 2 * 4 * static_cast<double>(pairs)));
      CHECK(row_of(OpKind::attention_gradient).work(shape, DataType::fp32).flops ==
            Flops(10.0 * 2 * 2 * 4 * static_cast<double>(pairs)));
    }
}

TEST_CASE(
    "ALiBi's slopes are those of the paper for powers of two and of its authors' code for other numbers of heads") {
  // Press et al. 2022, section 3: with 8 heads 1/2, 1/4, ... 1/256; with 16 heads 2^-0.5, 2^-1, ...
  for (int head = 0; head < 8; ++head) CHECK(alibi_slope(head, 8) == std::exp2(-1.0 - head));
  for (int head = 0; head < 16; ++head) CHECK(alibi_slope(head, 16) == doctest::Approx(std::exp2(-0.5 * (head + 1))));
  // 12 heads: the 8 slopes of 8, then the 1st, 3rd, 5th and 7th of 16.
  for (int head = 0; head < 8; ++head) CHECK(alibi_slope(head, 12) == alibi_slope(head, 8));
  for (int head = 8; head < 12; ++head) CHECK(alibi_slope(head, 12) == alibi_slope(2 * (head - 8), 16));
  CHECK(alibi_slope(0, 1) == std::exp2(-8.0));
}

TEST_CASE("norms of queries and keys move what they read and write, and values pass through them") {
  // 6 rows of 4 query, 2 key and 2 value heads of 2.
  const OpShape shape{.sequence = 3, .batch = 2, .heads = 4, .kv_heads = 2, .head_dim = 2, .all_heads = 4};
  const std::int64_t fused = 6 * 8 * 2, query_key = 6 * 6 * 2;
  const auto bytes = [&](OpKind kind, bool accumulate = false) {
    OpShape of = shape;
    of.accumulate = accumulate;
    return row_of(kind).work(of, DataType::bf16).bytes;
  };
  CHECK(bytes(OpKind::head_norm) == Bytes(2 * (2 * fused + 2 * 2) + 4 * 6 * 6));
  CHECK(bytes(OpKind::head_norm_gradient) == Bytes(2 * (3 * fused + 2 * 2) + 4 * 6 * 6 + 8 * 2 * 2));
  CHECK(bytes(OpKind::query_key_squares) == Bytes(2 * query_key + 4 * 2 * 6));
  CHECK(bytes(OpKind::query_key_squares_gradient) == Bytes(2 * (query_key + fused) + 4 * 2 * 6));
  CHECK(bytes(OpKind::query_key_squares_gradient, true) == Bytes(2 * 3 * query_key + 4 * 2 * 6));
  CHECK(bytes(OpKind::query_key_norm) == Bytes(2 * (2 * fused + 12) + 4 * 2 * 6));
  CHECK(bytes(OpKind::query_key_norm_gradient) == Bytes(2 * (3 * fused + 12) + 2 * 4 * 2 * 6 + 8 * 12));
  CHECK(row_of(OpKind::head_norm).work(shape, DataType::bf16).flops == Flops(4 * query_key));
}

TEST_CASE("a rotation of a part of each head turns that part alone, and moves all") {
  const OpShape whole{.sequence = 3, .batch = 2, .heads = 4, .kv_heads = 2, .head_dim = 8};
  OpShape part = whole;
  part.rotary_dim = 2;
  CHECK(row_of(OpKind::rotary).work(whole, DataType::fp32).flops == Flops(3 * 6 * 6 * 8));
  CHECK(row_of(OpKind::rotary).work(part, DataType::fp32).flops == Flops(3 * 6 * 6 * 2));
  CHECK(row_of(OpKind::rotary).work(part, DataType::fp32).bytes ==
        row_of(OpKind::rotary).work(whole, DataType::fp32).bytes);
}

TEST_CASE("an embedding moves the rows that it looks up, not the table") {
  const OpShape shape{.rows = 5, .columns = 8, .begin = 0, .valid = 50257};
  CHECK(row_of(OpKind::embedding).work(shape, DataType::fp32).bytes == Bytes(5 * 4 + 2 * 5 * 8 * 4));
  CHECK(row_of(OpKind::embedding_gradient).work(shape, DataType::bf16).bytes == Bytes(5 * 4 + 5 * 8 * (2 + 8)));
}

TEST_CASE("AdamW moves 28 bytes a parameter in fp32 and 30 in bf16 with a master copy") {
  const OpShape shape{.rows = 1000};
  CHECK(row_of(OpKind::adamw).work(shape, DataType::fp32).bytes == Bytes(28000));
  CHECK(row_of(OpKind::adamw).work({.rows = 1000, .master = true}, DataType::bf16).bytes == Bytes(30000));
  CHECK(row_of(OpKind::sgd).work(shape, DataType::fp32).bytes == Bytes(12000));
  CHECK(row_of(OpKind::sgd).work({.rows = 1000, .second = true}, DataType::fp32).bytes == Bytes(20000));
}

TEST_CASE("AdamW with moments of 8 bits moves 12 bytes fewer a parameter, and 16 more for each block of 256") {
  CHECK(row_of(OpKind::adamw_8bit).work({.rows = 1024}, DataType::fp32).bytes == Bytes(16 * 1024 + 4 * 16));
  CHECK(row_of(OpKind::adamw_8bit).work({.rows = 1025, .master = true}, DataType::bf16).bytes ==
        Bytes(18 * 1025 + 5 * 16));
  CHECK(row_of(OpKind::adamw_8bit).work({.rows = 1000}, DataType::fp32).flops >
        row_of(OpKind::adamw).work({.rows = 1000}, DataType::fp32).flops);
}

TEST_CASE("Muon's kernels read and write each of their operands once") {
  CHECK(row_of(OpKind::muon_momentum).work({.rows = 1000}, DataType::fp32).bytes == Bytes(16000));
  // A direction of 2 bytes; a master copy, read and written, and a parameter, written.
  CHECK(row_of(OpKind::muon).work({.rows = 1000, .master = true}, DataType::bf16).bytes == Bytes(12000));
  const OpShape square{.rows = 10, .columns = 10};
  CHECK(row_of(OpKind::normalize_matrix).work(square, DataType::bf16).bytes == Bytes(604));
  CHECK(row_of(OpKind::newton_schulz_polynomial).work(square, DataType::bf16).bytes == Bytes(600));
}

TEST_CASE("normalized pixels read four bytes each, and write a number") {
  CHECK(row_of(OpKind::normalize_pixels).work({.rows = 3, .columns = 5}, DataType::bf16).bytes == Bytes(15 * 6));
}

TEST_CASE("the memory kernels move what they read and what they write") {
  const OpShape shape{.rows = 10};
  CHECK(row_of(OpKind::fill_zero).work(shape, DataType::fp32).bytes == Bytes(40));
  CHECK(row_of(OpKind::copy).work(shape, DataType::bf16).bytes == Bytes(40));
  CHECK(row_of(OpKind::transpose_blocks).work({.rows = 10, .columns = 3, .inner = 2}, DataType::bf16).bytes ==
        Bytes(240));
  CHECK(row_of(OpKind::accumulate).work(shape, DataType::fp32).bytes == Bytes(120));
  CHECK(row_of(OpKind::accumulate).work(shape, DataType::fp32).flops == Flops(10));
}

TEST_CASE("FLOPs of the largest layers do not overflow") {
  // One sample of 2^20 tokens through a layer of 2^18 x 2^20: 2^59 products are still far from a
  // double's range.
  const OpShape shape{.rows = 1LL << 24, .columns = 1LL << 20, .inner = 1LL << 20};
  CHECK(row_of(OpKind::linear).work(shape, DataType::bf16).flops == Flops(0x1p65));
}

TEST_CASE("workspaces on CPU are those of the blocking that the kernels use") {
  const OpShape shape = plausible();
  CHECK(row_of(OpKind::linear).cpu_workspace(shape) == linear_workspace(64, 96, 32));
  CHECK(row_of(OpKind::linear_input_gradient).cpu_workspace(shape) == linear_input_gradient_workspace(64, 96, 32));
  CHECK(row_of(OpKind::linear_weight_gradient).cpu_workspace(shape) == linear_weight_gradient_workspace(64, 96, 32));
  CHECK(row_of(OpKind::attention).cpu_workspace(shape) == attention_workspace(16, 8));
  CHECK(row_of(OpKind::attention_gradient).cpu_workspace(shape) == attention_gradient_workspace(16, 8));
}

}  // namespace
}  // namespace parplan
