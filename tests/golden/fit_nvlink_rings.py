"""Finds what NCCL's rings inside NVLink take on A100, H100 and B200 (planner/cost/nvlink_rings.cpp).

For developers; the product and its tests never need it. The measurements are those of the wheel
aiconfigurator-core (PyPI, Apache-2.0): NVIDIA's loops over NCCL's collectives on 2, 4 and 8 GPUs of a
node, 512 bytes to 512 MiB of half precision.

    pip download --no-deps aiconfigurator-core==0.12.0 && unzip aiconfigurator_core-*.whl -d wheel
    pip install pandas pyarrow
    python3 tests/golden/fit_nvlink_rings.py wheel

Prints, for each generation, the constants in us and GB/s, and the mean error below 1 MiB and from
there on. A search by coordinates from NCCL's own constants (src/graph/tuning.cc); it ends where no
constant by itself improves the mean of |log(predicted / measured)|.
"""

import glob
import math
import statistics
import sys

import pandas as pd

# Folders of the wheel; GB/s of a GPU's links (configs/devices); NVLS: NCCL's efficiency and
# channels.
GENERATIONS = {
    "A100": (["a100_sxm"], 240.0, None),
    "H100": (["h100_sxm", "h200_sxm"], 370.8, (0.85, 16)),
    "B200": (["b200_sxm", "b300_sxm", "gb200", "gb300"], 721.8, (0.74, 24)),
}
COLLECTIVES = ["all_reduce", "all_gather", "reduce_scatter", "alltoall"]
START = {"simple base": 8.4, "simple hop": 3.4, "copy": 600.0, "ll128 base": 14.0, "ll128 hop": 1.9,
         "ll128 cap": 250.0, "ll base": 6.6, "ll hop": 0.9, "ll cap": 90.0}
NVLS_START = {"nvls base": 25.0, "chunk cost": 5.0}  # us, KiB
PAIRS_START = {"pairs base": 12.0, "pairs share": 0.9, "pairs copy": 600.0}  # of all-to-alls
BYTES_PER_ELEMENT = 2
LOW_LATENCY_PAIR = 16384  # NCCL_P2P_LL_THRESHOLD, src/enqueue.cc


def measured(wheel: str, folders: list[str]) -> dict[tuple[str, int, int], float]:
    """Median microseconds by collective, GPUs and bytes over the wheel's libraries."""
    files = [f for folder in folders
             for f in glob.glob(f"{wheel}/aiconfigurator_core/systems/data/{folder}/comm/nccl/*/nccl_perf.parquet")]
    rows = pd.concat([pd.read_parquet(f) for f in sorted(files)])
    rows = rows[(rows.nccl_dtype == "half") & rows.op_name.isin(COLLECTIVES)]
    medians = rows.groupby(["op_name", "num_gpus", "message_size"]).latency.median()
    return {(name, int(gpus), int(size) * BYTES_PER_ELEMENT): 1e3 * ms for (name, gpus, size), ms in medians.items()}


def predicted(collective: str, n: int, size: int, link: float, nvls, p: dict[str, float]) -> float:
    """Microseconds by the formulas of planner/cost/ring.h and nvls.h; GB/s are 1e3 bytes/us."""
    reduces_all = collective == "all_reduce"
    steps = (2 if reduces_all else 1) * (n - 1)
    moved = steps * size / n / 1e3
    times = [
        p["simple base"] + steps * p["simple hop"] + moved / link + size / n / 1e3 / p["copy"],
        p["ll base"] + steps * p["ll hop"] + moved / min(link / 2, p["ll cap"]),
        p["ll128 base"] + steps * p["ll128 hop"] + moved / min(0.92 * link, p["ll128 cap"]),
    ]
    if reduces_all and nvls:
        efficiency, channels = nvls
        for chunk in (16, 32, 64, 128):
            fill = channels * n * chunk * 1024
            rate = link * efficiency * chunk / (chunk + p["chunk cost"])
            times.append(p["nvls base"] + (1 + 1 / n) * (size + fill) / 1e3 / rate)
    return min(times)


def all_to_all(n: int, size: int, link: float, p: dict[str, float]) -> float:
    """Microseconds by the formula of planner/cost/pairwise.h."""
    return (p["pairs base"] + (n - 1) / n * size / 1e3 / (link * p["pairs share"]) + size / n / 1e3 / p["pairs copy"])


def fitted(p: dict[str, float], error) -> tuple[dict[str, float], float]:
    best, step = error(p), dict.fromkeys(p, 0.3)
    while max(step.values()) > 0.003:
        improved = False
        for key in p:
            for factor in (1 + step[key], 1 / (1 + step[key])):
                other = p | {key: p[key] * factor}
                if (e := error(other)) < best - 1e-6:
                    p, best, improved = other, e, True
        if not improved:
            step = {key: size / 2 for key, size in step.items()}
    return p, best


def main(wheel: str) -> None:
    for name, (folders, link, nvls) in GENERATIONS.items():
        every = measured(wheel, folders)
        rows = {key: us for key, us in every.items() if key[0] != "alltoall"}
        pairs = {key: us for key, us in every.items() if key[0] == "alltoall" and key[2] >= 2**20}
        small = [us for (c, n, s), us in every.items() if c == "alltoall" and s / n <= LOW_LATENCY_PAIR]

        def error_of_pairs(p: dict[str, float]) -> float:
            return sum(abs(math.log(all_to_all(n, s, link, p) / us)) for (_, n, s), us in pairs.items()) / len(pairs)

        def error(p: dict[str, float], low: float = 0, high: float = math.inf) -> float:
            if min(p["simple hop"], p["ll hop"], p["ll128 hop"]) < 0.6 or p["ll cap"] < 30:
                return math.inf  # less than a hop of NVLink takes; LL left out
            errors = [abs(math.log(predicted(c, n, s, link, nvls, p) / us))
                      for (c, n, s), us in rows.items() if low <= s < high]
            return sum(errors) / len(errors)

        p, best = fitted(START | (NVLS_START if nvls else {}), error)
        print(name, {key: round(value, 2) for key, value in p.items()},
              f"mean {best:.3f}, below 1 MiB {error(p, high=2**20):.3f}, from there {error(p, low=2**20):.3f}")
        q, best = fitted(PAIRS_START, error_of_pairs)
        print(name, {key: round(value, 2) for key, value in q.items()}, f"mean {best:.3f} from 1 MiB;",
              f"low latency {statistics.median(small):.1f} us")


if __name__ == "__main__":
    main(sys.argv[1])
