#!/usr/bin/env bash
# How long `parplan suggest` takes, as a process, for every model of the zoo on every cluster of
# configs/ (one node of each, defaults for the rest): the count, the median and the slowest. Usage:
# tests/bench/first_use.sh [build/parplan]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
program=$(realpath "${1:-build/parplan}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for cluster in configs/clusters/*.yaml; do
  for model in models/*.yaml; do
    begin=$(date +%s%N)
    code=0
    "$program" suggest "$model" --cluster "$cluster" --json "$work/plans.json" --quiet -o "$work/plan.yaml" \
      >/dev/null 2>"$work/errors" || code=$?
    end=$(date +%s%N)
    # 1: nothing fits, which is an answer too.
    if [ "$code" -gt 1 ]; then
      echo "suggest $model --cluster $cluster: exit $code: $(head -1 "$work/errors")" >&2
      exit 1
    fi
    echo "$(((end - begin) / 1000)) $(basename "$model" .yaml) $(basename "$cluster" .yaml) $code"
  done
done | sort -n >"$work/times"
count=$(wc -l <"$work/times")
awk -v n="$count" 'NR == int((n + 1) / 2) {printf "%d searches, median %.3f s\n", n, $1 / 1e6}' "$work/times"
awk '$4 == 1 {nothing++} END {printf "nothing fits in %d of them\n", nothing}' "$work/times"
echo "slowest:"
tail -5 "$work/times" | awk '{printf "  %.3f s  %s on %s\n", $1 / 1e6, $2, $3}'
