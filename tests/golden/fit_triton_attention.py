"""What Triton's attention of 2022 sustains, by how throughput falls with the length of sequences.

For developers; device files have its results (attention: triton_forward, triton_backward). Needs no
package.

    python3 tests/golden/fit_triton_attention.py

Runs of one model on eight GPUs that process about as many tokens in a micro-batch differ in
attention alone. A token then takes dense + attention's FLOPs / rate, fitted by least squares for
each model. Causal attention of L layers, width h and sequence s computes 2 L h s FLOPs a token
forward (half of all pairs), twice with recompute, and 2.5 times backward.
"""

# mosaicml/llm-foundry@8c8dd48f72 scripts/train/benchmarking/README.md, "H100 80GB BF16" and "A100
# 80GB ...": rows on 8 GPUs with activation checkpointing, tokens/s by sequence length.
MODELS = {"7b": (32, 4096), "13b": (40, 5120)}  # layers, width; heads of 128
RUNS = {
    "h100-sxm-80gb": {
        "7b": {4096: 68893, 8192: 55481, 32768: 26550, 65536: 15654},
        "13b": {4096: 37740, 16384: 23881, 32768: 15812},
    },
    "a100-sxm4-80gb": {
        "7b": {4096: 29472, 8192: 25655, 16384: 19629, 32768: 13382, 65536: 8108},
        "13b": {4096: 16482, 8192: 14362, 16384: 11454, 32768: 8134},
    },
}
# Forward over backward, as FlashAttention-2 on the device (docs/cost-model.md).
FORWARD_OVER_BACKWARD = {"h100-sxm-80gb": 354 / 304, "a100-sxm4-80gb": 0.6 / 0.5}


def fit(layers: int, width: int, tokens_per_second: dict[int, int]) -> float:
    """FLOP/s of attention, forward and backward together."""
    flops = [2.0 * layers * width * sequence * (2 + 2.5) for sequence in tokens_per_second]
    times = [8 / tokens for tokens in tokens_per_second.values()]
    mean_flops, mean_time = sum(flops) / len(flops), sum(times) / len(times)
    return sum((f - mean_flops) ** 2 for f in flops) / sum(
        (f - mean_flops) * (t - mean_time) for f, t in zip(flops, times))


for device, models in RUNS.items():
    rates = {model: fit(*MODELS[model], runs) for model, runs in models.items()}
    mean = sum(rates.values()) / len(rates)
    share = FORWARD_OVER_BACKWARD[device]
    backward = mean * (2 / share + 2.5) / (2 + 2.5)
    print(device, {model: f"{rate / 1e12:.0f} TFLOP/s" for model, rate in rates.items()},
          f"forward {share * backward / 1e12:.0f} TFLOP/s, backward {backward / 1e12:.0f} TFLOP/s")
