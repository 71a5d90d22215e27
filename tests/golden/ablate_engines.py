"""What each part of the engines', devices' and clusters' files contributes to `parplan validate`.

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
        file.write_text(re.sub(r"    (sustained|origins): .*\n", "", file.read_text()))


def use_all_nics(data: pathlib.Path) -> None:
    for file in (data / "configs/clusters").glob("*.yaml"):
        file.write_text(file.read_text().replace(", one_ring: true", ""))


def reach_line_rates(data: pathlib.Path) -> None:
    for file in (data / "configs/clusters").glob("*.yaml"):
        text = re.sub(r"line_rate: (\d+ Gbit/s)(, reached: [^,}]*)?", r"line_rate: \1, reached: \1", file.read_text())
        file.write_text(text)
    for file in (data / "configs/devices").glob("*.yaml"):
        file.write_text(re.sub(r"per_link: ([^,]*), per_link_reached: [^,}]*", r"per_link: \1, per_link_reached: \1",
                               file.read_text()))


def drop_network_latency(data: pathlib.Path) -> None:
    for file in (data / "configs/clusters").glob("*.yaml"):
        file.write_text(re.sub(r"(network: \{latency: )[^,}]*", r"\g<1>0 us", file.read_text()))


def fuse_attention(data: pathlib.Path) -> None:
    set_facts(data, "true", "fused_attention")
    set_facts(data, "false", "dropout")


# Predicted as parplan's own runtime, too.
ALL = "all of it: `--engine parplan` and no sustained rates"

PARTS = {
    "nothing": lambda data: None,
    ALL: drop_sustained_rates,
    "sustained rates": drop_sustained_rates,
    "unfused attention, dropout": fuse_attention,
    "sizes that the softmax's kernel asks for": lambda data: (
        set_facts(data, "1", "softmax_multiple"), set_facts(data, "0", "softmax_up_to")),
    "which GPUs attention has kernels for": lambda data: set_facts(data, "0", "attention_up_to"),
    "Triton's attention": lambda data: set_facts(data, "false", "triton_attention"),
    "losses of metrics": lambda data: set_facts(data, "0", "loss_metrics"),
    "cuBLAS of CUDA 12.0 and 12.1": lambda data: set_facts(data, "false", "early_cublas"),
    "filled results": lambda data: set_facts(data, "false", "fills_outputs"),
    "recompute of whole layers": lambda data: set_facts(data, "false", "repeats_layers"),
    "communication that waits, reductions at the end": lambda data: set_facts(
        data, "true", "overlaps_tensor", "overlaps_data", "overlaps_pipeline"),
    "separate elementwise kernels and loss": lambda data: set_facts(
        data, "true", "fused_norm", "fused_activation", "fused_dropout", "fused_loss", "fused_scores", "fused_gelu",
        "fused_gate", "fused_rms_norm", "fused_rotary", "fused_update"),
    "kernels of gradients: sums, norms' parameters, biases": lambda data: set_facts(
        data, "true", "fused_sums", "fused_norm_gradient", "fused_bias_gradient"),
    "updates of lists of tensors": lambda data: set_facts(data, "false", "lists_updates"),
    "gradients in half precision": lambda data: set_facts(data, "false", "half_gradients", "reduces_half"),
    "all-reduced gradients of ZeRO-1, and their copies": lambda data: (
        set_facts(data, "true", "scatters_gradients"), set_facts(data, "false", "copies_reduced")),
    "FSDP's copies": lambda data: set_facts(data, "false", "flattens_gradients", "widens_gradients",
                                            "copies_gathered"),
    "DeepSpeed's copies, reductions of ZeRO-2 and hooks": lambda data: (
        set_facts(data, "false", "copies_sharded", "copies_coalesced", "copies_to_update"),
        set_facts(data, "true", "scatters_sharded"),
        set_facts(data, "0 us", "host_per_module_forward", "host_per_module_backward", "host_per_sharded_gradient")),
    "separate and repeated keys, attention rank by rank, weights cast apart": lambda data: set_facts(
        data, "false", "separate_keys", "repeats_keys", "attends_in_steps", "casts_weights_apart"),
    "scales and transposed weights in fp8": lambda data: (
        set_facts(data, "false", "transposes_weights"), set_facts(data, "0", "scale_history")),
    "split transfers": lambda data: set_facts(data, "false", "splits_transfers"),
    "rings through one NIC each way": use_all_nics,
    "shares of their line rates that NICs and NVLinks reach": reach_line_rates,
    "the networks' latency": drop_network_latency,
    "what PyTorch's allocator keeps": lambda data: set_facts(data, "0", "allocator_reserve"),
    "padding of the vocabulary": lambda data: set_facts(data, "1", "vocabulary_multiple"),
    "the host's time": lambda data: set_facts(data, "0 us", "host_per_op"),
}


def errors(parplan: str, data: pathlib.Path, runs: str, arguments: list[str]) -> dict:
    command = [parplan, "validate", str(SOURCE / "tests/data/published" / runs), "--json", "-", "--quiet", *arguments]
    environment = dict(os.environ, PARPLAN_DATA=str(data))
    return json.loads(subprocess.run(command, capture_output=True, check=True, env=environment).stdout)["summary"]


def in_words(summary: dict, stated: str, quantity: str) -> str:
    of = summary[stated]["all"][0][quantity]
    return f"{100 * of['mean_absolute_error']:.1f} ({100 * of['bias']:+.1f})" if of else "-"


def main(parplan: str) -> None:
    parplan = str(pathlib.Path(parplan).resolve())
    print("| left out | exact | assumed | memory, exact | memory, assumed | one node, exact |")
    for left_out, edit in PARTS.items():
        with tempfile.TemporaryDirectory() as folder:
            data = pathlib.Path(folder)
            shutil.copytree(SOURCE / "configs", data / "configs")
            (data / "models").symlink_to(SOURCE / "models")
            edit(data)
            arguments = ["--engine", "parplan"] if left_out == ALL else []
            several, one_node = (errors(parplan, data, runs, arguments) for runs in FILES)
        cells = [in_words(several, "exact", "step_time"), in_words(several, "assumed", "step_time"),
                 in_words(several, "exact", "memory"), in_words(several, "assumed", "memory"),
                 in_words(one_node, "exact", "step_time")]
        print(f"| {left_out} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
