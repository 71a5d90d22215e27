#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <variant>

#include "models/families.h"
#include "models/find_model.h"
#include "planner/base/error.h"
#include "planner/base/file.h"
#include "planner/base/json.h"
#include "planner/graph/engine_file.h"
#include "planner/graph/engine_graph.h"
#include "tests/planner/base/error_of.h"
#include "tests/temporary_folder.h"

namespace parplan {
namespace {

const std::string source = PARPLAN_SOURCE_DIR;
const std::filesystem::path folder = source + "/configs/engines";

OpGraph graph_of(const std::string& model, std::int64_t sequence) {
  return build_graph(load_model(model, source + "/models").spec, sequence);
}

Engine read(const std::string& text) { return read_engine(YamlNode::parse(text, "engine.yaml")); }

// All that an engine may do otherwise than parplan's runtime.
Engine unlike_ours() {
  Engine engine{.name = "other", .title = "an engine that isn't ours"};
  for (const EngineFact& fact : engine_facts())
    if (const auto* const flag = std::get_if<bool Engine::*>(&fact.member)) engine.**flag = !(engine.**flag);
  engine.most_zero = 1;
  engine.host_per_op = Seconds(20e-6);
  return engine;
}

int ops_of_kind(const OpGraph& graph, OpKind kind) {
  return static_cast<int>(std::ranges::count(graph.ops, kind, &Op::kind));
}

}  // namespace

TEST_CASE("the schema of plans has every fact of an engine, and no other") {
  const Json schema = Json::parse(read_file(source + "/docs/schemas/plan.schema.json"));
  const Json::json_pointer place("/properties/training/properties/engine/properties");
  std::vector<std::string> named, facts{"name", "title"};
  for (const auto& [key, value] : schema.at(place).items()) named.push_back(key);
  for (const EngineFact& fact : engine_facts()) facts.emplace_back(fact.key);
  std::ranges::sort(named);
  std::ranges::sort(facts);
  CHECK(named == facts);
}

TEST_CASE("every engine's file is read under its own name, and says where each of its facts is from") {
  const std::vector<std::string> names = engine_names(folder);
  REQUIRE(names.size() > 5);
  for (const std::string& name : names) {
    CAPTURE(name);
    const Engine engine = find_engine(name, folder);
    CHECK(engine.name == name);
    CHECK(is_own(engine) == (name == "parplan"));
    if (!is_own(engine)) CHECK(engine.sources.size() >= 5);
    for (const std::string& one : engine.sources) CHECK(one.size() > one.find(": ") + 10);
  }
  CHECK(find_engine((folder / "ddp.yaml").string(), folder) == find_engine("ddp", folder));
}

// A checkout of Megatron-LM holds a folder `megatron`; a name too long for a file is none.
TEST_CASE("an engine is found by its name whatever the working directory holds") {
  const testing::TemporaryFolder here;
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(here.root());
  std::filesystem::create_directory("megatron");
  std::filesystem::create_directory("megatrom");
  here.write("ddp", "not an engine");
  here.write("mine", "name: e\ntitle: E\nfacts: {dropout: {value: true, source: a paper}}\n");
  CHECK_NOTHROW(CHECK(find_engine("megatron", folder).name == "megatron"));
  CHECK_NOTHROW(CHECK(find_engine("ddp", folder).name == "ddp"));
  CHECK_NOTHROW(CHECK(find_engine("mine", folder).name == "e"));
  CHECK(error_of<ConfigError>([] { find_engine("megatrom", folder); }).find("unknown engine 'megatrom'") !=
        std::string::npos);
  const std::string endless(100'000, 'e');
  CHECK(error_of<ConfigError>([&] { find_engine(endless, folder); }).find("unknown engine") != std::string::npos);
  std::filesystem::current_path(before);
}

TEST_CASE("eager gates and rotary positions, and attention that drops elements, are marked where there are any") {
  const auto marked = [&](const Engine& engine, const char* model, OpKind kind, bool OpShape::*attribute) {
    const OpGraph graph = as_run_by(engine, graph_of(model, 64));
    return std::ranges::count_if(graph.ops,
                                 [&](const Op& op) { return op.kind == kind && op.attributes.*attribute; });
  };
  const Engine own{.name = "other"}, eager{.name = "other", .fused_gate = false, .fused_rotary = false},
      drops{.name = "other", .dropout = true};
  const int llama_layers = 32, gpt2_layers = 12;
  CHECK(ops_of_kind(graph_of("llama3-8b", 64), OpKind::rotary) == llama_layers);
  CHECK(marked(eager, "llama3-8b", OpKind::rotary, &OpShape::stepwise) == llama_layers);
  CHECK(marked(own, "llama3-8b", OpKind::rotary, &OpShape::stepwise) == 0);
  CHECK(marked(eager, "gpt2", OpKind::rotary, &OpShape::stepwise) == 0);
  const auto ops = [&](const Engine& engine, const char* model, OpKind kind) {
    return ops_of_kind(as_run_by(engine, graph_of(model, 64)), kind);
  };
  CHECK(ops(own, "llama3-8b", OpKind::gate) == llama_layers);
  CHECK(ops(own, "llama3-8b", OpKind::multiply) == 0);
  CHECK(ops(eager, "llama3-8b", OpKind::gate) == 0);
  CHECK(ops(eager, "llama3-8b", OpKind::activation) == llama_layers);
  CHECK(ops(eager, "llama3-8b", OpKind::multiply) == llama_layers);
  CHECK(ops(eager, "gpt2", OpKind::multiply) == 0);
  CHECK(ops(eager, "gpt2", OpKind::activation) == gpt2_layers);
  // A gate of GELU, whose steps are kernels of their own.
  const Engine steps{.name = "other", .fused_gelu = false, .fused_gate = false};
  CHECK(marked(steps, "gemma2-9b", OpKind::activation, &OpShape::stepwise) ==
        ops(own, "gemma2-9b", OpKind::gate));
  CHECK(marked(steps, "llama3-8b", OpKind::activation, &OpShape::stepwise) == 0);
  CHECK(marked(drops, "gpt2", OpKind::attention, &OpShape::drops) == gpt2_layers);
  CHECK(marked(own, "gpt2", OpKind::attention, &OpShape::drops) == 0);
  CHECK(marked(drops, "llama3-8b", OpKind::attention, &OpShape::drops) == 0);  // trained without dropout
  CHECK(marked(drops, "t5-small", OpKind::packed_attention, &OpShape::drops) == 0);
}

TEST_CASE("what an engine's facts make of a graph stays where products are cast to fp8 as well") {
  Engine engine{.name = "other",
                .fused_attention = false,
                .fused_gelu = false,
                .fused_gate = false,
                .fused_rms_norm = false,
                .fused_rotary = false,
                .fused_sums = false,
                .fused_norm_gradient = false,
                .fused_bias_gradient = false,
                .separate_keys = true};
  for (const bool fused_loss : {false, true})
    for (const char* const model : {"gpt2", "llama3-8b"}) {
      CAPTURE(model);
      engine.fused_loss = fused_loss;
      engine.loss_metrics = 2;
      engine.fp8_casts_once = true;
      const OpGraph plain = as_run_by(engine, graph_of(model, 64)),
                    cast = as_run_by(engine, graph_of(model, 64), DataType::fp8);
      std::vector<OpShape> before, after;
      for (const Op& op : plain.ops) before.push_back(op.attributes);
      for (const Op& op : cast.ops)
        if (op.kind != OpKind::quantize) after.push_back(op.attributes);
      CHECK(ops_of_kind(cast, OpKind::quantize) > 0);
      CHECK((before == after));
      CHECK(std::ranges::count_if(after, [](const OpShape& shape) { return shape.metrics == 2; }) == 1);
    }
}

TEST_CASE("an engine's file that is wrong is refused with its place, and an unknown name with the known ones") {
  const std::string good = "name: e\ntitle: E\nfacts:\n  dropout: {value: true, source: a paper}\n";
  CHECK(read(good).dropout);
  CHECK(read(good).sources == std::vector<std::string>{"dropout: a paper"});
  const auto error = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    text.replace(text.find(from), from.size(), to);
    return error_of<ConfigError>([&] { read(text); });
  };
  CHECK(error("name: e", "name: parplan").find("engine.yaml:1") != std::string::npos);
  CHECK(error("dropout:", "droput:").find("did you mean 'dropout'") != std::string::npos);
  CHECK(error(", source: a paper", "").find("missing key 'source'") != std::string::npos);
  CHECK(error("value: true", "value: 2 us").find("engine.yaml:4") != std::string::npos);
  CHECK(error("dropout: {value: true", "host_per_op: {value: 2 s").find("from 0 to 1 s") != std::string::npos);
  const std::string unknown = error_of<ConfigError>([] { find_engine("megatrom", folder); });
  CHECK(unknown.find("unknown engine 'megatrom'") != std::string::npos);
  CHECK(unknown.find("did you mean 'megatron") != std::string::npos);
  const std::string dotted = error_of<ConfigError>([] { find_engine("llm.c", folder); });
  CHECK(dotted.find("unknown engine 'llm.c'; known are ") != std::string::npos);
  CHECK(dotted.find("did you mean 'llm-c'") != std::string::npos);
  CHECK(error_of<ConfigError>([] { find_engine("none.yaml", folder); }).find("cannot read 'none.yaml'") !=
        std::string::npos);
}

TEST_CASE("a compiled FSDP fuses element-wise steps and norms with sums, and nothing into products") {
  const Engine compiled = find_engine("fsdp-compiled", folder), eager = find_engine("fsdp", folder);
  CHECK(compiled.fused_norm);
  CHECK(!eager.fused_norm);
  CHECK(!compiled.fused_activation);
  CHECK(!compiled.fused_bias_gradient);
  CHECK(!compiled.fused_norm_gradient);
  // Real rotary positions are one kernel, complex ones are not.
  const auto rotary_in_steps = [&](const char* engine) {
    const OpGraph graph = as_run_by(find_engine(engine, folder), graph_of("llama3-8b", 64));
    return std::ranges::count_if(
        graph.ops, [](const Op& op) { return op.kind == OpKind::rotary && op.attributes.stepwise; });
  };
  CHECK(rotary_in_steps("fsdp-compiled") == 0);
  CHECK(rotary_in_steps("torchtitan") == 32);
  // A layer of Llama in Transformers: itself, two norms, attention of four products and rotary
  // positions, the feed-forward of three and an activation; and a weight of each norm and product.
  for (const char* const engine : {"deepspeed", "fsdp-hf"}) {
    const OpGraph graph = as_run_by(find_engine(engine, folder), graph_of("llama3-8b", 64));
    CHECK(modules_of(graph, graph.blocks[1]) == BlockModules{.modules = 14, .trained = 9});
    CHECK(modules_of(graph, graph.blocks.front()) == BlockModules{.modules = 1, .trained = 1});
    CHECK(modules_of(graph, graph.blocks.back()) == BlockModules{.modules = 2, .trained = 2});
  }
  // It is FSDP2 as torchtitan's file has it, without the other axes.
  CHECK(compiled.casts_shards);
  CHECK(compiled.widens_gradients);
  CHECK(compiled.copies_gathered);
  CHECK(!compiled.has_tensor);
  CHECK(!compiled.has_pipeline);
  CHECK(!compiled.has_context);
  CHECK(compiled.most_zero == 3);
}

TEST_CASE("an engine that is like another has its facts but for those that it states") {
  const Engine base = find_engine("megatron-deepspeed", folder), bloom = find_engine("bloom", folder);
  Engine as_base = bloom;
  CHECK(bloom.blocks_launches);
  as_base.blocks_launches = false;
  as_base.name = base.name;
  as_base.title = base.title;
  as_base.sources = base.sources;
  CHECK(as_base == base);
  CHECK(bloom.sources.size() == base.sources.size() + 1);
  const auto read_like = [](const std::string& like, const std::string& facts) {
    return read_engine(YamlNode::parse("name: e\ntitle: E\nlike: " + like + "\nfacts:\n" + facts, "engine.yaml"),
                       folder);
  };
  const std::string waits = "  dropout: {value: false, source: its README}\n";
  const Engine other = read_like("megatron-deepspeed", waits);
  CHECK_FALSE(other.dropout);
  CHECK(other.sources.size() == base.sources.size());
  CHECK(std::ranges::count(other.sources, "dropout: its README") == 1);
  CHECK(error_of<ConfigError>([&] { read_like("megatrom", waits); }).find("did you mean 'megatron") !=
        std::string::npos);
  CHECK(error_of<ConfigError>([&] { read_like("bloom", waits); }) ==
        "engine.yaml:3:7: error: 'bloom' is like another engine itself; name that one");
}

TEST_CASE("facts of casts that are made once are refused where each product casts") {
  const auto error = [](const std::string& head, const std::string& facts) {
    return error_of<ConfigError>(
        [&] { read_engine(YamlNode::parse("name: e\ntitle: E\n" + head + "facts:\n" + facts, "e.yaml"), folder); });
  };
  const std::string once = "  fp8_casts_once: {value: true, source: s}\n",
                    never = "  fp8_casts_once: {value: false, source: s}\n",
                    transposes = "  transposes_weights: {value: true, source: s}\n",
                    scales = "  scale_history: {value: 16, source: s}\n";
  CHECK(error("", transposes) ==
        "e.yaml:4:23: error: transposes_weights needs fp8_casts_once to be true: else each product casts the weight as "
        "it reads it, and nothing is left to transpose; leave one of them out");
  CHECK(error("", scales) ==
        "e.yaml:4:18: error: scale_history needs fp8_casts_once to be true: else scales are those of what each product "
        "casts; leave one of them out");
  CHECK(error("", once + transposes + scales) == "no error");
  // The history stays that of the engine that it is like.
  CHECK(error("like: megatron\n", never).find("e.yaml:5:19: error: scale_history needs") == 0);
  CHECK(error("like: megatron\n", never + "  scale_history: {value: 0, source: s}\n") == "no error");
  CHECK(error_of<ConfigError>([] {
          read_engine_of_plan(YamlNode::parse("name: e\ntitle: E\nscale_history: 16\n", "plan.yaml"));
        }).find("plan.yaml:3:16: error: scale_history needs") == 0);
}

TEST_CASE("a plan's engine is read as it was written, and none passes for parplan's own") {
  for (const Engine& engine : {unlike_ours(), Engine{.name = "plain", .title = "nothing differs"}}) {
    const std::string text = write_engine_of_plan(engine);
    CAPTURE(text);
    CHECK(read_engine_of_plan(YamlNode::parse(text, "plan.yaml")) == engine);
  }
  Engine liar = unlike_ours();
  liar.name = "parplan";
  CHECK_THROWS_AS(read_engine_of_plan(YamlNode::parse(write_engine_of_plan(liar), "plan.yaml")), ConfigError);
}

TEST_CASE("parplan's own runtime pads the vocabulary where matrix units compute, another engine as its file says") {
  const OpGraph graph = graph_of("gpt2", 512);
  const auto multiples = [&](const Engine& engine, DataType precision) {
    TrainingSpec training;
    training.precision = precision;
    training.engine = engine;
    std::set<std::int64_t> found;
    for (const Tensor& tensor : as_run_by(training, graph).tensors)
      for (const TensorDim& dim : tensor.dims) found.insert(dim.dim == Dim::vocabulary ? dim.multiple : -dim.multiple);
    return found;
  };
  for (const DataType precision : {DataType::bf16, DataType::fp16, DataType::tf32})
    CHECK(multiples({}, precision) == std::set<std::int64_t>{-1, 128});
  CHECK(multiples({}, DataType::fp32) == std::set<std::int64_t>{-1, 1});
  CHECK(multiples({.name = "other"}, DataType::bf16) == std::set<std::int64_t>{-1, 1});
  CHECK(multiples({.name = "other", .vocabulary_multiple = 64}, DataType::bf16) == std::set<std::int64_t>{-1, 64});
}

TEST_CASE("keys are repeated before fused attention where there are fewer of them than queries") {
  const Engine repeats{.name = "other", .repeats_keys = true};
  for (const auto& [model, fewer] : {std::pair("gpt2", false), std::pair("llama3-8b", true)}) {
    const OpGraph own = graph_of(model, 512), other = as_run_by(repeats, own);
    CHECK(ops_of_kind(other, OpKind::repeat_keys) == (fewer ? ops_of_kind(own, OpKind::attention) : 0));
    CHECK(parameter_count(other) == parameter_count(own));
    CHECK(model_flops_per_sample(other).value == model_flops_per_sample(own).value);
    for (const Op& op : other.ops)
      if (op.kind == OpKind::attention) CHECK(op.attributes.kv_heads == op.attributes.heads);
  }
}

TEST_CASE("an engine runs the model's parameters and products, by other ops where it does not fuse them") {
  for (const char* model : {"gpt2", "llama3-8b", "gemma2-9b", "olmo2-7b", "bloom-7b1", "gptj-6b"}) {
    CAPTURE(model);
    const OpGraph own = graph_of(model, 512);
    const OpGraph same = as_run_by(Engine{}, own);
    CHECK(same.ops == own.ops);
    CHECK(same.tensors == own.tensors);

    const OpGraph other = as_run_by(unlike_ours(), own);
    CHECK(parameter_count(other) == parameter_count(own));
    CHECK(parameters(other).size() == parameters(own).size());
    for (std::size_t i = 0; i < parameters(own).size(); ++i)
      CHECK(other.tensors[parameters(other)[i]] == own.tensors[parameters(own)[i]]);
    CHECK(other.blocks.size() == own.blocks.size());
    CHECK(other.kinds.size() == own.kinds.size());
    const int layers = ops_of_kind(own, OpKind::attention);
    const bool drops = ops_of_kind(own, OpKind::rms_norm) == 0;
    CHECK(ops_of_kind(other, OpKind::attention) == 0);
    for (const OpKind kind : {OpKind::attention_scores, OpKind::attention_softmax, OpKind::attention_values})
      CHECK(ops_of_kind(other, kind) == layers);
    CHECK(ops_of_kind(other, OpKind::attention_dropout) == (drops ? layers : 0));
    CHECK(ops_of_kind(other, OpKind::dropout) == (drops ? 2 * layers : 0));
    CHECK(ops_of_kind(other, OpKind::widen) == 1);
    CHECK(ops_of_kind(other, OpKind::copy_keys) == layers);
    CHECK(ops_of_kind(other, OpKind::linear) == ops_of_kind(own, OpKind::linear));
  }
  // Without a window, all pairs of queries and keys are those that model FLOPs count.
  const OpGraph own = graph_of("gpt2", 512);
  CHECK(model_flops_per_sample(as_run_by(unlike_ours(), own)).value ==
        doctest::Approx(model_flops_per_sample(own).value).epsilon(1e-12));
}

}  // namespace parplan
