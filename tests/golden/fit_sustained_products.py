"""Finds the rate of the tile model (planner/cost/tiling.h) that comes nearest to long bf16 products.

For developers; the product and its tests never need it. The measurements are those of the wheel
aiconfigurator-core (PyPI, Apache-2.0): NVIDIA's loops over matrix products of many shapes.

    pip download --no-deps aiconfigurator-core==0.12.0 && unzip aiconfigurator_core-*.whl -d wheel
    pip install numpy pandas pyarrow
    python3 tests/golden/fit_sustained_products.py wheel

With `fp8` behind the folder, of products in fp8 by cuBLAS (TensorRT-LLM's), whose loops cast the
input before: 3 bytes of traffic for each of its numbers (`sustained: fp8`).

Prints, for each card, the number of products of at least 8 TFLOP, the rate in TFLOP/s, and the mean
error of the model at that rate. configs/devices/*.yaml have these rates as `sustained: half`, times
what training sustains of them (fit_training_share.py).
"""

import glob
import sys

import numpy as np
import pandas as pd

# Folder of the wheel: multiprocessors, the datasheet's peak in FLOP/s, memory reached in B/s
# (configs/devices), and whether results are hidden behind the next tile.
CARDS = {
    "a100_sxm": (108, 312e12, 1794e9, False),
    "h100_sxm": (132, 989.4e12, 2970e9, True),
    "h200_sxm": (132, 989.4e12, 4224e9, True),
    "b200_sxm": (148, 2250e12, 6776e9, True),
    "b300_sxm": (148, 2250e12, 6776e9, True),
    "gb200": (152, 2500e12, 7040e9, True),
    "gb300": (152, 2500e12, 7040e9, True),
    "l40s": (142, 362e12, 760e9, False),
}
TILES = [(256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64)]
SPLITS = [1, 2, 4, 8, 16, 32]
LEAST_FLOPS = 8e12


def products(wheel: str, card: str, fp8: bool) -> pd.DataFrame:
    """Median latency (ms) of each product C[m, n] = A[m, k] B[k, n] over the wheel's libraries."""
    library, numbers = ("trtllm", "fp8") if fp8 else ("*", "bfloat16")
    files = glob.glob(f"{wheel}/aiconfigurator_core/systems/data/{card}/gemm/{library}/*/gemm_perf.parquet")
    tables = [pd.read_parquet(file) for file in sorted(files)]
    rows = pd.concat([t[t.gemm_dtype == numbers][["m", "n", "k", "latency"]] for t in tables])
    return rows.groupby(["m", "n", "k"], as_index=False).latency.median()


def seconds(m, n, k, multiprocessors: int, memory: float, hides: bool, rate: float):
    """The fastest tile and number of parts of the sum, as planner/cost/tiling.cpp has it."""
    best = np.full(len(m), np.inf)
    for tile_m, tile_n in TILES:
        reuse = min(1.0, tile_m * tile_n / (tile_m + tile_n) / 64.0)
        for parts in SPLITS:
            tiles = np.ceil(m / tile_m) * np.ceil(n / tile_n) * parts
            places = np.ceil(tiles / multiprocessors) * multiprocessors
            arithmetic = places * 2.0 * tile_m * tile_n / reuse * np.ceil(k / parts) / rate
            result = 2.0 * m * n / memory
            if hides and parts == 1:
                last = np.minimum(result, 2.0 * multiprocessors * tile_m * tile_n / memory)
                time = np.maximum(arithmetic, result) + last
            else:
                time = arithmetic + result + (8.0 * m * n * parts / memory if parts > 1 else 0.0)
            best = np.minimum(best, time)
    return best


def main(wheel: str, fp8: bool) -> None:
    for card, (multiprocessors, peak, memory, hides) in CARDS.items():
        if fp8 and card == "a100_sxm":
            continue
        rows = products(wheel, card, fp8)
        cast = 3.0 * rows.m * rows.k / memory if fp8 else 0.0 * rows.m
        cast = cast[2.0 * rows.m * rows.n * rows.k >= LEAST_FLOPS].to_numpy(float)
        rows = rows[2.0 * rows.m * rows.n * rows.k >= LEAST_FLOPS]
        m, n, k = (rows[size].to_numpy(float) for size in "mnk")
        measured = rows.latency.to_numpy() * 1e-3

        def error(rate: float) -> float:
            predicted = cast + seconds(m, n, k, multiprocessors, memory, hides, rate)
            return np.abs(predicted / measured - 1.0).mean()

        rate = min(np.arange(0.5, 1.001, 0.0025) * peak * (2 if fp8 else 1), key=error)
        print(f"{card}: {len(rows)} products, {rate / 1e12:.0f} TFLOP/s, mean error {100 * error(rate):.1f} %")


if __name__ == "__main__":
    main(sys.argv[1], "fp8" in sys.argv[2:])
