"""How often published runs of one job came in the order of their predictions, by how far apart these are.

For developers; docs/accuracy.md has its numbers. Needs no package.

    python3 tests/golden/count_pairs.py build/parplan
"""

import csv
import itertools
import json
import pathlib
import subprocess
import sys

RUNS = pathlib.Path(__file__).resolve().parents[2] / "tests/data/published/runs.csv"
# A job, as `jobs_of` in planner/validate/validate.cpp.
JOB = ["source", "engine", "device", "devices", "layers", "hidden", "seq_len", "global_batch", "precision"]
# Upper limits of how far apart two predictions are.
APART = [0.01, 0.05, 0.10, float("inf")]


def main(parplan: str) -> None:
    command = [parplan, "validate", str(RUNS), "--json", "-", "--quiet"]
    rows = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["rows"]
    with RUNS.open(newline="") as file:
        published = {run["id"]: run for run in csv.DictReader(file)}
    jobs: dict[tuple, list[tuple[float, float]]] = {}
    for row in rows:
        if row["stated"] == "exact" and row["error"] is not None:
            job = tuple(published[row["id"]][key] for key in JOB)
            jobs.setdefault(job, []).append((row["predicted_step_time_s"], row["measured_step_time_s"]))
    counts = {limit: [0, 0] for limit in APART}  # in their order, and all
    for steps in jobs.values():
        for a, b in itertools.combinations(steps, 2):
            apart = max(a[0], b[0]) / min(a[0], b[0]) - 1
            count = counts[next(limit for limit in APART if apart < limit)]
            count[0] += (a[0] < b[0]) == (a[1] < b[1])
            count[1] += 1
    print(f"{sum(len(steps) > 1 for steps in jobs.values())} jobs, {sum(all for _, all in counts.values())} pairs")
    for limit, (ordered, all_pairs) in counts.items():
        print(f"predictions that differ by less than {100 * limit:g} %: {ordered} of {all_pairs} in their order")


if __name__ == "__main__":
    main(sys.argv[1])
