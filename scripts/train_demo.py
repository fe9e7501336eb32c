#!/usr/bin/env python3
"""Make the demo checkpoint from nothing: data, tokenizer, training, files, evaluation, model card.

    python scripts/train_demo.py weights/qwen3-demo

A run that was broken off goes on from its last checkpoint, FOLDER.training.pt, when it is started again in the same way.
Needs the extra `plot`, for the picture of the loss.
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from demo_data import Example, examples, held_back_in, problems_in
from demo_eval import evaluate, table
from demo_files import TOKENIZER_TEXTS, train_tokenizer, write_small_files, write_weights
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

import qwen_scratch
from qwen_scratch.config import QwenConfig
from qwen_scratch.model import Qwen
from qwen_scratch.text import Tokenizer

NOT_OF_THE_RUN = ("folder", "problems", "save_every", "evaluate", "defaults")  # may differ when a run goes on
IGNORED = -100  # cross_entropy's name for a position without a target


def main() -> None:
    args = parse_args()
    folder: Path = args.folder
    if args.evaluate:
        measure(folder, args.problems)
        return
    if args.problems:
        from demo_card import write_card  # now, because it may lack matplotlib
    prove_held_back(args.seed, args.steps, args.batch)
    sizes = {
        "hidden_size": args.hidden_size,
        "intermediate_size": args.intermediate_size,
        "num_hidden_layers": args.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": args.head_dim,
    }
    config = write_small_files(folder, train_tokenizer(args.seed, args.vocab), sizes)
    tokenizer = Tokenizer(folder)
    model = new_model(QwenConfig.from_dict(config), args.seed)
    print(f"{model.config.num_parameters:,} parameters, {config['vocab_size']} tokens", flush=True)
    losses, wall, cpu = train(model, tokenizer, args)
    write_weights(folder, model)
    if args.problems:
        model, tokenizer, report = measure(folder, args.problems)
        write_card(folder, model, tokenizer, report, losses, args, wall, cpu)
    training_file(folder).unlink()
    print(f"{folder}: {sum(file.stat().st_size for file in folder.iterdir()) / 1e6:.2f} MB", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the checkpoint goes")
    parser.add_argument("--evaluate", action="store_true", help="only measure the checkpoint that is there")
    parser.add_argument(
        "--problems", type=int, default=1000, help="held-back problems of each kind to measure on; 0: none"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument("--batch", type=int, default=64, help="examples per step")
    parser.add_argument(
        "--learning-rate", type=float, default=3e-3, help="the highest; it rises first, then falls as a cosine"
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=160)
    parser.add_argument("--intermediate-size", type=int, default=448)
    parser.add_argument("--head-dim", type=int, default=48)
    parser.add_argument("--vocab", type=int, default=1280)
    parser.add_argument("--save-every", type=int, default=200, help="steps between checkpoints of the training")
    args = parser.parse_args()
    # The model card tells what differs from these.
    args.defaults = {name: parser.get_default(name) for name in vars(args) if name not in ("folder", "evaluate")}
    return args


def prove_held_back(seed: int, steps: int, batch: int) -> None:
    """Read all that the training will see, and stop if a held-back problem is in it, in either order of operands."""
    seen = calculations = 0
    for step, count in tqdm([TOKENIZER_TEXTS, *((n, batch) for n in range(steps))], "check", leave=False, disable=None):
        for example in examples(seed, step, count):
            seen += 1
            calculations += sum(1 for _ in problems_in(example.text))
            if found := held_back_in(example):
                sys.exit(f"step {step} gives away {found[0].text}, which is held back: {example}")
    print(f"{seen:,} examples, {calculations:,} calculations written out, none of them held back", flush=True)


def new_model(config: QwenConfig, seed: int) -> Qwen:
    """Random weights: small normal numbers, smaller where a layer adds to the residual stream."""
    model = Qwen(config).requires_grad_()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                adds = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.03 / math.sqrt(2 * config.num_hidden_layers) if adds else 0.03
                parameter.normal_(0, std, generator=generator)
    return model


def train(model: Qwen, tokenizer: Tokenizer, args: argparse.Namespace) -> tuple[list[float], float, float]:
    """Returns the loss of every step, and the seconds that all of them took: by the clock, and of all cores."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.98))
    warmup = min(200, args.steps // 10 + 1)
    state_file = training_file(args.folder)
    settings = {name: value for name, value in vars(args).items() if name not in NOT_OF_THE_RUN}
    losses: list[float] = []
    wall, cpu = -time.perf_counter(), -time.process_time()
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        if state["settings"] != settings:
            sys.exit(f"{state_file} is of a run with other settings, {state['settings']}; repeat them or delete it")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses = state["losses"]
        wall, cpu = wall + state["wall"], cpu + state["cpu"]
        print(f"going on behind step {len(losses)}", flush=True)

    bar = tqdm(range(len(losses), args.steps), initial=len(losses), total=args.steps, desc="training", disable=None)
    for step in bar:
        rate = (step + 1) / warmup if step < warmup else (1 + math.cos(math.pi * step / args.steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * rate
        losses.append(learn(model, batches(tokenizer, examples(args.seed, step, args.batch))))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{losses[-1]:.4f}")
        done = step + 1
        if done % max(1, min(100, args.steps // 10)) == 0:
            recent = losses[-100:] if args.steps >= 1000 else losses[-1:]
            elapsed = wall + time.perf_counter()
            bar.write(f"step {done} loss {sum(recent) / len(recent):.4f} after {elapsed:.0f} s", file=sys.stdout)
            sys.stdout.flush()
        if done % args.save_every == 0 or done == args.steps:
            times = {"wall": wall + time.perf_counter(), "cpu": cpu + time.process_time()}
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
            save_state(state_file, state | times | {"settings": settings})
    return losses, wall + time.perf_counter(), cpu + time.process_time()


def batches(tokenizer: Tokenizer, chosen: list[Example], size: int = 16) -> list[tuple[Tensor, Tensor]]:
    """Examples → input ids and targets, both [size, T]; those of like length together, so that little is padding."""
    rows = []
    for example in chosen:
        thinking = None if example.thinking else False  # as `complete` asks: not set, or off
        prompt = tokenizer.encode(tokenizer.render(example.messages, thinking)) if example.messages else []
        target = tokenizer.encode(example.target)
        ids, targets = prompt + target, [IGNORED] * len(prompt) + target  # only what the model says is learned
        rows.append((torch.tensor(ids[:-1]), torch.tensor(targets[1:])))
    rows.sort(key=lambda row: len(row[0]))
    padded = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        pad = torch.nn.utils.rnn.pad_sequence
        padded.append((pad([row[0] for row in part], True), pad([row[1] for row in part], True, IGNORED)))
    return padded


def learn(model: Qwen, parts: list[tuple[Tensor, Tensor]]) -> float:
    """Gradients of the mean loss over all targets of a step; returns it."""
    count = sum(int((targets != IGNORED).sum()) for _, targets in parts)
    total = 0.0
    for ids, targets in parts:
        # Products in bfloat16. The plain attention is quicker on short rows, forward and back, than the fused one.
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            logits = model(ids)  # [size, T, V]
        wanted = targets != IGNORED
        loss = F.cross_entropy(logits[wanted].float(), targets[wanted], reduction="sum") / count
        loss.backward()
        total += loss.item()
    return total


def training_file(folder: Path) -> Path:
    """Where a run keeps what it needs to go on; gone once all is written."""
    return folder.with_name(folder.name + ".training.pt")


def save_state(file: Path, state: dict[str, Any]) -> None:
    """Written beside and renamed: an interruption leaves the old one or the new one, never half of one."""
    fresh = file.with_suffix(".part")
    torch.save(state, fresh)
    os.replace(fresh, file)


def measure(folder: Path, problems: int) -> tuple[Qwen, Tokenizer, dict[str, Any]]:
    """The checkpoint as it is stored, computing in float32, and how often it is right."""
    model, tokenizer = qwen_scratch.load(folder, device="cpu", dtype="float32")
    report = evaluate(model, tokenizer, problems)
    print(table(report))
    for language, (refused, asked) in report["strange"].items():
        print(f"questions of other kinds, declined as they should be: {refused} of {asked} ({language})")
    return model, tokenizer, report


if __name__ == "__main__":
    main()
