"""What each part of the engines' files and of the sustained rates contributes to `parplan validate`.

For developers; docs/accuracy.md has its table. Needs no package.

    python3 tests/golden/ablate_engines.py build/parplan
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

SOURCE = pathlib.Path(__file__).resolve().parents[2]
FILES = ["runs.csv", "vtrain-one-node.csv"]


def set_facts(data: pathlib.Path, value: str, *keys: str) -> None:
    for file in (data / "configs/engines").glob("*.yaml"):
        text = file.read_text()
        for key in keys:
            text = re.sub(rf"(  {key}: {{value: )[^,]*", rf"\g<1>{value}", text)
        file.write_text(text)


def drop_sustained_rates(data: pathlib.Path) -> None:
    for file in (data / "configs/devices").glob("*.yaml"):
        file.write_text(re.sub(r"    sustained: .*\n", "", file.read_text()))


def fuse_attention(data: pathlib.Path) -> None:
    set_facts(data, "true", "fused_attention")
    set_facts(data, "false", "dropout")


PARTS = {
    "nothing": lambda data: None,
    "sustained rates": drop_sustained_rates,
    "unfused attention, dropout": fuse_attention,
    "recompute of whole layers": lambda data: set_facts(data, "false", "repeats_layers"),
    "communication that waits": lambda data: set_facts(
        data, "true", "overlaps_tensor", "overlaps_data", "overlaps_pipeline"),
    "separate elementwise kernels and loss": lambda data: set_facts(
        data, "true", "fused_norm", "fused_activation", "fused_dropout", "fused_loss"),
    "gradients in half precision": lambda data: (
        set_facts(data, "false", "half_gradients", "reduces_half"), set_facts(data, "true", "scatters_fp32")),
    "split transfers": lambda data: set_facts(data, "false", "splits_transfers"),
    "padding of the vocabulary": lambda data: set_facts(data, "1", "vocabulary_multiple"),
    "the host's time": lambda data: set_facts(data, "0 us", "host_per_op"),
}


def errors(parplan: str, data: pathlib.Path, runs: str) -> dict:
    command = [parplan, "validate", str(SOURCE / "tests/data/published" / runs), "--json", "-", "--quiet"]
    environment = dict(os.environ, PARPLAN_DATA=str(data))
    return json.loads(subprocess.run(command, capture_output=True, check=True, env=environment).stdout)["summary"]


def in_words(summary: dict, stated: str) -> str:
    row = summary[stated]["all"][0]
    parts = []
    for quantity in ("step_time", "memory"):
        if of := row[quantity]:
            parts.append(f"{quantity} {100 * of['mean_absolute_error']:.1f} ({100 * of['bias']:+.1f})")
    return ", ".join(parts)


def main(parplan: str) -> None:
    parplan = str(pathlib.Path(parplan).resolve())
    for left_out, edit in PARTS.items():
        with tempfile.TemporaryDirectory() as folder:
            data = pathlib.Path(folder)
            shutil.copytree(SOURCE / "configs", data / "configs")
            (data / "models").symlink_to(SOURCE / "models")
            edit(data)
            for runs in FILES:
                summary = errors(parplan, data, runs)
                for stated in ("exact", "assumed"):
                    print(f"without {left_out}: {runs}, {stated}: {in_words(summary, stated)}")


if __name__ == "__main__":
    main(sys.argv[1])
