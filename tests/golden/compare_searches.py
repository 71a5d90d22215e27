"""Where two builds of parplan suggest other plans, over random searches.

For developers, after a change that should save a search work alone: rules that do so have changed the
best plan before. Needs no package.

    python3 tests/golden/compare_searches.py OLD/parplan NEW/parplan [SEARCHES] [SEED]
"""

import json
import pathlib
import random
import resource
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODELS = ["bert-large", "gpt2-xl", "gpt3-175b", "llama3-8b", "llama3-70b", "llama3-405b", "mistral-7b", "t5-3b"]
CLUSTERS = ["dgx-a100", "dgx-h100", "dgx-1-v100", "l40s-8", "rtx-4090-8", "titan-rtx-2"]
# Options of a search, each with the values of which one is drawn; none leaves the option out.
OPTIONS = {
    "--seq-len": ["512", "2048", "8192", "32768"],
    "--objective": [None, None, "cost", "memory"],
    "--engine": [None, None, None, "megatron", "megatron-deepspeed", "fsdp", "torchtitan"],
    "--zero": [None, None, None, "1", "3"],
    "--tp": [None, None, None, "2", "8"],
    "--schedule": [None, None, None, "1f1b", "interleaved"],
    "--recompute": [None, None, None, "none", "full"],
    "--top": [None, "1", "10"],
}
# What tells plans apart, of the columns of a plan.
LAYOUT = ["dp", "tp", "pp", "cp", "mesh_order", "zero_stage", "micro_batch", "schedule", "virtual_stages",
          "stage_layers", "sequence_parallel", "tp_overlap", "cp_method", "cp_ulysses", "dp_shard", "recompute",
          "stage_recompute", "recompute_layers", "input_slots", "micro_batch_group", "dp_method", "tied_gradients"]
MOST_SECONDS = 120


def search_of(chance: random.Random) -> list[str]:
    nodes = chance.choice([1, 1, 2, 3, 8, 32, 125])
    cluster = chance.choice(CLUSTERS)
    search = [chance.choice(MODELS), "--cluster", cluster, "--nodes", str(nodes)]
    search += ["--global-batch", str(chance.choice([1, 3, 8]) * nodes * chance.choice([1, 8]))]
    for option, values in OPTIONS.items():
        value = chance.choice(values)
        if value is not None:
            search += [option, value]
    return search


def ranked(parplan: str, search: list[str]) -> tuple[list[tuple[str, float]] | str, float]:
    """The layouts and their seconds, or the error; and the seconds of processor that it took."""
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        command = [parplan, "suggest", *search, "--quiet", "--json", "-", "-o", f"{folder}/plan.yaml"]
        try:
            ran = subprocess.run(command, capture_output=True, cwd=ROOT, timeout=MOST_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return f"takes more than {MOST_SECONDS} s", float(MOST_SECONDS)
        took = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    if ran.returncode != 0:
        return ran.stderr.decode().strip().splitlines()[0], took
    plans = json.loads(ran.stdout)["plans"]
    return [(" ".join(f"{key}={plan[key]}" for key in LAYOUT), plan["step_time_s"]) for plan in plans], took


def main(old: str, new: str, searches: int = 100, seed: int = 1) -> None:
    chance = random.Random(seed)
    count = same = other_runners_up = 0
    seconds = [0.0, 0.0]
    while count < searches:
        search = search_of(chance)
        (before, before_seconds), (after, after_seconds) = ranked(old, search), ranked(new, search)
        if before == after and isinstance(before, str) and before.startswith("error: "):
            continue  # what was drawn does not go together
        count += 1
        seconds = [seconds[0] + before_seconds, seconds[1] + after_seconds]
        if before == after:
            same += 1
        elif isinstance(before, list) and isinstance(after, list) and before[:1] == after[:1]:
            other_runners_up += 1
        else:
            print(f"parplan suggest {' '.join(search)}")
            for name, found in (("old", before), ("new", after)):
                print(f"    {name}: {found if isinstance(found, str) else found[0]}")
    print(f"{searches} searches: {same} equal, {other_runners_up} with other runners-up, "
          f"{searches - same - other_runners_up} with another best plan or error")
    print(f"seconds of processor: {seconds[0]:.1f} and {seconds[1]:.1f}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
