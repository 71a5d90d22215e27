"""GPT-2 (Radford et al. 2019) in PyTorch, as people train it today: pre-norm blocks, fused
scaled_dot_product_attention, tied embeddings, no dropout."""
import torch
from torch import nn
from torch.nn import functional as F

import pytorch_training

# layers, hidden, heads: models/gpt2*.yaml. The vocabulary is padded to a multiple of 128, as
# nanoGPT and llm.c do.
MODELS = {"gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16), "gpt2-large": (36, 1280, 20), "gpt2-xl": (48, 1600, 25)}
VOCABULARY = 50257
PADDED = 50304


class Block(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        batch, sequence, hidden = x.shape
        q, k, v = (part.view(batch, sequence, self.heads, -1).transpose(1, 2)
                   for part in self.qkv(self.norm1(x)).split(hidden, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, sequence, hidden))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self, layers, hidden, heads, context):
        super().__init__()
        self.tokens = nn.Embedding(PADDED, hidden)
        self.positions = nn.Embedding(context, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, PADDED, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, PADDED), targets.reshape(-1))


def main():
    arguments = pytorch_training.options(MODELS)
    layers, hidden, heads = MODELS[arguments.model]
    layers = arguments.layers or layers
    # parplan computes 50257 logits.
    flops_per_token = 6 * (layers * 12 * hidden**2 + VOCABULARY * hidden) + 12 * layers * hidden * arguments.sequence
    pytorch_training.train(Gpt2(layers, hidden, heads, arguments.sequence), arguments, VOCABULARY, flops_per_token)


main()
