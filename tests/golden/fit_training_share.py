"""What training steps sustain of the rate that products reach in loops, on A100 and on H100.

For developers; configs/devices have the rates (sustained). Needs no package.

    python3 tests/golden/fit_training_share.py build/parplan

The share of the loops' rates (fit_sustained_products.py, fit_early_products.py) at which the relative
errors of those runs of other_training_runs.csv sum to 0 whose column fitted says yes. Those are runs of the
sources of tests/data/published/runs.csv that are not in it: on H100, NVIDIA's of Llama 3.1 in bf16
(dgxc-benchmarking at 741c886 and 1b9bb6b); on A100, llm-foundry's of 7B and more, and BigScience's of 25 to
28 February 2022, without those whose products of single heads run on the ordinary cores. All others are
kept from every fit (docs/accuracy.md, "Runs that came later").
"""

import csv
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

SOURCE = pathlib.Path(__file__).resolve().parents[2]
RUNS = SOURCE / "tests/golden/other_training_runs.csv"
# TFLOP/s of loops, and the share of it that products into sums in fp32 reach
# (fit_weight_gradients.py).
LOOPS = {"a100-sxm4-80gb": (252, 1.0), "a100-sxm4-40gb": (252, 1.0), "h100-sxm-80gb": (730, 0.97)}


def errors(parplan: str, devices: str, share: float) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        data = pathlib.Path(folder)
        for part in ("configs", "models"):
            shutil.copytree(SOURCE / part, data / part)
        for device, (rate, of_weights) in LOOPS.items():
            file = data / f"configs/devices/{device}.yaml"
            half = rate * share
            file.write_text(re.sub(r"sustained: \{half: [\d.]+ TFLOP/s, weight_gradients: [\d.]+",
                                   f"sustained: {{half: {half:.1f} TFLOP/s, weight_gradients: {half * of_weights:.1f}",
                                   file.read_text()))
        with open(RUNS, encoding="utf-8") as file, open(data / "runs.csv", "w", encoding="utf-8", newline="") as chosen:
            rows = csv.DictReader(file)
            writer = csv.DictWriter(chosen, fieldnames=rows.fieldnames)
            writer.writeheader()
            writer.writerows(row for row in rows
                             if row["device"].startswith(devices) and row["fitted"] == "yes")
        found = subprocess.run([parplan, "validate", data / "runs.csv", "--json"], check=True, capture_output=True,
                               env=os.environ | {"PARPLAN_DATA": folder})
        return [row["error"] for row in json.loads(found.stdout)["rows"] if row["error"] is not None]


def main(parplan: str) -> None:
    for devices in ("a100", "h100"):
        low, high = 0.8, 1.1
        while high - low > 0.001:
            middle = (low + high) / 2
            if sum(errors(parplan, devices, middle)) < 0:
                high = middle
            else:
                low = middle
        left = errors(parplan, devices, low)
        print(f"{devices}: {low:.3f} of the loops' rate; {len(left)} runs, mean error "
              f"{100 * sum(map(abs, left)) / len(left):.1f} %")


if __name__ == "__main__":
    main(sys.argv[1])
