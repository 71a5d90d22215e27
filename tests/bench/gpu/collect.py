"""The outputs of run_gpu_bench.sh as a table in Markdown (printed) and CSV (results.csv): medians over the rounds."""
import csv
import json
import pathlib
import re
import statistics
import sys

folder = pathlib.Path(sys.argv[1])
found = {}  # (model, batch, sequence) -> program -> list of (step time, mfu or None, predicted step time or None)
model_tflop = {}  # of a step, by parplan's count


def add(case, program, step_time, mfu=None, predicted=None):
    found.setdefault(case, {}).setdefault(program, []).append((step_time, mfu, predicted))


def steps_of_llmc(text):
    # "step 3/20 | loss ... | 61.24 ms | 52.1% bf16 MFU | 535073 tok/s"; the first steps choose
    # algorithms
    times = [float(ms) / 1e3 for ms in re.findall(r"\|\s*([0-9.]+) ms \|", text)]
    return times[len(times) // 4:]


for path in sorted(folder.iterdir()):
    match = re.fullmatch(r"(.+)-(\d+)-(\d+)\.(parplan|llmc|pytorch[a-z-]*)\.(\d+)\.(json|txt)", path.name)
    if not match or (match[4] == "parplan" and match[6] == "txt"):
        continue
    case = (match[1], int(match[2]), int(match[3]))
    text = path.read_text()
    if not text.strip():
        continue
    if match[4] == "parplan":
        run = json.loads(text)
        row = run["measured"]
        model_tflop[case] = row["model_tflops_per_device"] * row["step_time_s"]
        peak = row["model_tflops_per_device"] / row["mfu"] if row["mfu"] else None
        model_tflop[case, "peak"] = peak
        add(case, "parplan", row["step_time_s"], row["mfu"], run["predicted"]["step_time_s"])
    elif match[4] == "llmc":
        times = steps_of_llmc(text)
        if times:
            add(case, "llm.c", statistics.median(times))
    else:
        run = json.loads(text.splitlines()[-1])
        add(case, run["program"], run["step_time_s"])

print("\n".join("    " + line for line in (folder / "machine.txt").read_text().splitlines()))
print("\n| model | batch | sequence | program | ms a step | tokens/s | MFU "
      "| parplan is faster by | predicted | error |")
print("|---|---|---|---|---|---|---|---|---|---|")
with open(folder / "results.csv", "w", newline="") as file:
    table = csv.writer(file)
    table.writerow(["model", "batch", "sequence", "program", "rounds", "step_time_s", "tokens_per_s", "mfu",
                    "parplan_speedup", "predicted_step_time_s", "prediction_error"])
    for case, programs in found.items():
        model, batch, sequence = case
        ours = statistics.median(time for time, _, _ in programs["parplan"]) if "parplan" in programs else None
        for program, runs in programs.items():
            time = statistics.median(run[0] for run in runs)
            peak = model_tflop.get((case, "peak"))
            # One count of model FLOPs for all: parplan's.
            mfu = model_tflop[case] / time / peak if peak else None
            predicted = runs[0][2]
            error = predicted / time - 1 if predicted else None
            speedup = time / ours if ours else None
            tokens = batch * sequence / time
            table.writerow([model, batch, sequence, program, len(runs), time, tokens, mfu, speedup, predicted, error])
            cells = [model, batch, sequence, program, f"{time * 1e3:.2f}", f"{tokens:,.0f}",
                     f"{mfu:.1%}" if mfu else "-",
                     f"{speedup:.2f}x" if speedup and program != "parplan" else "",
                     f"{predicted * 1e3:.2f} ms" if predicted else "",
                     f"{error:+.1%}" if error is not None else ""]
            print("| " + " | ".join(str(cell) for cell in cells) + " |")
