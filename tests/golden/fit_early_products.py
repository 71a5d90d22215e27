"""What half-precision products sustain on an H100 by cuBLAS of CUDA 12.0 and 12.1, and on one of
96 GB that is limited to 500 W.

For developers; the devices' files have their results (sustained: early_half, half), times what
training steps sustain. Needs no package.

    python3 tests/golden/fit_early_products.py

The rate of the tile model (planner/cost/tiling.h) at which the relative errors of the published
products sum to 0. There are few: the same GPU, shape and precision by a cuBLAS of each time.
"""

MULTIPROCESSORS = 132
MEMORY, MEMORY_96GB = 2513e9, 1800e9  # sustained, of H100 SXM5 with 80 and 96 GB: as in their files
TILES = [(256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64)]
WIDTH = 8192  # of the other two sizes

# Rows, and TFLOP/s.
PUBLISHED = {
    "cuBLAS 12.0.2 (pytorch/pytorch issue 100850, 2023-05)": [(2048, 742.7), (4096, 549.5), (8192, 542.9)],
}
# Not used: before CUDA 12, and later.
OTHERS = {
    "cuBLAS 11.11.3 (the same issue)": [(2048, 720.3), (4096, 639.0), (8192, 772.0)],
    # A slow card: kernels of that repository's own, which do not depend on cuBLAS, reach there
    # .53, .65, .63 and .64 of what its README has for them (kernels 4 to 7: 339.4, 429.0, 487.8
    # and 511.0 of 635.4, 658.4, 777.5 and 799.1), and cuBLAS .65 of the 797.8 there (CUDA 12.6).
    "CUDA 12.4 on a slow card (pranjalssh/fast.cu issue 13, 2025-10)": [(8192, 518.6)],
    "cuBLAS 12.5.3 (NVIDIA/cutlass issue 1662, 2024-07; its rows are not stated)": [(8192, 764.9)],
}
# On H100s with 96 GB: the share of the peak, in bf16 and in fp8, that torchao counts large products
# with (pytorch/ao@c788ee7a torchao/testing/float8/roofline_utils.py, "custom to Meta's H100
# variant", "quick experimental observation with sample large inputs").
SHARE, LARGE = 0.6, [8192, 16384]
PEAKS = {"bf16": 989.4e12, "fp8": 1978.9e12}
# Not used, since a short run is not at the limit of power: seconds of products of three equal sizes
# in bf16, random numbers, in each of four runs of torchao's benchmark (pytorch/ao@dec031314,
# 2024-10: benchmarks/float8/bench_matmul.py --shape_gen_name square --use_gpu_kernel_time True, the
# reference of tensorwise and axiswise scaling with and without fast accumulation).
SHORT = {
    4096: [0.210e-3, 0.211e-3, 0.210e-3, 0.210e-3],
    8192: [1.671e-3, 1.676e-3, 1.674e-3, 1.678e-3],
    16384: [15.030e-3, 14.933e-3, 15.114e-3, 15.051e-3],
    32768: [103.236e-3, 103.457e-3, 103.286e-3, 103.497e-3],
}


def seconds(rows: int, width: int, rate: float, memory: float) -> float:
    """The fastest tile and number of parts of the sum, as planner/cost/tiling.cpp has it."""
    times = []
    for m, n in TILES:
        reuse = min(1.0, m * n / (m + n) / 64)
        for parts in (1, 2, 4, 8, 16, 32):
            tiles = -(-rows // m) * -(-width // n) * parts
            places = -(-tiles // MULTIPROCESSORS) * MULTIPROCESSORS
            written = 2 * rows * width + (8 * rows * width * parts if parts > 1 else 0)
            arithmetic = places * 2 * m * n * -(-width // parts) / reuse / rate
            last = min(written, 2 * MULTIPROCESSORS * m * n) if parts == 1 else written
            times.append(max(arithmetic, written / memory) + last / memory)
    return min(times)


def errors(products: list[tuple[int, float]], rate: float) -> list[float]:
    return [seconds(rows, WIDTH, rate, MEMORY) * speed * 1e12 / (2 * rows * WIDTH * WIDTH) - 1
            for rows, speed in products]


early = [product for products in PUBLISHED.values() for product in products]
rate = min(range(400, 900), key=lambda one: abs(sum(errors(early, one * 1e12))))
print(f"sustained by an early cuBLAS: {rate} TFLOP/s")
for source, products in (PUBLISHED | OTHERS).items():
    print(f"  {source}: errors " + ", ".join(f"{100 * one:+.0f} %" for one in errors(products, rate * 1e12)))

for precision, peak in PEAKS.items():
    def reached(rate: float) -> float:
        return sum(2 * size**3 / seconds(size, size, rate, MEMORY_96GB) for size in LARGE) / len(LARGE)
    rate = min(range(400, 1500), key=lambda one: abs(reached(one * 1e12) - SHARE * peak))
    print(f"sustained at 500 W, {precision}: {rate} TFLOP/s")

short = [(size, time) for size, times in SHORT.items() for time in times]


def errors_of_short(rate: float) -> list[float]:
    return [seconds(size, size, rate, MEMORY_96GB) / time - 1 for size, time in short]


rate = min(range(400, 900), key=lambda one: abs(sum(errors_of_short(one * 1e12))))
print(f"  short runs: {rate} TFLOP/s; errors "
      + ", ".join(f"{100 * one:+.0f} %" for one in errors_of_short(rate * 1e12)[::4]))
