"""What the host takes to submit an op of Megatron-LM, by the golden values of its own tests.

For developers; configs/engines/megatron-tests.yaml has its result (host_per_op). Needs no package.

    python3 tests/golden/fit_host_of_megatron.py build/parplan

Models of 12 layers of 512, of BERT's 24 of 1,024 and T5's 12 + 12 of 768 have kernels that take
next to nothing, so that their steps are the host's. For each, the time of an op with which its step
is predicted as it was measured; none is a run of tests/data/published.
"""

import csv
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

SOURCE = pathlib.Path(__file__).resolve().parents[2]
RUNS = SOURCE / "tests/data/published/runs.csv"

# NVIDIA/Megatron-LM@d98e8a64dd tests/functional_tests/test_cases/*/*/golden_values_dev_*.json for
# dgx_h100, dgx_a100 and dgx_gb200: the median of iteration-time behind the fifth step, in ms. Test,
# model, tp, pp, ms by device.
H100, A100, GB200 = "h100-sxm-80gb", "a100-sxm4-80gb", "gb200"
LINKS = {H100: "nvlink4-nvswitch", A100: "nvlink3-nvswitch", GB200: "nvlink5-nvl72"}
MODELS = {  # family, layers, hidden, heads, feed-forward, sequence, vocabulary, batch
    "gpt": ("gpt", 12, 512, 8, 2048, 1024, 50304, 32),
    "bert": ("gpt", 24, 1024, 16, 4096, 512, 29056, 128),
    "t5": ("t5", 24, 768, 12, 3072, 512, 29184, 32),
}
GOLDEN = [
    ("gpt3_mcore_te_tp1_pp1_resume_torch_dist_dist_optimizer", "gpt", 1, 1, {H100: 53, A100: 107, GB200: 67}),
    ("gpt3_mcore_te_tp1_pp4_resume_torch_dist_disable_bias_linear", "gpt", 1, 4, {H100: 121, A100: 186, GB200: 108}),
    ("gpt3_mcore_te_tp2_pp2_resume_torch_dist_cross_entropy_loss_fusion", "gpt", 2, 2,
     {H100: 120, A100: 171, GB200: 173}),
    ("gpt3_mcore_te_tp4_pp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce", "gpt", 4, 1,
     {H100: 196, A100: 371, GB200: 280}),
    ("gpt3_mcore_tp1_pp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce_param_gather", "gpt", 1, 1,
     {H100: 53, A100: 96, GB200: 71}),
    ("gpt3_mcore_tp1_pp2", "gpt", 1, 2, {H100: 85, A100: 130, GB200: 103}),
    ("gpt3_mcore_tp4_pp1_resume_torch_dist", "gpt", 4, 1, {H100: 203, A100: 296, GB200: 280}),
    ("bert_mcore_tp1_pp2", "bert", 1, 2, {H100: 447, A100: 691}),
    ("bert_mcore_tp2_pp2", "bert", 2, 2, {H100: 954, A100: 1671}),
    ("bert_mcore_tp2_pp2_local_spec", "bert", 2, 2, {H100: 800, A100: 1136}),
    ("bert_mcore_tp4_pp1", "bert", 4, 1, {H100: 1746, A100: 2353}),
    ("t5_mcore_te_tp1_pp1_vp1_resume_torch", "t5", 1, 1, {H100: 170, A100: 245}),
    ("t5_mcore_te_tp2_pp1_vp1", "t5", 2, 1, {H100: 333, A100: 454}),
    ("t5_mcore_te_tp4_pp1", "t5", 4, 1, {H100: 635, A100: 1063}),
    ("t5_mcore_tp1_pp1_vp1", "t5", 1, 1, {H100: 139, A100: 222}),
    ("t5_mcore_tp2_pp1_vp1", "t5", 2, 1, {H100: 270, A100: 387}),
    ("t5_mcore_tp4_pp1", "t5", 4, 1, {H100: 505, A100: 712}),
]
AT = [60, 90, 120, 150, 180, 210, 240]  # us


def runs() -> str:
    columns = next(csv.reader(RUNS.open()))
    out = io.StringIO()
    table = csv.DictWriter(out, columns, restval="")
    table.writeheader()
    for test, model, tp, pp, by_device in GOLDEN:
        family, layers, hidden, heads, feature, sequence, vocabulary, batch = MODELS[model]
        for device, milliseconds in by_device.items():
            table.writerow({
                "id": f"{test}/{device}", "engine": "megatron", "source": "Megatron-LM@d98e8a64dd tests", "tier": "A",
                "model_family": family, "layers": layers, "hidden": hidden, "heads": heads, "ffn_hidden": feature,
                "kv_heads": heads if family == "gpt" else "", "gated_mlp": "no", "vocab": vocabulary,
                "seq_len": sequence, "precision": "bf16", "device": device, "data_parallel": "ddp", "outcome": "ok",
                "devices": 8, "devices_per_node": 4 if device == GB200 else 8, "intra_node": LINKS[device],
                "dp": 8 // tp // pp, "zero_stage": 1 if "dist_optimizer" in test else 0, "tp": tp, "pp": pp, "vpp": 1,
                "cp": 1, "sequence_parallel": "no", "micro_batch": 4, "global_batch": batch, "recompute": "none",
                "step_time_s": milliseconds * 1e-3})
    return out.getvalue()


def predicted(parplan: str, data: pathlib.Path, table: str) -> dict[str, tuple[float, float]]:
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write(table)
        file.flush()
        command = [parplan, "validate", file.name, "--json", "-", "--quiet"]
        result = subprocess.run(command, capture_output=True, check=True, env=dict(os.environ, PARPLAN_DATA=str(data)))
    rows = json.loads(result.stdout)["rows"]
    return {row["id"]: (row["predicted_step_time_s"], row["measured_step_time_s"]) for row in rows}


def main() -> None:
    table = runs()
    steps = {}
    for microseconds in AT:
        with tempfile.TemporaryDirectory() as folder:
            data = pathlib.Path(folder)
            for part in ("configs", "models"):
                shutil.copytree(SOURCE / part, data / part)
            file = data / "configs/engines/megatron-tests.yaml"
            text, count = re.subn(r"(host_per_op: \{value: )[^,]*", rf"\g<1>{microseconds} us", file.read_text())
            assert count == 1
            file.write_text(text)
            steps[microseconds] = predicted(sys.argv[1], data, table)
    found = {H100: [], A100: [], GB200: []}
    for run in steps[AT[0]]:
        measured = steps[AT[0]][run][1]
        errors = [steps[at][run][0] - measured for at in AT]
        for (low, below), (high, above) in zip(zip(AT, errors), zip(AT[1:], errors[1:])):
            if below <= 0 <= above:
                found[run.split("/")[1]].append(low + (high - low) * below / (below - above))
    for device, times in found.items():
        times.sort()
        quarter = len(times) // 4
        print(f"{device}: {len(times)} goldens ask for {times[0]:.0f} to {times[-1]:.0f} us an op, "
              f"half of them for {times[quarter]:.0f} to {times[-1 - quarter]:.0f}, "
              f"median {times[len(times) // 2]:.0f}")


main()
