"""What fused attention reaches on an H100, causal, by the length of sequences.

For developers; device files have its rates (attention: forward, backward, ampere_forward,
ampere_backward), and planner/cost/kernel_time.cpp its start. Needs no package.

    python3 tests/golden/fit_attention.py

time = flops (1 + 128 / sequence + start / sequence) / rate: the blocks of 128 keys that the
diagonal cuts (causal alone), and what a query takes before its first key, as that of so many keys.
"""

# Shah et al. 2024 (arXiv:2407.08608), figures 5 and 6 (H100 80GB SXM5, heads of 128): TFLOP/s by
# length, as labelled above the bars; read from transcriptions of the figures.
LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]
CAUSAL = {"FlashAttention-2": [191, 260, 298, 319, 333, 335], "cuDNN": [315, 410, 484, 518, 529, 539]}
UNMASKED = {"FlashAttention-2": [309, 350, 362, 368, 370, 370], "cuDNN": [497, 574, 617, 609, 600, 595]}
UNMASKED_BACKWARD = {"FlashAttention-2": [214, 260, 291, 310, 318, 322], "cuDNN": [305, 408, 465, 499, 518, 516]}


def longer(length: int, start: float, causal: bool) -> float:
    return 1 + ((128 if causal else 0) + start) / length


def fit(speeds: list[float], start: float, causal: bool) -> tuple[float, float]:
    """The rate with the least squares of relative errors, and these."""
    at_one = [1 / (longer(length, start, causal) * speed) for length, speed in zip(LENGTHS, speeds)]
    rate = sum(at_one) / sum(one * one for one in at_one)
    return rate, sum((rate * one - 1) ** 2 for one in at_one)


def error(start: float) -> float:
    return sum(fit(speeds, start, True)[1] for speeds in CAUSAL.values()) + sum(
        fit(speeds, start, False)[1] for speeds in UNMASKED_BACKWARD.values())


start = min(range(0, 500, 5), key=error)
print(f"start: {start} keys")
for kernel in CAUSAL:
    forward = fit(CAUSAL[kernel], start, True)[0]
    # No causal backward was published: as much slower than an unmasked one as the forward is, where
    # sequences are long.
    share = sum(CAUSAL[kernel][-2:]) * longer(12288, start, True) / (
        sum(UNMASKED[kernel][-2:]) * longer(12288, start, False))
    backward = fit(UNMASKED_BACKWARD[kernel], start, False)[0] * share
    print(f"{kernel}: forward {forward:.0f} TFLOP/s, backward {backward:.0f} TFLOP/s")
