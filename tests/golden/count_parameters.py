#!/usr/bin/env python3
"""Counts the parameters of every tests/data/huggingface/*/config.json as transformers builds them.

This is for developers; the tests need no Python. It needs transformers and PyTorch (the counts in
tests/models/huggingface_test.cpp are of 5.23 or 5.24, and 2.15) and takes no memory: models are built on the meta
device.

    python3 tests/golden/count_parameters.py [NAME]

With a NAME it prints that model's parameters with their shapes, those of the first layer only.
"""

import pathlib
import re
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

folder = pathlib.Path(__file__).resolve().parent.parent / "data" / "huggingface"
for path in sorted(folder.iterdir()):
    if not path.is_dir() or (len(sys.argv) > 1 and path.name != sys.argv[1]):
        continue
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        masked = config.model_type in ("bert", "roberta")
        model = (AutoModelForMaskedLM if masked else AutoModelForCausalLM).from_config(config)
    model.tie_weights()
    if len(sys.argv) > 1:
        for name, parameter in model.named_parameters():
            if not re.search(r"\.[1-9]\d*\.", name):
                print(name, tuple(parameter.shape))
    print(f"{path.name:28} {sum(parameter.numel() for parameter in model.parameters()):>16,}")
