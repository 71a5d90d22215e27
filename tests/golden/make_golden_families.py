#!/usr/bin/env python3
"""Makes tests/data/golden/families/*.json and *.golden: a tiny Hugging Face config of every model_type that
parplan reads, in the variants that change its graph, with the logits, loss and gradients of the model that
transformers builds from it. A case is named after its model_type and, after a hyphen, its variant.

This is for developers; the tests need no Python. It needs transformers and PyTorch (the files in the
repository are of 5.23, those of BERT, Cohere, Gemma 3, GLM, T5 and ViT of 5.24, and 2.15) and runs in a minute:
python3 tests/golden/make_golden_families.py [CASE ...]

Weights and tokens follow from the formula of make_golden.py, by parplan's names and in parplan's layout. Here
they are put where transformers has them (RULES), and autograd brings the gradients back through that. Gemma's
norms multiply by 1 + weight, so their weights there are parplan's less 1. Each case has its own tokens, since
vocabularies differ in size.
"""

import json
import math
import pathlib
import re
import sys

import torch
import torch.nn.functional as F
from transformers import (AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, T5ForConditionalGeneration,
                          ViTForImageClassification)

from make_golden import BATCH, SEQUENCE, numbers, parameter, write

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "data" / "golden" / "families"
HIDDEN, FEATURE, VOCABULARY, CONTEXT = 16, 24, 37, 32
MASKED = 3, 11  # positions of BERT's targets

LLAMA = dict(hidden_size=HIDDEN, intermediate_size=FEATURE, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, rope_theta=100.0)
OPENAI = dict(n_embd=HIDDEN, n_layer=2, n_head=4, n_inner=FEATURE, vocab_size=VOCABULARY, n_positions=CONTEXT)
FALCON = dict(hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4, ffn_hidden_size=FEATURE,
              vocab_size=VOCABULARY)
NEOX = dict(hidden_size=HIDDEN, intermediate_size=FEATURE, num_hidden_layers=2, num_attention_heads=2,
            vocab_size=VOCABULARY, max_position_embeddings=CONTEXT)
OPT = dict(hidden_size=HIDDEN, ffn_dim=FEATURE, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY,
           max_position_embeddings=CONTEXT, dropout=0.0)
# (The factor is that of the weights that plans of these models begin with in tests.)
T5 = dict(d_model=HIDDEN, d_kv=6, d_ff=FEATURE, num_layers=2, num_heads=4, vocab_size=VOCABULARY, n_positions=CONTEXT,
          initializer_factor=0.1)
VIT = dict(hidden_size=HIDDEN, intermediate_size=FEATURE, num_hidden_layers=2, num_attention_heads=4, image_size=12,
           patch_size=3, num_channels=2, id2label={str(i): f"class {i}" for i in range(7)})
TOKENS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)  # some classes have defaults beyond the vocabulary
CASES = {
    "bert": dict(hidden_size=HIDDEN, intermediate_size=FEATURE, num_hidden_layers=2, num_attention_heads=4,
                 vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, mask_token_id=5),
    "bert-relu": dict(hidden_size=HIDDEN, intermediate_size=FEATURE, num_hidden_layers=1, num_attention_heads=2,
                      vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, mask_token_id=5, type_vocab_size=1,
                      hidden_act="relu"),
    "bloom": dict(hidden_size=HIDDEN, n_layer=2, n_head=4, vocab_size=VOCABULARY),
    "bloom-6-heads": dict(hidden_size=18, n_layer=1, n_head=6, vocab_size=VOCABULARY),
    "cohere": LLAMA | dict(logit_scale=0.5),
    "cohere-qk-norm": LLAMA | dict(logit_scale=0.5, use_qk_norm=True, attention_bias=True, tie_word_embeddings=False),
    "cohere2": LLAMA | dict(num_hidden_layers=3, sliding_window=5, logit_scale=2.0,
                            layer_types=["sliding_attention", "sliding_attention", "full_attention"]),
    "falcon-7b": FALCON,
    "falcon-40b": FALCON | dict(new_decoder_architecture=True, num_kv_heads=2),
    "falcon-11b": FALCON | dict(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1,
                                tie_word_embeddings=False),
    "falcon-rw": FALCON | dict(alibi=True, bias=True, multi_query=False, parallel_attn=False),
    "gemma": LLAMA | dict(head_dim=6, num_key_value_heads=1),
    "gemma2": LLAMA | dict(num_hidden_layers=3, head_dim=6, query_pre_attn_scalar=5, sliding_window=5,
                           attn_logit_softcapping=1.5, final_logit_softcapping=2.0),
    "gemma3_text": LLAMA | dict(num_hidden_layers=3, head_dim=6, query_pre_attn_scalar=5, sliding_window=5,
                                rope_local_base_freq=10.0, sliding_window_pattern=3,
                                rope_scaling=dict(rope_type="linear", factor=8.0)),
    "glm": LLAMA | dict(head_dim=8),
    "glm4": LLAMA | dict(head_dim=8, partial_rotary_factor=0.25, attention_bias=False, tie_word_embeddings=True),
    "gpt2": OPENAI,
    "gpt2-unscaled": OPENAI | dict(scale_attn_weights=False, activation_function="relu"),
    "gpt_neox": NEOX,
    "gpt_neox-sequential": NEOX | dict(use_parallel_residual=False, rotary_pct=1.0, hidden_act="gelu_fast",
                                       attention_bias=False),
    "gptj": OPENAI | dict(rotary_dim=2),
    "granite": LLAMA | dict(attention_multiplier=0.3, embedding_multiplier=3.0, residual_multiplier=0.7,
                            logits_scaling=2.0, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama-linear": LLAMA | dict(num_hidden_layers=1, rope_scaling=dict(rope_type="linear", factor=2.5)),
    "llama": LLAMA | dict(attention_bias=True, mlp_bias=True, head_dim=6),
    "mistral": LLAMA | dict(sliding_window=5),
    "olmo2": LLAMA,
    "opt": OPT,
    "opt-350m": OPT | dict(do_layer_norm_before=False, word_embed_proj_dim=10),
    "opt-after-add": OPT | dict(do_layer_norm_before=False, enable_bias=False),
    "phi3": LLAMA | dict(sliding_window=7),
    "phi3-partial": LLAMA | dict(partial_rotary_factor=0.5, tie_word_embeddings=True),
    "qwen2": LLAMA | dict(use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": LLAMA | dict(head_dim=6),
    "roberta": dict(hidden_size=HIDDEN, intermediate_size=FEATURE, num_hidden_layers=2, num_attention_heads=4,
                    vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, mask_token_id=5, pad_token_id=3,
                    type_vocab_size=1),
    "starcoder2": LLAMA | dict(sliding_window=6),
    "t5": T5 | dict(relative_attention_num_buckets=8, relative_attention_max_distance=6),
    "t5-v1.1": T5 | dict(num_layers=1, num_decoder_layers=3, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "vit": VIT,
    "vit-large-patches": VIT | dict(num_hidden_layers=1, patch_size=6, num_channels=1, hidden_act="relu",
                                    qkv_bias=False, layer_norm_eps=1e-5),
}


class Weights:
    """parplan's parameters, made by name when they are first asked for."""

    def __init__(self, config):
        self.made = {}
        heads = config.num_attention_heads
        kv = getattr(config, "num_key_value_heads", None) or heads
        if config.model_type == "falcon":
            kv = config.num_kv_heads if config.new_decoder_architecture else 1 if config.multi_query else heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.heads, self.kv, self.queries, self.dim = heads, kv, heads // kv, dim

    def get(self, name, shape):
        if name not in self.made:
            self.made[name] = parameter(name, tuple(shape))
        assert self.made[name].shape == tuple(shape), (name, self.made[name].shape, shape)
        return self.made[name]

    def part(self, name, which, inner):
        """Query, key or value of the product that parplan keeps as one: per group its query heads, key and value."""
        whole = self.get(name, ((self.heads + 2 * self.kv) * self.dim, *inner))
        groups = whole.view(self.kv, self.queries + 2, self.dim, *inner)
        chosen = {"q": groups[:, : self.queries], "k": groups[:, self.queries], "v": groups[:, self.queries + 1]}[which]
        return chosen.reshape(-1, *inner)

    def concatenated(self, name, inner):
        return torch.cat([self.part(name, which, inner) for which in "qkv"])


def direct(target):
    return lambda w, at, shape, kind: w.get(f"{at}{target}.{kind}", shape)


def part(which):
    return lambda w, at, shape, kind: w.part(f"{at}attention.qkv.{kind}", which, shape[1:])


# Cohere's gammas are [heads, head_dim].
def head_norm(target):
    return lambda w, at, shape, kind: w.get(f"{at}{target}.{kind}", (math.prod(shape),)).reshape(shape)


def gate_up(w, at, shape, kind):
    half = (shape[0] // 2, *shape[1:])
    return torch.cat([w.get(f"{at}feed_forward.{name}.{kind}", half) for name in ("gate", "up")])


# GPT-2's matrices are [in, out].
def transposed(target):
    return lambda w, at, shape, kind: (w.get(f"{at}{target}.{kind}", shape[::-1]).T if kind == "weight"
                                       else direct(target)(w, at, shape, kind))


def gpt2_qkv(w, at, shape, kind):
    inner = shape[:1] if kind == "weight" else ()
    fused = w.concatenated(f"{at}attention.qkv.{kind}", tuple(inner))
    return fused.T if kind == "weight" else fused


# What stands under a layer's (or the model's) name in transformers -> where it is in parplan.
RULES = {
    r"embed_tokens|(embeddings\.)?word_embeddings|wte|embed_in": direct("embedding"),
    r"word_embeddings_layernorm|embeddings\.LayerNorm": direct("embedding.norm"),
    r"embed_positions|wpe|embeddings\.position_embeddings": direct("position"),
    r"embeddings\.token_type_embeddings": direct("token_type"),
    "norm|ln_f|final_layer_norm": direct("head.norm"),
    r"lm_head|embed_out|cls\.predictions\.decoder|cls\.predictions": direct("head"),
    r"cls\.predictions\.transform\.dense|lm_head\.dense": direct("head.transform"),
    r"cls\.predictions\.transform\.LayerNorm|lm_head\.layer_norm": direct("head.transform.norm"),
    r"attention\.self\.query": part("q"),
    r"attention\.self\.key": part("k"),
    r"attention\.self\.value": part("v"),
    r"attention\.output\.dense": direct("attention.output"),
    r"attention\.output\.LayerNorm": direct("attention_norm"),
    r"intermediate\.dense": direct("feed_forward.up"),
    r"output\.dense": direct("feed_forward.down"),
    r"output\.LayerNorm": direct("feed_forward_norm"),
    "project_in": direct("embedding.projection"),
    "project_out": direct("head.projection"),
    r"(self_attn|attn)\.q_proj": part("q"),
    r"(self_attn|attn)\.k_proj": part("k"),
    r"(self_attn|attn)\.v_proj": part("v"),
    r"self_attn\.qkv_proj": lambda w, at, shape, kind: w.concatenated(f"{at}attention.qkv.{kind}", shape[1:]),
    r"attn\.c_attn": gpt2_qkv,
    r"(self_attention|attention)\.query_key_value": direct("attention.qkv"),
    r"(self_attn|attn)\.(o_proj|out_proj)|(self_attention|attention)\.dense": direct("attention.output"),
    r"attn\.c_proj": transposed("attention.output"),
    r"self_attn\.q_norm": head_norm("attention.query_norm"),
    r"self_attn\.k_norm": head_norm("attention.key_norm"),
    r"mlp\.gate_proj": direct("feed_forward.gate"),
    r"mlp\.gate_up_proj": gate_up,
    r"mlp\.(up_proj|fc_in|dense_h_to_4h)|fc1": direct("feed_forward.up"),
    r"mlp\.(down_proj|fc_out|dense_4h_to_h)|fc2": direct("feed_forward.down"),
    r"mlp\.c_fc": direct("feed_forward.up"),
    r"mlp\.c_proj": direct("feed_forward.down"),
    "input_layernorm|ln_attn|self_attn_layer_norm|ln_1": direct("attention_norm"),
    "post_attention_layernorm|ln_mlp|ln_2": direct("feed_forward_norm"),
    "pre_feedforward_layernorm": direct("feed_forward_norm"),
    "post_self_attn_layernorm": direct("attention_output_norm"),
    "post_mlp_layernorm": direct("feed_forward_output_norm"),
    "post_feedforward_layernorm": direct("feed_forward_output_norm"),
}
IN_LAYERS = {"final_layer_norm": direct("feed_forward_norm")}  # OPT has this name in layers and behind them
BY_TYPE = {
    "gpt2": {r"mlp\.c_fc": transposed("feed_forward.up"), r"mlp\.c_proj": transposed("feed_forward.down")},
    "cohere": {"input_layernorm": direct("norm")},
    "cohere2": {"input_layernorm": direct("norm")},
    "gemma2": {"post_attention_layernorm": direct("attention_output_norm")},
    "gemma3_text": {"post_attention_layernorm": direct("attention_output_norm")},
    "olmo2": {"post_attention_layernorm": direct("attention_output_norm")},
    "gptj": {"ln_1": direct("norm")},
}


def place(name, shape, config, weights):
    match = re.fullmatch(r"(?:model\.decoder\.|model\.|transformer\.|gpt_neox\.|(?:bert|roberta)\.(?:encoder\.)?)?"
                         r"(?:(?:layers|h|layer)\.(\d+)\.)?(.*)\.(weight|bias)", name)
    layer, part_name, kind = match.groups()
    at = "" if layer is None else f"layers.{layer}."
    rules = dict(BY_TYPE.get(config.model_type, {})) | (IN_LAYERS if layer is not None else {})
    if config.model_type == "falcon" and config.num_ln_in_parallel_attn != 2 and config.parallel_attn:
        rules["input_layernorm"] = direct("norm")
    for table in (rules, RULES):
        for pattern, rule in table.items():
            if re.fullmatch(pattern, part_name):
                value = rule(weights, at, tuple(shape), kind)
                assert value.shape == shape, (name, value.shape, shape)
                return value - 1.0 if config.model_type.startswith("gemma") and "norm" in part_name else value
    raise KeyError(name)


# parplan keeps keys and values in one product, head by head.
def packed(which):
    def rule(w, at, shape, kind):
        whole = w.get(f"{at}key_value.{kind}", (2 * shape[0], shape[1]))
        return whole.view(w.heads, 2, w.dim, shape[1])[:, which].reshape(shape)
    return rule


T5_RULES = {
    "shared|(encoder|decoder).embed_tokens": direct("embedding"),
    "lm_head": direct("head"),
    r"encoder\.final_layer_norm": direct("encoder.norm"),
    r"decoder\.final_layer_norm": direct("head.norm"),
    r"encoder\.SelfAttention\.relative_attention_bias": lambda w, at, *rest: direct("encoder.position")(w, "", *rest),
    r"decoder\.SelfAttention\.relative_attention_bias": lambda w, at, *rest: direct("decoder.position")(w, "", *rest),
    r".*\.(SelfAttention|EncDecAttention)\.q": direct("query"),
    r".*\.(SelfAttention|EncDecAttention)\.k": packed(0),
    r".*\.(SelfAttention|EncDecAttention)\.v": packed(1),
    r".*\.(SelfAttention|EncDecAttention)\.o": direct("output"),
    r".*\.DenseReluDense\.wi_0": direct("feed_forward.gate"),
    r".*\.DenseReluDense\.(wi|wi_1)": direct("feed_forward.up"),
    r".*\.DenseReluDense\.wo": direct("feed_forward.down"),
    r".*\.layer_norm": direct("norm"),
}


def place_t5(name, shape, config, weights):
    stack, layer, number, part_name, kind = re.fullmatch(
        r"(?:(encoder|decoder)\.block\.(\d+)\.layer\.(\d+)\.)?(.*)\.(weight)", name).groups()
    at = ""
    if stack:
        crosses = ["cross_attention"] if stack == "decoder" else []
        branches = ["attention", *crosses, "feed_forward"]
        branch = branches[int(number)]
        at = f"{stack}.{layer}."
        if part_name == "layer_norm":
            return weights.get(f"{at}{branch}_norm.weight", tuple(shape))
        if "Attention" in part_name:
            at += branch + "."
        part_name = f"{stack}.{part_name}"
    for pattern, rule in T5_RULES.items():
        if re.fullmatch(pattern, part_name):
            return rule(weights, at, tuple(shape), kind)
    raise KeyError(name)


def golden_t5(path):
    config = AutoConfig.from_pretrained(path)
    # transformers 5 ties the weights of a config that says otherwise; versions before, and the
    # published weights of T5 1.1, do not.
    config.tie_word_embeddings = json.loads(path.read_text()).get("tie_word_embeddings", True)
    model = T5ForConditionalGeneration._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    assert config.scale_decoder_outputs == config.tie_word_embeddings
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    weights = Weights(config)
    placed = {name: place_t5(name, value.shape, config, weights)
              for name, value in model.named_parameters(remove_duplicate=False)
              if not (config.tie_word_embeddings and name == "lm_head.weight")}
    if config.tie_word_embeddings:
        placed["lm_head.weight"] = placed["shared.weight"]
    text = torch.from_numpy(numbers("text", BATCH * (SEQUENCE + 1)) % config.vocab_size).view(BATCH, SEQUENCE + 1)
    half = SEQUENCE // 2
    logits = torch.func.functional_call(model, placed, (), dict(
        input_ids=text[:, half:-1], decoder_input_ids=text[:, :half], use_cache=False)).logits
    loss = F.cross_entropy(logits.reshape(-1, config.vocab_size), text[:, 1 : half + 1].reshape(-1))
    loss.backward()
    tensors = {"logits": logits.detach().clone(), "loss": loss.detach().clone().view(1)}
    for name in sorted(weights.made):
        tensors["gradient/" + name] = weights.made[name].grad.clone()
    return tensors


VIT_RULES = {
    r"vit\.embeddings\.patch_embeddings\.projection": lambda w, at, shape, kind: (
        w.get(f"embedding.{kind}", (shape[0], math.prod(shape[1:])) if kind == "weight" else shape).reshape(shape)),
    r"vit\.layernorm": direct("head.norm"),
    "classifier": direct("head"),
    r"attention\.q_proj": part("q"),
    r"attention\.k_proj": part("k"),
    r"attention\.v_proj": part("v"),
    r"attention\.o_proj": direct("attention.output"),
    "layernorm_before": direct("attention_norm"),
    "layernorm_after": direct("feed_forward_norm"),
    r"mlp\.fc1": direct("feed_forward.up"),
    r"mlp\.fc2": direct("feed_forward.down"),
}


def place_vit(name, shape, weights):
    if name == "vit.embeddings.cls_token":
        return weights.get("class.weight", (1, shape[2])).view(shape)
    if name == "vit.embeddings.position_embeddings":  # parplan's row of the class is the last
        return weights.get("position.weight", tuple(shape[1:])).roll(1, 0).view(shape)
    layer, part_name, kind = re.fullmatch(r"(?:vit\.layers\.(\d+)\.)?(.*)\.(weight|bias)", name).groups()
    for pattern, rule in VIT_RULES.items():
        if re.fullmatch(pattern, part_name):
            return rule(weights, "" if layer is None else f"layers.{layer}.", tuple(shape), kind)
    raise KeyError(name)


# The colours of a sample patch by patch, then the class of each sample.
def golden_vit(path):
    config = AutoConfig.from_pretrained(path)
    model = ViTForImageClassification._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    weights = Weights(config)
    placed = {name: place_vit(name, value.shape, weights) for name, value in model.named_parameters()}
    side, patch, channels = config.image_size // config.patch_size, config.patch_size, config.num_channels
    count = BATCH * channels * config.image_size ** 2
    text = torch.from_numpy(numbers("text", count + BATCH) % 256)
    patches = text[:count].view(BATCH, side, side, channels, patch, patch)
    image = patches.permute(0, 3, 1, 4, 2, 5).reshape(BATCH, channels, config.image_size, config.image_size)
    pixels = (image.to(torch.float32) / 255 - 0.5) / 0.5  # as ViTImageProcessor
    logits = torch.func.functional_call(model, placed, (pixels,)).logits
    loss = F.cross_entropy(logits, text[count:] % config.num_labels)
    loss.backward()
    tensors = {"logits": logits.detach().clone(), "loss": loss.detach().clone().view(1)}
    for name in sorted(weights.made):
        tensors["gradient/" + name] = weights.made[name].grad.clone()
    return tensors


def golden(path):
    if path.stem.startswith("vit"):
        return golden_vit(path)
    if path.stem.startswith("t5"):
        return golden_t5(path)
    config = AutoConfig.from_pretrained(path)
    # Eager knows soft caps. Falcon's eager attention of 5.23 adds ALiBi to the scores and has it in
    # the mask already; sdpa adds it once.
    attention = "sdpa" if config.model_type == "falcon" else "eager"
    masked = config.model_type in ("bert", "roberta")
    kind = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
    model.tie_weights()
    for module in model.modules():  # a padding token's row would have no gradient
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    weights = Weights(config)
    placed = {name: place(name, value.shape, config, weights) for name, value in model.named_parameters()}
    if config.tie_word_embeddings:
        for name, value in model.named_parameters(remove_duplicate=False):
            if name not in placed:
                embedding = "embed_tokens|word_embeddings.weight|wte|embed_in"
                if name.endswith("weight"):
                    placed[name] = placed[next(n for n in placed if re.search(embedding, n))]
    if config.model_type == "bert":
        placed["cls.predictions.decoder.bias"] = placed["cls.predictions.bias"]
    if config.model_type == "roberta":
        placed["lm_head.decoder.bias"] = placed["lm_head.bias"]
    text = torch.from_numpy(numbers("text", BATCH * (SEQUENCE + 1)) % config.vocab_size).view(BATCH, SEQUENCE + 1)
    tokens, targets = text[:, :-1], text[:, 1:]
    if masked:  # two of 16 positions, 15%
        tokens, targets = tokens.clone(), torch.full_like(targets, -100)
        for position in MASKED:
            targets[:, position], tokens[:, position] = tokens[:, position], config.mask_token_id
    options = {} if masked else dict(use_cache=False)
    if config.model_type == "roberta":  # else a token that pads would have no position
        options["position_ids"] = torch.arange(SEQUENCE).expand(BATCH, -1) + config.pad_token_id + 1
    logits = torch.func.functional_call(model, placed, (tokens,), options).logits
    loss = F.cross_entropy(logits.reshape(-1, config.vocab_size), targets.reshape(-1))
    loss.backward()
    tensors = {"logits": logits.detach().clone(), "loss": loss.detach().clone().view(1)}
    for name in sorted(weights.made):
        tensors["gradient/" + name] = weights.made[name].grad.clone()
    return tensors


if __name__ == "__main__":
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    for name, keys in CASES.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        path = FOLDER / (name + ".json")
        path.write_text(json.dumps({"model_type": name.split("-")[0]} | keys | TOKENS | keys, indent=2) + "\n")
        tensors = golden(path)
        write(FOLDER / (name + ".golden"), tensors)
        parameters = sum(math.prod(t.shape) for n, t in tensors.items() if n.startswith("gradient"))
        print(f"{name:22} {parameters:>7,} parameters, loss {tensors['loss'].item():.6f}", flush=True)
