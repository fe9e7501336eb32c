#!/usr/bin/env python3
"""What quantisation costs: perplexity and next-token distributions on a text, for each way to hold the weights.

    python scripts/quality.py --model REF --text FILE [--tokens 4096] [--window 512] [--dtype bfloat16] [--json]

The text is cut into windows, each read as a prompt of its own; every position but a window's last predicts its next token.
Perplexity is exp of the mean negative log-likelihood. KL is the mean divergence, in nats, of a side's distribution from that of
the exact path in the same dtype; top-1 is how often both find the same token likeliest.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch

import qwen_scratch

SIDES: dict[str, dict[str, Any]] = {
    "exact": {"exact": True},
    "fast": {},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "int4-128": {"quantize": "int4-128"},
}


@torch.inference_mode()
def log_probabilities(model: Any, windows: list[list[int]]) -> list[torch.Tensor]:
    """Per window [T, V], of the token after each position."""
    return [model(torch.tensor([ids]))[0].float().log_softmax(-1) for ids in windows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    results: dict[str, dict[str, float]] = {}
    expected: list[torch.Tensor] = []
    for side, how in SIDES.items():
        model, tokenizer = qwen_scratch.load(args.model, "cpu", args.dtype, **how)
        ids = tokenizer.encode(args.text.read_text(encoding="utf-8"))[: args.tokens]
        windows = [ids[start : start + args.window] for start in range(0, len(ids) - 1, args.window)]
        found = log_probabilities(model, windows)
        expected = expected or found
        likelihood = [window[range(len(ids) - 1), ids[1:]].double() for window, ids in zip(found, windows, strict=True)]
        divergence = [(p.exp() * (p - q)).sum(-1).double() for p, q in zip(expected, found, strict=True)]
        same = [(p.argmax(-1) == q.argmax(-1)).double() for p, q in zip(expected, found, strict=True)]
        results[side] = {
            "perplexity": math.exp(-float(torch.cat(likelihood).mean())),
            "mean_kl": float(torch.cat(divergence).mean()),
            "top1": float(torch.cat(same).mean()),
            "predicted_tokens": sum(map(len, likelihood)),
        }
        if not args.json:
            print(f"{side:9}" + ", ".join(f"{key} {value:.4g}" for key, value in results[side].items()), flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
