#!/usr/bin/env python3
"""Makes tests/data/golden/*.golden: logits, loss and gradients of the two tiny models of tests/data/models by PyTorch.

This is for developers; the tests need no Python. It needs PyTorch (any CPU build; the files in the repository
are of 2.15) and runs in seconds:  python3 tests/golden/make_golden.py

Weights and tokens follow from a formula that tests/numerics/golden.cpp repeats to the bit. With
  hash(name)    = 32-bit FNV-1a of the name's bytes
  number(n, i)  = the top 24 bits of splitmix64's output for the state hash(n) * 2^32 + i
  uniform(n, i) = number(n, i) / 2^23 - 1, exact in double precision, in [-1, 1)
element i of parameter n (parplan's name, in parplan's layout, row by row) is
  1 + 0.25 uniform(n, i)   for weights of normalisations
  0.25 uniform(n, i)       for everything else
computed in double precision and rounded to float, and token i of the text is number("text", i) mod vocabulary. Sample b
reads text[17 b .. 17 b + 15], its targets are one further.

A file is a text header and, after the line `end`, the tensors one after the other as little-endian float32:
  parplan-golden 1
  tensor NAME SIZE SIZE ...
  end
`logits`, `loss` (the mean over tokens) and `gradient/PARAMETER` (of that mean) are those of the first step;
`losses` are those of five steps of AdamW with the numbers of `OPTIMIZER` below, each before the step's update.
`muon_losses` are those of five steps of torch.optim.Muon (PyTorch 2.9 or later) for the matrices of layers, with
`MUON` below, and that AdamW for all else. PyTorch orthogonalizes in bfloat16; here the same code does in float32.
"""

import math
import pathlib

import numpy
import torch
import torch.nn.functional as F

BATCH, SEQUENCE, STEPS = 2, 16, 5
OPTIMIZER = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
MUON = dict(lr=1e-2, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw")
WEIGHT_DECAY, CLIP_NORM = 0.1, 1.0
HIDDEN, LAYERS, HEADS, HEAD_DIM = 32, 4, 4, 8


def fnv1a(name):
    value = 2166136261
    for byte in name.encode():
        value = (value ^ byte) * 16777619 % 2**32
    return value


def numbers(name, count):
    mask = 2**64 - 1
    result = numpy.empty(count, dtype=numpy.int64)
    for i in range(count):
        z = ((fnv1a(name) << 32) + i + 0x9E3779B97F4A7C15) & mask
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        result[i] = (z ^ (z >> 31)) >> 40
    return result


def parameter(name, shape):
    uniform = numbers(name, math.prod(shape)).astype(numpy.float64) / 2**23 - 1.0
    value = 0.25 * uniform
    if "norm" in name and name.endswith(".weight"):
        value = 1.0 + value
    return torch.from_numpy(value.astype(numpy.float32).reshape(shape)).requires_grad_()


def attention(qkv, kv_heads):
    """Causal attention over parplan's fused layout: per key/value head its query heads, the key, the value."""
    batch, sequence, _ = qkv.shape
    per_group = HEADS // kv_heads
    groups = qkv.view(batch, sequence, kv_heads, per_group + 2, HEAD_DIM)
    query = groups[:, :, :, :per_group].reshape(batch, sequence, HEADS, HEAD_DIM)
    key = groups[:, :, :, per_group].repeat_interleave(per_group, dim=2)
    value = groups[:, :, :, per_group + 1].repeat_interleave(per_group, dim=2)
    return query, key, value


def scores(query, key, value):
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return y.transpose(1, 2).reshape(y.shape[0], y.shape[2], HIDDEN)


def rotated(x):
    """Rotary embedding as Hugging Face's Llama: element i turns with element i + head_dim / 2, theta 10000."""
    inverse = 1.0 / (10000.0 ** (torch.arange(0, HEAD_DIM, 2, dtype=torch.int64).float() / HEAD_DIM))
    angle = torch.outer(torch.arange(x.shape[1]).float(), inverse)
    cosine, sine = (torch.cat((f, f), dim=-1)[:, None, :] for f in (angle.cos(), angle.sin()))
    low, high = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-high, low), dim=-1) * sine


class TinyGpt2:
    """Learned positions, LayerNorm before, GELU (tanh), biases, tied embedding; no dropout."""

    name, vocabulary = "tiny-gpt2", 61

    def shapes(self):
        yield "embedding.weight", (61, HIDDEN)
        yield "position.weight", (32, HIDDEN)
        for n in range(LAYERS):
            for part, shape in (
                ("attention_norm.weight", (HIDDEN,)), ("attention_norm.bias", (HIDDEN,)),
                ("attention.qkv.weight", (3 * HIDDEN, HIDDEN)), ("attention.qkv.bias", (3 * HIDDEN,)),
                ("attention.output.weight", (HIDDEN, HIDDEN)), ("attention.output.bias", (HIDDEN,)),
                ("feed_forward_norm.weight", (HIDDEN,)), ("feed_forward_norm.bias", (HIDDEN,)),
                ("feed_forward.up.weight", (4 * HIDDEN, HIDDEN)), ("feed_forward.up.bias", (4 * HIDDEN,)),
                ("feed_forward.down.weight", (HIDDEN, 4 * HIDDEN)), ("feed_forward.down.bias", (HIDDEN,)),
            ):
                yield f"layers.{n}.{part}", shape
        yield "head.norm.weight", (HIDDEN,)
        yield "head.norm.bias", (HIDDEN,)

    def logits(self, p, tokens):
        x = F.embedding(tokens, p["embedding.weight"]) + p["position.weight"][: tokens.shape[1]]

        def norm(x, name):
            return F.layer_norm(x, (HIDDEN,), p[name + ".weight"], p[name + ".bias"], 1e-5)

        def linear(x, name):
            return F.linear(x, p[name + ".weight"], p[name + ".bias"])

        for n in range(LAYERS):
            at = f"layers.{n}."
            query, key, value = attention(linear(norm(x, at + "attention_norm"), at + "attention.qkv"), HEADS)
            x = x + linear(scores(query, key, value), at + "attention.output")
            y = F.gelu(linear(norm(x, at + "feed_forward_norm"), at + "feed_forward.up"), approximate="tanh")
            x = x + linear(y, at + "feed_forward.down")
        return F.linear(norm(x, "head.norm"), p["embedding.weight"])


class TinyLlama:
    """Rotary positions, RMSNorm before, gated SiLU, two key/value heads, no biases, a head of its own."""

    name, vocabulary = "tiny-llama", 64

    def shapes(self):
        yield "embedding.weight", (64, HIDDEN)
        for n in range(LAYERS):
            for part, shape in (
                ("attention_norm.weight", (HIDDEN,)),
                ("attention.qkv.weight", ((HEADS + 2 * 2) * HEAD_DIM, HIDDEN)),
                ("attention.output.weight", (HIDDEN, HIDDEN)),
                ("feed_forward_norm.weight", (HIDDEN,)),
                ("feed_forward.gate.weight", (48, HIDDEN)),
                ("feed_forward.up.weight", (48, HIDDEN)),
                ("feed_forward.down.weight", (HIDDEN, 48)),
            ):
                yield f"layers.{n}.{part}", shape
        yield "head.norm.weight", (HIDDEN,)
        yield "head.weight", (64, HIDDEN)

    def logits(self, p, tokens):
        x = F.embedding(tokens, p["embedding.weight"])

        def norm(x, name):
            return F.rms_norm(x, (HIDDEN,), p[name + ".weight"], 1e-5)

        for n in range(LAYERS):
            at = f"layers.{n}."
            qkv = F.linear(norm(x, at + "attention_norm"), p[at + "attention.qkv.weight"])
            query, key, value = attention(qkv, 2)
            x = x + F.linear(scores(rotated(query), rotated(key), value), p[at + "attention.output.weight"])
            y = norm(x, at + "feed_forward_norm")
            y = F.silu(F.linear(y, p[at + "feed_forward.gate.weight"])) * F.linear(y, p[at + "feed_forward.up.weight"])
            x = x + F.linear(y, p[at + "feed_forward.down.weight"])
        return F.linear(norm(x, "head.norm"), p["head.weight"])


def golden(model):
    p = {name: parameter(name, shape) for name, shape in model.shapes()}
    text = torch.from_numpy(numbers("text", BATCH * (SEQUENCE + 1)) % model.vocabulary).view(BATCH, SEQUENCE + 1)
    tokens, targets = text[:, :-1], text[:, 1:]
    optimizer = torch.optim.AdamW(
        [{"params": [x for x in p.values() if x.dim() == 2], "weight_decay": WEIGHT_DECAY},
         {"params": [x for x in p.values() if x.dim() == 1], "weight_decay": 0.0}], **OPTIMIZER)
    tensors, losses = {}, []
    for step in range(STEPS):
        optimizer.zero_grad()
        logits = model.logits(p, tokens)
        loss = F.cross_entropy(logits.reshape(-1, model.vocabulary), targets.reshape(-1))
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            tensors["logits"] = logits.detach().clone()
            tensors["loss"] = loss.detach().clone().view(1)
            for name, x in p.items():
                tensors["gradient/" + name] = x.grad.clone()
        torch.nn.utils.clip_grad_norm_(list(p.values()), CLIP_NORM)
        optimizer.step()
    tensors["losses"] = torch.tensor(losses)
    return tensors


def muon_losses(model):
    p = {name: parameter(name, shape) for name, shape in model.shapes()}
    text = torch.from_numpy(numbers("text", BATCH * (SEQUENCE + 1)) % model.vocabulary).view(BATCH, SEQUENCE + 1)
    matrices = [x for name, x in p.items() if x.dim() == 2 and name.startswith("layers.")]
    others = [x for name, x in p.items() if x.dim() == 2 and not name.startswith("layers.")]
    optimizers = [
        torch.optim.Muon(matrices, weight_decay=WEIGHT_DECAY, **MUON),
        torch.optim.AdamW([{"params": others, "weight_decay": WEIGHT_DECAY},
                           {"params": [x for x in p.values() if x.dim() == 1], "weight_decay": 0.0}], **OPTIMIZER)]
    losses = []
    for _ in range(STEPS):
        logits = model.logits(p, text[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, model.vocabulary), text[:, 1:].reshape(-1))
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(p.values()), CLIP_NORM)
        narrow, torch.bfloat16 = torch.bfloat16, torch.float32
        for optimizer in optimizers:
            optimizer.step()
        torch.bfloat16 = narrow
    return torch.tensor(losses)


def write(path, tensors):
    header = "parplan-golden 1\n"
    for name, tensor in tensors.items():
        header += f"tensor {name} {' '.join(str(n) for n in tensor.shape)}\n"
    with open(path, "wb") as file:
        file.write((header + "end\n").encode())
        for tensor in tensors.values():
            file.write(tensor.numpy().astype("<f4").tobytes())


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    folder = pathlib.Path(__file__).resolve().parent.parent / "data" / "golden"
    for model in (TinyGpt2(), TinyLlama()):
        path = folder / (model.name + ".golden")
        tensors = golden(model)
        tensors["muon_losses"] = muon_losses(model)
        write(path, tensors)
        print(path.name, path.stat().st_size, "bytes; losses", [round(x, 6) for x in tensors["losses"].tolist()])
