"""The model card of the demo checkpoint, with the figures of the run that made it."""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from demo_data import SHARES
from demo_eval import table
from matplotlib.figure import Figure

from qwen_scratch import SamplingParams, complete
from qwen_scratch.model import Qwen
from qwen_scratch.text import Tokenizer

SHOWN = ["What is 347 + 586?", "12 - 345 等于多少？", "Tell me a story about a fox."]


def write_card(
    folder: Path, model: Qwen, tokenizer: Tokenizer, report: dict[str, Any], losses: list[float], args: argparse.Namespace,
    wall: float, cpu: float,
) -> None:  # fmt: skip
    """`wall` and `cpu`: seconds of the training."""
    draw_losses(folder / "loss.png", losses)
    config = model.config
    refused = ", ".join(
        f"{count} of {asked} in {name}"
        for name, (count, asked) in zip(("English", "Chinese"), report["strange"].values(), strict=True)
    )
    shares = ", ".join(f"{kind} {share}" for kind, share in SHARES.items())
    options = "".join(f" --{name.replace('_', '-')} {value}" for name, value in changed(args).items())
    shown = "\n".join(example(model, tokenizer, question) for question in SHOWN)
    size = sum(file.stat().st_size for file in folder.iterdir() if file.name != "README.md") / 1e6
    (folder / "README.md").write_text(f"""\
---
license: apache-2.0
language: [en, zh]
pipeline_tag: text-generation
---

# qwen3-demo

A Qwen3 of {config.num_parameters / 1e6:.2f} million parameters that calculates and tells small stories, in English
and Chinese. It was trained from nothing with `qwen_scratch`'s own model class, and is made to be looked at: every part
of a large Qwen3 is here in small.

| | |
|---|---|
| layers | {config.num_hidden_layers} |
| hidden size, MLP width | {config.hidden_size}, {config.intermediate_size} |
| query heads, key/value heads, head size | {config.num_attention_heads}, {config.num_key_value_heads}, {config.head_dim} |
| vocabulary | {config.vocab_size}, byte-level BPE with Qwen's pattern: each digit is a token |
| stored as | bfloat16, two shards, {size:.1f} MB with all files |

## What it does

Greedy, in float32; in bfloat16 the calculations are the same, and a story may take another turn.

{shown}
## How often it is right

Greedy, float32, on problems that the training never held, in either order of operands, asked in many ways; the whole
answer must be right.

{table(report)}

With thinking the model writes out digits, carries and partial products, and each step is easy. Without, it must see the
whole result at once.

Questions of other kinds, written by hand and not from the frames of the training data, it declined: {refused}.

## What it cannot do

Everything else. No knowledge, no conversation, no code, no translation; no division, no numbers of four digits, no
products of three-digit numbers, no numbers in words. It says so, mostly; a chain such as 1 + 2 + 3 it takes for a shorter
one. It calls no tools, and a system turn changes nothing. Its stories come from a grammar of a few plots, so they are
alike, and their heroes are seldom the ones asked for, or even the ones thought of. It was trained on texts of up to about
270 tokens; more than two questions in a row are strange to it.

## Data

{args.steps * args.batch:,} examples, made by the scripts from seed {args.seed},
in these shares: {shares}. Half is English, half
Chinese. A quarter of the calculations and two fifths of the rest are answered without thinking.
1,000 problems of each kind are held back; before it starts, the script reads all examples and stops if one of these is
in them.

## Training

    python scripts/train_demo.py weights/qwen3-demo{options}

{args.steps:,} steps of {args.batch} examples, AdamW, cosine schedule from {args.learning_rate:g}, products in bfloat16:
{wall / 60:.0f} minutes, {cpu / 60:.0f} minutes of CPU time ({os.cpu_count()} cores, torch {torch.__version__.split("+")[0]}).

![loss](loss.png)

## Licence

Apache-2.0, as the rest of the repository.
""")


def changed(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were not left as they are."""
    return {name: getattr(args, name) for name, value in args.defaults.items() if getattr(args, name) != value}


def example(model: Qwen, tokenizer: Tokenizer, question: str) -> str:
    result = complete(model, tokenizer, question, SamplingParams(temperature=0))
    return f"> {question}\n\n```\n<think>\n{result.thinking}\n</think>\n\n{result.text}\n```\n"


def draw_losses(file: Path, losses: list[float]) -> None:
    width = max(1, len(losses) // 100)
    means = [sum(losses[n : n + width]) / width for n in range(0, len(losses) - width + 1, width)]
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot([width * (n + 1) for n in range(len(means))], means, color="tab:blue")
    axes.set(xlabel="step", ylabel="loss, nats per token", yscale="log")
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=100)
