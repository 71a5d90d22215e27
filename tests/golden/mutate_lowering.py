#!/usr/bin/env python3
"""Plants faults in the lowering of a copy of the sources, and shows which tests find them.

    cmake -S COPY -B COPY/build -DBUILD_TESTING=ON && python3 tests/golden/mutate_lowering.py COPY/build

COPY is a copy of this tree, whose files are changed one at a time and changed back. A fault is
found where a test fails, crashes, or takes longer than any should. docs/contributing.md has the
result. Not part of the test suite: it builds the tests once for each fault.
"""
import pathlib
import re
import subprocess
import sys

# What the fault is, its file under planner/program, the text, and what takes its place.
FAULTS = [
    ("a second use's gradient overwrites the first", "segment_backward.cpp",
     "shape.accumulate = op.accumulate && !adds_or_copies;", "shape.accumulate = false && adds_or_copies;"),
    ("an instruction does not wait for another stream's", "events.cpp",
     "current.waits.push_back(*earlier.records);", ""),
    ("a call does not wait for another stream's", "events.cpp", "call.waits.push_back(*other.records);", ""),
    ("a buffer may be written while it is read", "events.cpp",
     "if (of_segment[b].writes && history.read != 0) {", "if (false && history.read != 0) {"),
    ("gradients are reduced after every micro-batch", "run_actions.cpp",
     "if (last_micro_batch && lowering.job.training.engine.overlaps_data)",
     "if (lowering.job.training.engine.overlaps_data)"),
    ("shards are not summed over replicas of their group", "run_actions.cpp",
     "if (is_hybrid(mesh, shards))", "if (false)"),
    ("gradients do not start from zero", "step_begin_and_end.cpp",
     "for (const int gradients : accumulators(lowering, i)) clear(lowering, gradients);", ""),
    ("gradients of what ranks hold whole are not summed", "step_begin_and_end.cpp",
     "for (const Axis axis : parameter_axes) reduce_partial_gradients(lowering, i, accumulators(lowering, i), axis);",
     ";"),
    ("gradients of copied rows are not summed", "step_begin_and_end.cpp",
     "reduce_gradients_of_copies(lowering, i, gradients.front());", "static_cast<void>(gradients.front());"),
    ("the uses of a tied parameter are not added", "step_begin_and_end.cpp",
     "i < program.buckets.size(); ++i) add_tied(lowering, i);",
     "i < program.buckets.size() && false; ++i) add_tied(lowering, i);"),
    ("the norm counts what several ranks hold several times", "step_begin_and_end.cpp",
     "return run.replicated[axis] && is_later[axis];", "return run.replicated[axis] && false;"),
    ("shards of parameters are not gathered after the update", "step_begin_and_end.cpp",
     "i < program.buckets.size(); ++i) gather_in_place(lowering, i);",
     "i < program.buckets.size() && false; ++i) gather_in_place(lowering, i);"),
    ("weight decay is of the other parameters", "step_begin_and_end.cpp",
     "return run.decays == decays && !run.is_matrix;", "return run.decays != decays && !run.is_matrix;"),
    ("a rank multiplies the wrong neighbour's rows", "segment_slices.cpp",
     "const int rank = product.before(step);", "const int rank = product.before(step + 1);"),
    ("a partial sum is taken for the whole", "propagate_placements.cpp",
     "result.output = partial_sum();\n      } else {", "result.output = replicate();\n      } else {"),
    ("a stage has one slot too few for what it saves", "activation_slots.cpp",
     "Slots slots{.saved = most_in_flight(actions),",
     "Slots slots{.saved = std::max(1, most_in_flight(actions) - 1),"),
    ("what a forward saved on the host is not copied back", "offload_saved.cpp",
     "call_back(lowering, segments.saved, from.saved, to.saved, true);", ""),
    ("momenta are not gathered before they are orthogonalized", "orthogonalize.cpp",
     "whole = with(gathered, Access::read);", ""),
]
SECONDS = 300


def first_failure(test, arguments):
    try:
        run = subprocess.run([test, "-aa=1", *arguments], capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return "does not end"
    if run.returncode == 0:
        return None
    cases = re.findall(r"TEST CASE:  (.*)", run.stdout)
    return cases[-1] if cases else f"ends with {run.returncode}"


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    chosen = sys.argv[2:]
    cache = (build / "CMakeCache.txt").read_text()
    source = pathlib.Path(re.search(r"CMAKE_HOME_DIRECTORY:INTERNAL=(.*)", cache).group(1))
    missed = 0
    for what, file, text, instead in FAULTS:
        if chosen and not any(word in what for word in chosen):
            continue
        path = source / "planner/program" / file
        whole = path.read_text()
        if whole.count(text) < 1:
            sys.exit(f"{file} has no '{text}'")
        path.write_text(whole.replace(text, instead, 1))
        try:
            command = ["cmake", "--build", str(build), "--target", "test_planner_program", "test_numerics"]
            built = subprocess.run(command, capture_output=True, text=True)
            if built.returncode != 0:
                sys.exit(f"the fault '{what}' does not compile:\n{built.stdout[-2000:]}")
            else:
                tests = build / "tests"
                found = first_failure(tests / "test_planner_program", []) or first_failure(tests / "test_numerics", [])
        finally:
            path.write_text(whole)
        missed += found is None
        print(f"| {what} | `{file}` | {found or '**no test**'} |", flush=True)
    sys.exit(1 if missed else 0)


main()
