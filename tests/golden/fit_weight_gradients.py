"""Finds the rates of the tile model (planner/cost/tiling.h) for products and for those of weight gradients.

For developers; the product and its tests never need it. The measurements are SimuMax's (MooreThreads/
SimuMax@4dcaae513b, configs/system): half-precision products of training, and those that add to sums in
fp32, on an A100-PCIe and a B200, as shares of a peak.

    python3 tests/golden/fit_weight_gradients.py configs/system

Prints, for each file, the rate and the mean error of products, and those of weight gradients whose
results are 4 bytes an element (the sum before is read while a tile is computed) or 8 (it is read
behind the arithmetic, too). configs/devices/*.yaml have the rates (sustained).
"""

import json
import os
import sys

# File: multiprocessors, memory that training sustains in B/s, whether results are hidden behind the
# next tile (configs/devices).
FILES = {"a100_pcie.json": (108, 1529e9, False), "b200_bf16_ceperm.json": (148, 5328e9, True)}
TILES = [(256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64)]
SPLITS = [1, 2, 4, 8, 16, 32]
LEAST_FLOPS = 0.2e12


def products(path: str) -> list[tuple[int, int, int, float, bool]]:
    """m, n, k, seconds, and whether the product adds to a sum in fp32."""
    with open(path, encoding="utf-8") as file:
        table = json.load(file)["accelerator"]["op"]["matmul"]
    found = []
    for text, share in table["accurate_efficient_factor"].items():
        field = dict(part.split("=") for part in text.split(", "))
        m, n, k, adds = int(field["m"]), int(field["n"]), int(field["k"]), field["accumulate"] == "True"
        flops = 2.0 * m * n * k * int(field["b"])
        if flops > LEAST_FLOPS and (adds or field["out_dtype"] == "bf16"):
            found.append((m, n, k, flops / (table["tflops"] * 1e12 * share), adds))
    return found


def tilings(m: int, n: int, k: int, multiprocessors: int, written: int, hides: bool):
    """Arithmetic, bytes beside it, and bytes behind it, of each tile and number of parts of the sum."""
    for tile_m, tile_n in TILES:
        reuse = min(1.0, tile_m * tile_n / (tile_m + tile_n) / 64.0)
        for parts in SPLITS:
            places = -(-(-(-m // tile_m) * -(-n // tile_n) * parts) // multiprocessors) * multiprocessors
            result = written * m * n
            hidden = hides and parts == 1
            last = min(result, written * multiprocessors * tile_m * tile_n) if hidden else result
            partial = 8 * m * n * parts if parts > 1 else 0
            yield places * 2 * tile_m * tile_n / reuse * -(-k // parts), result if hidden else 0, last + partial


def fit(rows, multiprocessors: int, memory: float, hides: bool, written: int) -> tuple[float, float]:
    """The rate with the least mean error, and that error."""
    work = [(list(tilings(m, n, k, multiprocessors, written, hides)), seconds) for m, n, k, seconds, _ in rows]

    def error(rate: float) -> float:
        times = [(min(max(a / rate, beside / memory) + behind / memory for a, beside, behind in choices), seconds)
                 for choices, seconds in work]
        return sum(abs(time / seconds - 1.0) for time, seconds in times) / len(times)

    rate = min((one * 1e12 for one in range(180, 1600, 2)), key=error)
    return rate / 1e12, 100 * error(rate)


def main(folder: str) -> None:
    for name, (multiprocessors, memory, hides) in FILES.items():
        rows = products(os.path.join(folder, name))
        for what, adds, written in (("products", False, 2), ("weight gradients, 4 bytes", True, 4),
                                    ("weight gradients, 8 bytes", True, 8)):
            chosen = [row for row in rows if row[4] == adds]
            rate, error = fit(chosen, multiprocessors, memory, hides, written)
            print(f"{name}: {len(chosen)} {what}: {rate:.0f} TFLOP/s, mean error {error:.1f} %")


if __name__ == "__main__":
    main(sys.argv[1])
