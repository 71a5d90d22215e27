"""What half-precision products sustain on an H100 by cuBLAS of CUDA 12.0 to 12.4.

For developers; the device's file has its result (sustained: early_half). Needs no package.

    python3 tests/golden/fit_early_products.py

The rate of the tile model (planner/cost/tiling.h) at which the relative errors of the published
products sum to 0. There are few: the same GPU, shape and precision by a cuBLAS of each time.
"""

MULTIPROCESSORS, MEMORY = 132, 2513e9  # of an H100 SXM: as in its file
TILES = [(256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64)]
WIDTH = 8192  # of the other two sizes

# Rows, and TFLOP/s.
PUBLISHED = {
    "cuBLAS 12.0.2 (pytorch/pytorch issue 100850, 2023-05)": [(2048, 742.7), (4096, 549.5), (8192, 542.9)],
    "CUDA 12.4 (pranjalssh/fast.cu issue 13, 2025-10)": [(8192, 518.6)],
}
# Not used: before CUDA 12, and after 12.4.
OTHERS = {
    "cuBLAS 11.11.3 (the same issue)": [(2048, 720.3), (4096, 639.0), (8192, 772.0)],
    "cuBLAS 12.5.3 (NVIDIA/cutlass issue 1662, 2024-07; its rows are not stated)": [(8192, 764.9)],
}


def seconds(rows: int, rate: float) -> float:
    """The fastest tile and number of parts of the sum, as planner/cost/tiling.cpp has it."""
    times = []
    for m, n in TILES:
        reuse = min(1.0, m * n / (m + n) / 64)
        for parts in (1, 2, 4, 8, 16, 32):
            tiles = -(-rows // m) * -(-WIDTH // n) * parts
            places = -(-tiles // MULTIPROCESSORS) * MULTIPROCESSORS
            written = 2 * rows * WIDTH + (8 * rows * WIDTH * parts if parts > 1 else 0)
            arithmetic = places * 2 * m * n * -(-WIDTH // parts) / reuse / rate
            last = min(written, 2 * MULTIPROCESSORS * m * n) if parts == 1 else written
            times.append(max(arithmetic, written / MEMORY) + last / MEMORY)
    return min(times)


def errors(products: list[tuple[int, float]], rate: float) -> list[float]:
    return [seconds(rows, rate) * speed * 1e12 / (2 * rows * WIDTH * WIDTH) - 1 for rows, speed in products]


early = [product for products in PUBLISHED.values() for product in products]
rate = min(range(400, 900), key=lambda one: abs(sum(errors(early, one * 1e12))))
print(f"sustained by an early cuBLAS: {rate} TFLOP/s")
for source, products in (PUBLISHED | OTHERS).items():
    print(f"  {source}: errors " + ", ".join(f"{100 * one:+.0f} %" for one in errors(products, rate * 1e12)))
