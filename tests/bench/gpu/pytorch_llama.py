"""Llama 3.2 1B in PyTorch: RMSNorm, rotary positions, grouped queries, gated SiLU, tied embeddings."""
import torch
from torch import nn
from torch.nn import functional as F

import pytorch_training

# layers, hidden, heads, key/value heads, feature, vocabulary: models/llama3.2-1b.yaml
MODELS = {"llama3.2-1b": (16, 2048, 32, 8, 8192, 128256)}
THETA = 500000.0


def rotated(x, cosine, sine):
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class Block(nn.Module):
    def __init__(self, hidden, heads, kv_heads, feature):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, hidden // heads
        self.norm1 = nn.RMSNorm(hidden, eps=1e-5)
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.norm2 = nn.RMSNorm(hidden, eps=1e-5)
        self.gate_up = nn.Linear(hidden, 2 * feature, bias=False)
        self.down = nn.Linear(feature, hidden, bias=False)

    def forward(self, x, cosine, sine):
        batch, sequence, hidden = x.shape
        sizes = [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]
        q, k, v = (part.view(batch, sequence, -1, self.head_dim).transpose(1, 2)
                   for part in self.qkv(self.norm1(x)).split(sizes, dim=2))
        q, k = rotated(q, cosine, sine), rotated(k, cosine, sine)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, sequence, hidden))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, layers, hidden, heads, kv_heads, feature, vocabulary, sequence):
        super().__init__()
        self.vocabulary = vocabulary
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, kv_heads, feature) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        head_dim = hidden // heads
        frequencies = THETA ** (-torch.arange(0, head_dim, 2).float() / head_dim)
        angles = torch.outer(torch.arange(sequence).float(), frequencies).repeat(1, 2)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, targets):
        x = self.tokens(tokens)
        kind = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        cosine, sine = self.cosine.to(kind), self.sine.to(kind)
        for block in self.blocks:
            x = block(x, cosine, sine)
        return F.cross_entropy(self.head(self.norm(x)).view(-1, self.vocabulary), targets.reshape(-1))


def main():
    arguments = pytorch_training.options(MODELS)
    layers, hidden, heads, kv_heads, feature, vocabulary = MODELS[arguments.model]
    layers = arguments.layers or layers
    head_dim = hidden // heads
    layer = hidden * (heads + 2 * kv_heads) * head_dim + hidden * hidden + 3 * hidden * feature
    matrices = layers * layer + vocabulary * hidden
    flops_per_token = 6 * matrices + 12 * layers * hidden * arguments.sequence
    pytorch_training.train(Llama(layers, hidden, heads, kv_heads, feature, vocabulary, arguments.sequence), arguments,
                           vocabulary, flops_per_token)


main()
