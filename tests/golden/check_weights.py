#!/usr/bin/env python3
"""Checks `parplan run --weights` and `--export-weights` against transformers, for a tiny model of every
model_type that parplan reads (tests/data/golden/families/*.json), with random weights.

    python3 tests/golden/check_weights.py build/parplan

This is for developers; the tests need no Python. It needs transformers and PyTorch (the numbers of
docs/weights.md are of 5.23 and 2.15) and nothing from the network. For each model it prints

  logits    the largest difference of parplan's logits from transformers' at the end of a sequence, over the whole
            vocabulary, relative to the range of these logits. Losses are all that parplan says, so these are the
            differences of its losses where nothing but the last target differs; they are rounded where a mean over
            the sequence is. A BERT's targets are its own tokens, which are masked, and a T5's end with its end: the
            goldens compare their logits
  loaded    the largest relative difference of parplan's loss from transformers', over three batches and under
            two layouts, where parplan read what transformers saved
  exported  whether transformers, having read what parplan wrote, has the same weights to the bit; else the
            largest difference
  trained   the relative difference of the losses of the next batch, after parplan has trained two steps and
            transformers has read the export of these
  alone     the same as the first, for an export of parplan's own initial weights, for which it finds a
            model_type (printed last) and writes config.json itself
and fails where one of them is above its bound.
"""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

import numpy
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, T5ForConditionalGeneration
from transformers.utils import logging

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FAMILIES = ROOT / "tests" / "data" / "golden" / "families"
SEQUENCE, BATCH, STEPS = 16, 4, 3
LAYOUTS = [["--dp", "1", "--tp", "1", "--pp", "1"], ["--dp", "2", "--tp", "2", "--pp", "2", "--zero", "1"],
           ["--dp", "2", "--tp", "1", "--pp", "2", "--zero", "1"]]
LOSS_BOUND = 2e-6    # both sum in fp32, in orders of their own
LOGIT_BOUND = 2e-5   # a loss, which is rounded to 24 bits, times the sequence
NORM_BOUND = 2.4e-7  # Gemma's norms are kept as weight + 1


def is_masked(config):
    return config.model_type in ("bert", "roberta")


# A RoBERTa would give tokens that pad none.
def positions_of(config, sequences):
    if config.model_type != "roberta":
        return {}
    return dict(position_ids=torch.arange(SEQUENCE).expand(sequences, -1) + config.pad_token_id + 1)


def class_of(config):
    return AutoModelForMaskedLM if is_masked(config) else AutoModelForCausalLM


def is_t5(config):
    return config.model_type == "t5"


# transformers 5 ties the weights of a T5's config that says otherwise (make_golden_families.py).
def config_of(file):
    config = AutoConfig.from_pretrained(file)
    if is_t5(config):
        file = file / "config.json" if file.is_dir() else file
        config.tie_word_embeddings = json.loads(file.read_text()).get("tie_word_embeddings", True)
    return config


def build(config):
    attention = "sdpa" if config.model_type == "falcon" else "eager"  # see make_golden_families.py
    if is_t5(config):
        return T5ForConditionalGeneration._from_config(config, dtype=torch.float32,
                                                       attn_implementation=attention).eval()
    return class_of(config).from_config(config, dtype=torch.float32, attn_implementation=attention).eval()


def load(folder, config):
    attention = "sdpa" if config.model_type == "falcon" else "eager"
    if is_t5(config):
        return T5ForConditionalGeneration.from_pretrained(folder, config=config_of(folder), dtype=torch.float32,
                                                          attn_implementation=attention).eval()
    return class_of(config).from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()


def call(parplan, *words):
    result = subprocess.run([parplan, *map(str, words)], capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, words))}\n{result.stderr}")
    return result.stdout


def write_tokens(path, tokens):
    header = numpy.zeros(256, dtype=numpy.int32)
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + tokens.astype(numpy.uint16).tobytes())


def losses_of(model, tokens):
    losses = []
    for step in range(STEPS):
        begins = [(step * BATCH + i) * SEQUENCE for i in range(BATCH)]
        text = torch.from_numpy(numpy.stack([tokens[b: b + SEQUENCE + 1] for b in begins]).astype(numpy.int64))
        inputs, targets = text[:, :-1], text[:, 1:]
        options = positions_of(model.config, BATCH) if is_masked(model.config) else dict(use_cache=False)
        if is_masked(model.config):
            inputs, targets = masked(inputs, step * BATCH, model.config)
        if is_t5(model.config):
            inputs, options["decoder_input_ids"], targets = corrupted(inputs, step * BATCH, model.config)
        with torch.no_grad():
            logits = model(inputs, **options).logits
        losses.append(F.cross_entropy(logits.reshape(-1, logits.shape[-1]).double(), targets.reshape(-1)).item())
    return losses


# As runtime/token_data.cpp does it.
SEED = 1234  # TrainingSpec's
WORD = 2**64 - 1


def mixed(value):
    value = (value + 0x9E3779B97F4A7C15) & WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & WORD
    return value ^ (value >> 31)


def shuffled(index, count, seed):
    half = ((count - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for round in range(4):
            left, right = right, left ^ (mixed(mixed((seed + round) & WORD) ^ right) & mask)
        index = left << half | right
        if index < count:
            return index


def masked(tokens, first, config):
    inputs, targets = tokens.clone(), torch.full_like(tokens, -100)
    for sample in range(len(tokens)):
        own = mixed(mixed(SEED) ^ (first + sample))
        for i in range(round(0.15 * SEQUENCE)):
            position = shuffled(i, SEQUENCE, own)
            targets[sample, position] = tokens[sample, position]
            draw = mixed((own + i + 1) & WORD)
            if draw % 10 < 8:
                inputs[sample, position] = config.mask_token_id
            elif draw % 10 == 8:
                inputs[sample, position] = draw // 10 % config.vocab_size
    return inputs, targets


T5_START, T5_END = 0, 2  # of FAMILIES: the id of padding, and that of the end
SPAN = 3  # tokens of a span that is cut out (T5, arXiv:1910.10683, section 3.3.4)


def parts(length, count, seed):
    ends = sorted([1 + shuffled(i, length - 1, seed) for i in range(count - 1)] + [length])
    return [end - begin for begin, end in zip([0] + ends, ends)]


def corrupted(tokens, first, config):
    """What the encoder reads, what the decoder reads, and what it has to tell."""
    decoder = SEQUENCE // 2  # both sides have n_positions tokens
    encoder = SEQUENCE - decoder
    spans = min(max((decoder - 1 + (SPAN + 1) // 2) // (SPAN + 1), 1), (decoder - 1) // 2, (encoder - 1) // 2)
    read, told = [], []
    for sample, text in enumerate(tokens.tolist()):
        own = mixed(mixed(SEED) ^ (first + sample))
        of_told, of_kept = parts(decoder - spans - 1, spans, own), parts(encoder - spans - 1, spans, mixed(own))
        read.append([])
        told.append([])
        for span in range(spans):
            sentinel = config.vocab_size - 1 - span
            read[-1] += text[:of_kept[span]] + [sentinel]
            text = text[of_kept[span]:]
            told[-1] += [sentinel] + text[:of_told[span]]
            text = text[of_told[span]:]
        read[-1].append(T5_END)
        told[-1].append(T5_END)
    told = torch.tensor(told)
    start = torch.full_like(told[:, :1], T5_START)
    return torch.tensor(read), torch.cat((start, told[:, :-1]), dim=1), told


def logits_of(model, sequence):
    text = torch.from_numpy(sequence.astype(numpy.int64))[None]
    with torch.no_grad():
        return model(text, use_cache=False).logits[0, -1].double().numpy()


def logits_of_parplan(parplan, folder, layout, sequence, vocabulary):
    """Those at the end of the sequence, less that of token 0: a run whose every step has another last target."""
    data = folder / "targets"
    data.mkdir(exist_ok=True)
    for token in range(vocabulary):  # a sequence a file, which are taken by their names
        write_tokens(data / f"{token:06}.bin", numpy.append(sequence, token))
    plan = make_plan(parplan, folder, folder / "saved", layout, 0, batch=1)
    losses = numpy.array(run(parplan, folder, plan, vocabulary, data=data))
    return (losses[0] - losses) * SEQUENCE


def make_plan(parplan, folder, config, layout, learning_rate, batch=BATCH):
    plan = folder / "plan.yaml"
    call(parplan, "simulate", config, "--cluster", ROOT / "tests/data/clusters/cpu-8.yaml", "--seq-len", SEQUENCE,
         "--global-batch", batch, "--quiet", "-o", plan, "--json", folder / "simulated.json", *layout)
    text = plan.read_text()
    for key, value in dict(learning_rate=learning_rate, weight_decay=0).items():
        begin = text.index(f"\n  {key}: ", text.index("\ntraining:\n"))
        text = text[:begin] + f"\n  {key}: {value}" + text[text.index("\n", begin + 1):]
    plan.write_text(text)
    return plan


def run(parplan, folder, plan, steps, *words, data=None):
    call(parplan, "run", plan, "--steps", steps, "--data", data or folder / "tokens.bin", "--weights", folder / "saved",
         "--quiet", "--json", folder / "run.json", *words)
    return json.loads((folder / "run.json").read_text())["loss"]


def relative(a, b):
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def check(parplan, case, number, folder):
    torch.manual_seed(number)
    config = config_of(case)
    model = build(config)
    with torch.no_grad():
        for parameter in model.parameters():  # no bias of 0 and no norm of 1
            parameter += 0.1 * torch.randn_like(parameter)
    model.tie_weights()
    # Every other model in several files.
    model.save_pretrained(folder / "saved", max_shard_size="5GB" if number % 2 else "8KB")
    tokens = numpy.random.default_rng(number).integers(0, config.vocab_size, 600)
    write_tokens(folder / "tokens.bin", tokens)
    expected = losses_of(model, tokens)

    loaded, layouts = 0.0, []
    for layout in LAYOUTS:
        try:
            plan = make_plan(parplan, folder, folder / "saved", layout, 0)
        except RuntimeError as error:  # these heads cannot be cut
            if layout is LAYOUTS[0] or len(layouts) > 1:
                raise error
            continue
        shutil.rmtree(folder / "exported", ignore_errors=True)
        loaded = max(loaded, relative(run(parplan, folder, plan, STEPS, "--export-weights", folder / "exported"),
                                      expected))
        layouts.append(layout)
        if len(layouts) == 2:
            break
    exported = 0.0
    again = load(folder / "exported", config).state_dict()
    for name, value in model.state_dict().items():
        exported = max(exported, (again[name] - value).abs().max().item())

    logits = 0.0
    if not is_masked(config) and not is_t5(config):
        expected_logits = logits_of(model, tokens[:SEQUENCE])
        found_logits = logits_of_parplan(parplan, folder, ["--dp", "1", *layouts[-1][2:6]], tokens[:SEQUENCE],
                                         config.vocab_size)
        logits = numpy.abs(found_logits - (expected_logits - expected_logits[0])).max() / numpy.ptp(expected_logits)

    plan = make_plan(parplan, folder, folder / "saved", layouts[-1], 1e-3)
    continued = run(parplan, folder, plan, STEPS)
    shutil.rmtree(folder / "exported")
    run(parplan, folder, plan, STEPS - 1, "--export-weights", folder / "exported")
    trained = relative(losses_of(load(folder / "exported", config), tokens)[-1:], continued[-1:])
    shutil.rmtree(folder / "exported")
    plan = make_plan(parplan, folder, folder / "saved", layouts[-1], 0)
    call(parplan, "run", plan, "--steps", STEPS, "--data", folder / "tokens.bin", "--quiet", "--json",
         folder / "run.json", "--export-weights", folder / "exported")
    found = json.loads((folder / "exported" / "config.json").read_text())["model_type"]
    alone = relative(losses_of(load(folder / "exported", config), tokens),
                     json.loads((folder / "run.json").read_text())["loss"])
    ok = max(loaded, trained, alone) <= LOSS_BOUND and logits <= LOGIT_BOUND and exported <= (
        NORM_BOUND if config.model_type.startswith("gemma") else 0.0)
    bits = "equal" if exported == 0 else f"{exported:.1e}"
    of_logits = "" if is_masked(config) or is_t5(config) else f" {logits:.1e}"
    print(f"| {case.stem} |{of_logits} | {loaded:.1e} | {bits} | {trained:.1e} | {alone:.1e} | {found} |"
          f"{'' if ok else '  FAILED'}", flush=True)
    return ok


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    good = True
    wanted = sys.argv[2:]
    print("| model | logits | loaded | exported | trained | alone | type |\n|---|---|---|---|---|---|---|")
    for number, case in enumerate(sorted(FAMILIES.glob("*.json"))):
        if wanted and case.stem not in wanted:
            continue
        if case.stem == "t5-v1.1":  # transformers 5 ties its head, which the published weights do not
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                good &= check(sys.argv[1], case, number, pathlib.Path(folder))
            except Exception as error:
                print(f"| {case.stem} | {type(error).__name__}: {error}")
                good = False
    sys.exit(0 if good else 1)
