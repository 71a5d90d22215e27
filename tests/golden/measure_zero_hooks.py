"""What the host takes around modules and behind gradients under DeepSpeed's ZeRO.

For developers; configs/engines/deepspeed.yaml has its result (host_per_module_forward,
host_per_module_backward, host_per_sharded_gradient). Needs PyTorch for CPUs, DeepSpeed's sources
(v0.14.2) on PYTHONPATH and the packages that they import; nothing is compiled.

    python3 tests/golden/measure_zero_hooks.py [LAYERS]

A Llama so small that its ops take the host's time alone runs forward and backward without DeepSpeed
(plain), and under ZeRO-2 and ZeRO-3 with one rank, each in a process of its own, whose collectives
are copies. What ZeRO adds is told in times of a torch.nn.Linear of the same process, so that the
processor cancels out as far as it does: a GPU's Linear submits a kernel, this one computes a tiny
product, which is rather longer. Streams and events of CUDA are not in it.
"""

import os
import statistics
import subprocess
import sys
import time

HIDDEN, TOKENS, HEADS, FEATURE, VOCABULARY = 64, 8, 4, 128, 100
# A layer's: itself, two norms, attention with four products and positions, the feed-forward with
# three products and an activation; and its parameters.
MODULES, PARAMETERS = 14, 9
STEPS, WARM, LINEARS = 80, 10, 100


def model_of(torch, layers: int):
    nn, functional = torch.nn, torch.nn.functional

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(HIDDEN))

        def forward(self, x):
            variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
            return self.weight * (x * torch.rsqrt(variance + 1e-6)).to(x.dtype)

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("rates", torch.rand(HIDDEN // HEADS // 2), persistent=False)

        @torch.no_grad()
        def forward(self, at):
            angles = at[..., None].float() * self.rates
            angles = torch.cat((angles, angles), dim=-1)[:, None]
            return angles.cos(), angles.sin()

    def turned(x, cos, sin):
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value, self.output = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
            self.positions = Positions()

        def forward(self, x, at):
            batch, tokens, _ = x.size()
            query, key, value = (product(x).view(batch, tokens, HEADS, -1).transpose(1, 2)
                                 for product in (self.query, self.key, self.value))
            cos, sin = self.positions(at)
            query, key = turned(query, cos, sin), turned(key, cos, sin)
            weights = torch.softmax(query @ key.transpose(2, 3), -1)
            return self.output((weights @ value).transpose(1, 2).reshape(batch, tokens, -1))

    class FeedForward(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = (nn.Linear(HIDDEN, FEATURE, bias=False) for _ in range(2))
            self.down, self.activation = nn.Linear(FEATURE, HIDDEN, bias=False), nn.SiLU()

        def forward(self, x):
            return self.down(self.activation(self.gate(x)) * self.up(x))

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.attention, self.feed_forward = Norm(), Norm(), Attention(), FeedForward()

        def forward(self, x, at):
            x = x + self.attention(self.first(x), at)
            return x + self.feed_forward(self.second(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(VOCABULARY, HIDDEN)
            self.layers = nn.ModuleList(Layer() for _ in range(layers))
            self.norm, self.head = Norm(), nn.Linear(HIDDEN, VOCABULARY, bias=False)

        def forward(self, tokens, at):
            x = self.table(tokens)
            for layer in self.layers:
                x = layer(x, at)
            return functional.cross_entropy(self.head(self.norm(x)).view(-1, VOCABULARY), tokens.view(-1))

    return Model()


def under_deepspeed(torch, model, stage: int):
    import deepspeed
    backend = sys.modules["deepspeed.comm.torch"]
    backend.build_shm_op = lambda: None

    class Done:
        def wait(self):
            pass

    def copied(_, *tensors, output_tensor=None, input_tensor=None, **options):
        to, of = tensors[:2] or (output_tensor, input_tensor)
        to.view(-1).copy_(of.view(-1))
        return Done()

    backend.TorchBackend.all_gather_into_tensor = backend.TorchBackend.reduce_scatter_tensor = copied
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "_all_gather_base", "_reduce_scatter_base"):
        setattr(torch.distributed, name, lambda *tensors, **options: copied(None, *tensors, **options))
    # No step ends, since the optimizer is not asked for.
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1 << 20,
              "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    return deepspeed.initialize(model=model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))[0]


def measure(stage: int, layers: int) -> None:
    import torch
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = model_of(torch, layers)
    tokens, at = torch.randint(0, VOCABULARY, (1, TOKENS)), torch.arange(TOKENS)[None]
    linear, x = torch.nn.Linear(HIDDEN, HIDDEN, bias=False), torch.rand(1, TOKENS, HIDDEN, requires_grad=True)
    engine = under_deepspeed(torch, model, stage) if stage else None
    forwards, backwards = [], []
    for step in range(STEPS):
        times = [time.process_time()]
        for _ in range(LINEARS):
            linear(x)
        times.append(time.process_time())
        loss = (engine or model)(tokens, at)
        times.append(time.process_time())
        if engine:
            engine.backward(loss)
            engine.step()
        else:
            loss.backward()
        times.append(time.process_time())
        of_linear, of_forward, of_backward = (after - before for before, after in zip(times, times[1:]))
        if step >= WARM:
            forwards.append(of_forward / of_linear * LINEARS / layers)
            backwards.append(of_backward / of_linear * LINEARS / layers)
    print(statistics.median(forwards), statistics.median(backwards))


def main() -> None:
    layers = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    if len(sys.argv) > 2:
        return measure(int(sys.argv[2]), layers)
    of = {}
    for stage in (0, 2, 3):
        environment = dict(os.environ, DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29600 + stage),
                           RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1", OMP_NUM_THREADS="1")
        command = [sys.executable, __file__, str(layers), str(stage)]
        output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        of[stage] = [float(word) for word in output.split("\n")[-2].split()]
        print(f"ZeRO-{stage}: a layer takes {of[stage][0]:.1f} linears forward and {of[stage][1]:.1f} backward")
    gradients = of[2][1] - of[0][1]
    print(f"a module forward: {(of[3][0] - of[0][0]) / MODULES:.2f}, "
          f"backward: {(of[3][1] - of[0][1] - gradients) / MODULES:.2f}, a gradient: {gradients / PARAMETERS:.2f}")


if __name__ == "__main__":
    main()
