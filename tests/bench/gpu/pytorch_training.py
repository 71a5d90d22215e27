"""What pytorch_gpt2.py and pytorch_llama.py share: options, the training step, timing, and one line of JSON.

Model FLOPs are counted as parplan counts them (planner/graph/op_graph.cpp, model_flops_per_sample): matrix products,
the head included, and attention over the whole sequence, not halved for causality (Chowdhery et al. 2022,
appendix B); backward twice forward, nothing recomputed.
"""
import argparse
import json
import statistics
import time

import torch


def options(models):
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=models, required=True)
    parser.add_argument("--batch", type=int, required=True, help="sequences of a step, one micro-batch")
    parser.add_argument("--sequence", type=int, required=True)
    parser.add_argument("--compile", action="store_true", help="torch.compile, else eager")
    parser.add_argument("--precision", choices=["autocast", "master", "bf16"], default="autocast",
                        help="autocast: fp32 parameters, products in bf16; "
                             "master: bf16 parameters with fp32 masters, gradients and state, as parplan; "
                             "bf16: everything in bf16, the optimizer's state too")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--peak", type=float, help="TFLOP/s of the device, dense, for the MFU")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has: to try the script")
    return parser.parse_args()


class MasterAdamW:
    """Fused AdamW on fp32 copies of bf16 parameters, whose gradients are widened first."""

    def __init__(self, parameters, **settings):
        self.parameters = list(parameters)
        self.masters = [p.detach().float().requires_grad_() for p in self.parameters]
        self.inner = torch.optim.AdamW(self.masters, **settings)

    def step(self):
        for master, parameter in zip(self.masters, self.parameters):
            master.grad = parameter.grad.float()
        self.inner.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None


def train(model, arguments, vocabulary, flops_per_token):
    """Trains on random tokens; prints the median step."""
    torch.manual_seed(1)
    device = torch.device(arguments.device)
    cuda = device.type == "cuda"
    if cuda:
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.set_float32_matmul_precision("high")
    model = model.to(device)
    if arguments.precision != "autocast":
        model = model.to(torch.bfloat16)
    settings = dict(lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    optimizer = (MasterAdamW if arguments.precision == "master" else torch.optim.AdamW)(model.parameters(), **settings)
    compiled = torch.compile(model) if arguments.compile else model
    shape = (arguments.batch, arguments.sequence + 1)

    def step():
        tokens = torch.randint(vocabulary, shape, device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=arguments.precision == "autocast"):
            loss = compiled(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def now():
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    for _ in range(arguments.warmup):
        loss = step()
    seconds = []
    for _ in range(arguments.steps):
        begin = now()
        loss = step()
        seconds.append(now() - begin)
    median = statistics.median(seconds)
    tokens = arguments.batch * arguments.sequence
    rate = flops_per_token * tokens / median
    print(json.dumps({
        "program": "pytorch " + ("compiled" if arguments.compile else "eager") +
                   ("" if arguments.precision == "autocast" else " " + arguments.precision),
        "version": torch.__version__,
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "model": arguments.model,
        "parameters": sum(p.numel() for p in model.parameters()),
        "batch": arguments.batch,
        "sequence": arguments.sequence,
        "step_time_s": median,
        "tokens_per_s": tokens / median,
        "model_tflops": rate / 1e12,
        "mfu": rate / 1e12 / arguments.peak if arguments.peak else None,
        "memory_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "loss": loss.item(),
    }))
