"""Compares the tile model (planner/cost/tiling.h) with interpolation between measured products.

For developers; the product and its tests never need it. The measurements are those of the wheel
aiconfigurator-core, as for fit_sustained_products.py:

    python3 tests/golden/compare_product_models.py wheel

For each card and for products of at least so many TFLOP (1,024 tokens or more), prints the mean
error, and in brackets the bias, of the tile model at its sustained rate, and of the two nearest
other shapes in log(m), log(n), log(k): their FLOP/s, weighted by distance (leave one out).
docs/cost-model.md has the table.
"""

import sys

import numpy as np

import fit_sustained_products as sustained

LEAST_TFLOP = [0.5, 2.0, 8.0]


def two_nearest(shapes, rates):
    """FLOP/s of each shape, from the two nearest others."""
    predicted = np.empty(len(rates))
    for i, shape in enumerate(shapes):
        distance = ((shapes - shape) ** 2).sum(axis=1)
        distance[i] = np.inf
        nearest = np.argpartition(distance, 2)[:2]
        weights = 1.0 / (np.sqrt(distance[nearest]) + 1e-9)
        predicted[i] = np.exp((weights * np.log(rates[nearest])).sum() / weights.sum())
    return predicted


def main(wheel: str) -> None:
    for card, (multiprocessors, peak, memory, hides) in sustained.CARDS.items():
        rows = sustained.products(wheel, card)
        rows = rows[(rows.m >= 1024) & (rows.n >= 1024) & (rows.k >= 512)]
        m, n, k = (rows[size].to_numpy(float) for size in "mnk")
        measured = rows.latency.to_numpy() * 1e-3
        flops = 2.0 * m * n * k
        large = flops >= sustained.LEAST_FLOPS

        def tiles(rate: float):
            return sustained.seconds(m, n, k, multiprocessors, memory, hides, rate) / measured - 1.0

        rate = min(np.arange(0.5, 1.001, 0.0025) * peak, key=lambda one: np.abs(tiles(one)[large]).mean())
        shapes = np.log(np.stack([m, n, k], axis=1))
        interpolated = flops / two_nearest(shapes, flops / measured) / measured - 1.0
        for least in LEAST_TFLOP:
            chosen = flops >= least * 1e12
            errors = (tiles(rate)[chosen], interpolated[chosen])
            text = [f"{100 * np.abs(e).mean():.1f} ({100 * e.mean():+.1f})" for e in errors]
            print(f"{card}, {chosen.sum()} of {least} TFLOP: tiles {text[0]} %, two nearest {text[1]} %")


if __name__ == "__main__":
    main(sys.argv[1])
