#!/usr/bin/env bash
# Compares parplan with PyTorch (eager and compiled) and llm.c on one GPU: the same model, batch and
# sequence, in turns; the results are medians over the rounds.
# Writes OUT/results.csv and OUT/results.md (for docs/gpu.md); every run's own output stays in OUT.
#
#   tests/bench/gpu/run_gpu_bench.sh [--parplan build/parplan] [--cluster CLUSTER.yaml] [--out OUT]
#                                    [--rounds N] [--steps N] [--python python3] [--llmc DIR]
#                                    [--cases FILE] [--device cuda|cpu]
#
# --cluster   the cluster to plan for; without it `parplan measure -o` writes one first, so that
#             step times are predicted before the run
# --llmc      a folder of karpathy/llm.c in which train_gpt2cu is built and
#             dev/data/tinyshakespeare is prepared
# --cases     lines "MODEL BATCH SEQUENCE" instead of those below
# --device    cpu tries the script on tiny cases: parplan's ranks are then cores
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
parplan=$root/build/parplan cluster="" out=gpu-bench rounds=3 steps=20 python=python3 llmc="" cases="" device=cuda
while [ $# -gt 0 ]; do
  case $1 in
    --parplan) parplan=$2 ;; --cluster) cluster=$2 ;; --out) out=$2 ;; --rounds) rounds=$2 ;; --steps) steps=$2 ;;
    --python) python=$2 ;; --llmc) llmc=$2 ;; --cases) cases=$2 ;; --device) device=$2 ;;
    *) echo "unknown option $1" >&2; exit 2 ;;
  esac
  shift 2
done
mkdir -p "$out"
out=$(cd "$out" && pwd)
if [ -z "$cases" ]; then
  cases=$out/cases
  cat > "$cases" <<'CASES'
gpt2 32 1024
gpt2 8 4096
gpt2-large 16 1024
gpt2-large 4 4096
gpt2-xl 8 1024
gpt2-xl 2 4096
llama3.2-1b 8 1024
llama3.2-1b 2 4096
CASES
fi
if [ -z "$cluster" ]; then
  cluster=$out/cluster.yaml
  "$parplan" measure --device "$device" -o "$cluster" --write-device "$out/device.yaml" > "$out/measure.txt"
fi
{
  date -u +%Y-%m-%d
  nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,power.limit --format=csv,noheader 2>/dev/null ||
    echo "no nvidia-smi"
  "$parplan" --version
} > "$out/machine.txt"
precision=bf16
[ "$device" = cpu ] && precision=fp32

# Says what failed and goes on: a case that does not fit is a result, too.
attempt() {
  local log=$1
  shift
  "$@" > "$log" 2>> "$out/errors.txt" || echo "failed: $*" | tee -a "$out/errors.txt" >&2
}

while read -r model batch sequence; do
  [ -n "$model" ] || continue
  name=$model-$batch-$sequence
  # Learned positions end at the context: a longer one is another model file.
  sed "s/^context:.*/context: $sequence/" "$root/models/$model.yaml" > "$out/$name.model.yaml"
  "$parplan" suggest "$out/$name.model.yaml" --cluster "$cluster" --devices 1 --precision $precision \
    --global-batch "$batch" --seq-len "$sequence" --micro-batch "$batch" --recompute none --zero 0 \
    -o "$out/$name.plan.yaml" --quiet > "$out/$name.suggest.txt" 2>> "$out/errors.txt" ||
    { echo "no plan: $name" >&2; continue; }
  script=$here/pytorch_gpt2.py
  case $model in llama*) script=$here/pytorch_llama.py ;; esac
  for round in $(seq "$rounds"); do
    echo "$name, round $round of $rounds" >&2
    attempt "$out/$name.parplan.$round.txt" "$parplan" run "$out/$name.plan.yaml" --steps "$steps" \
      --json "$out/$name.parplan.$round.json" --quiet
    for mode in "" --compile; do
      [ "$device" = cpu ] && [ -n "$mode" ] && continue
      for kind in autocast master; do
        attempt "$out/$name.pytorch$mode-$kind.$round.json" "$python" "$script" --model "$model" --batch "$batch" \
          --sequence "$sequence" --steps "$steps" --device "$device" --precision $kind $mode
      done
    done
    depth=""
    case $model in gpt2) depth=d12 ;; gpt2-medium) depth=d24 ;; gpt2-large) depth=d36 ;; gpt2-xl) depth=d48 ;; esac
    if [ -n "$llmc" ] && [ -n "$depth" ] && [ "$sequence" -le 1024 ]; then
      data=$llmc/dev/data/tinyshakespeare/tiny_shakespeare
      attempt "$out/$name.llmc.$round.txt" env -C "$llmc" ./train_gpt2cu -e $depth -i "$data"_train.bin \
        -j "$data"_val.bin -b "$batch" -t "$sequence" -d $((batch * sequence)) -x "$steps" -v 0 -s 0 -r 0
    fi
  done
done < "$cases"
"$python" "$here/collect.py" "$out" > "$out/results.md"
cat "$out/results.md"
