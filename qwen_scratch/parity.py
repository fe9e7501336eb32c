"""Compare a checkpoint with the reference, tensor by tensor: `python -m qwen_scratch.parity FOLDER`."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qwen_scratch import cli
from qwen_scratch.cache import KVCache
from qwen_scratch.compare import Way, finite, lockstep
from qwen_scratch.engine import Request, check_ids, run
from qwen_scratch.errors import InputError
from qwen_scratch.loading import choose_device, load_model
from qwen_scratch.model import Qwen
from qwen_scratch.observe import OPS, observe
from qwen_scratch.reference import Reference
from qwen_scratch.sampling import Sampler, SamplingParams
from qwen_scratch.source import find
from qwen_scratch.text import Tokenizer

PROMPT = (
    "def attention(q, k, v):\n    return softmax(q @ k.T / sqrt(d)) @ v\n\n"
    "What does this function do? 请用一句话解释注意力机制。 Naïve café, 12345 🦊🦉."
)
ROWS_ALIKE = 1e-5  # float32 rows of a batch, and float32 off the CPU: share of a row's largest |logit|
KL_ALIKE = (
    5e-3  # half precision where bits are not promised: mean KL divergence of the next-token distribution, in nats
)


def whole_prompt(model: Qwen, reference: Reference, ids: Tensor) -> Way:
    way = Way("whole prompt")
    lockstep(way, model, lambda: model(ids), reference, lambda: reference.logits(ids))
    return way


def warm_cache(model: Qwen, reference: Reference, ids: Tensor, steps: int) -> list[Way]:
    """The prompt in chunks; then, from the same cache cut back, single tokens; then cut back deeper, and once more."""
    T = ids.shape[1]
    cache = KVCache(model.config, 1, T, device=ids.device, dtype=model.dtype)
    reference.cache = None

    def feed(way: Way, piece: Tensor) -> None:
        lockstep(way, model, lambda: model(piece, cache=cache), reference, lambda: reference.feed(piece))

    def cut(n: int) -> None:
        cache.truncate(n)
        reference.truncate(n)

    chunks, single, truncated = Way("chunks"), Way("token by token"), Way("after truncate")
    third = max(1, T // 3)
    for piece in torch.split(ids, third, dim=1):
        feed(chunks, piece)
    start = max(0, T - steps)
    cut(start)
    if start == 0:
        reference.cache = None
    for i in range(start, T):
        feed(single, ids[:, i : i + 1])
    half = T // 2
    if half > 0:
        cut(half)
        feed(truncated, ids[:, half : half + 2])
        for i in range(half + 2, min(half + 4, T)):
            feed(truncated, ids[:, i : i + 1])
    return [way for way in (chunks, single, truncated) if way.ops]  # a single token leaves nothing to truncate


def ragged_batch(model: Qwen, reference: Reference, ids: Tensor, steps: int) -> Way:
    """Three rows of different length in one call, then single tokens: each row against the reference's run of it alone."""
    way = Way("ragged batch")
    T = min(ids.shape[1], 48)
    lengths = [T, T // 2 + 1, T // 5 + 1]
    rows = [ids[0, :n] for n in lengths]
    steps = min(steps, 8)
    cache = KVCache(model.config, len(rows), T + steps, device=ids.device, dtype=model.dtype)
    their_caches: list[Any] = [None] * len(rows)
    seen: dict[tuple[str, int | None], Tensor] = {}
    for step in range(steps + 1):
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # [B, T]
        with torch.inference_mode(), observe(model, lambda op, layer, tensor: seen.update({(op, layer): tensor})):
            logits = model(padded, cache=cache, lengths=[len(row) for row in rows])
        for b, row in enumerate(rows):

            def take(op: str, layer: int | None, theirs: Tensor, b: int = b, n: int = len(row)) -> None:
                ours = seen[op, layer][b : b + 1]
                ours = ours[:, :, :n] if op in ("q_rope", "k_rope") else ours[:, :n]
                way.add(op, layer, ours, theirs)

            reference.cache = their_caches[b]
            with reference.observe(take):
                reference.feed(row[None])
            their_caches[b] = reference.cache
        if step < steps:
            rows = [logits[b, len(row) - 1].argmax(-1)[None] for b, row in enumerate(rows)]
    return way


def greedy_ids(model: Qwen, reference: Reference, ids: list[int], new: int) -> dict[str, Any]:
    """Both loops, from the same prompt ids."""
    sampler = Sampler(SamplingParams(temperature=0, max_new_tokens=new, repetition_penalty=1.0))
    eos = reference.model.generation_config.eos_token_id
    eos = [] if eos is None else [eos] if isinstance(eos, int) else eos
    ours = [token for _, token in run(model, [Request(ids, sampler, new, frozenset(eos))])]
    theirs = reference.generate(ids, new)
    same = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return {"tokens": len(theirs), "equal": ours == theirs, "same_until": same}


def check(model: Qwen, reference: Reference, ids: list[int], steps: int = 16) -> dict[str, Any]:
    """All ways of use on one prompt. Returns the report that the command prints; `ok` says whether the bound holds."""
    check_ids(ids, model.config.vocab_size)
    prompt = torch.tensor([ids], device=model.device)
    ways = [whole_prompt(model, reference, prompt), *warm_cache(model, reference, prompt, steps)]
    ways.append(ragged_batch(model, reference, prompt, steps))
    greedy = greedy_ids(model, reference, ids, steps)
    exact = model.device.type == "cpu"
    wide = model.dtype == torch.float32
    holds = {way.name: bound_holds(way, exact and way.name != "ragged batch", wide) for way in ways}
    holds["greedy"] = greedy["equal"] or not (exact or wide)
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "prompt_tokens": len(ids),
        "layers": model.config.num_hidden_layers,
        "torch": torch.__version__,
        "transformers": reference.version,
        "threads": torch.get_num_threads(),
        "ways": {
            way.name: {
                "equal": way.equal,
                "holds": holds[way.name],
                "first_difference": way.first,
                "mean_kl": finite(way.mean_kl),
                "top1_agreement": way.top1_agreement,
                "ops": {op: way.ops[op].as_json() for op in OPS if op in way.ops},
            }
            for way in ways
        },
        "greedy": greedy,
        "ok": all(holds.values()),
    }


def bound_holds(way: Way, exact: bool, wide: bool) -> bool:
    """Bits where they are promised; else a share of the row's largest logit (float32), or a KL divergence (half)."""
    if exact:
        return way.equal
    if wide:
        return way.ops["logits"].max_rel <= ROWS_ALIKE and way.top1_agreement == 1
    return way.mean_kl <= KL_ALIKE


def table(report: dict[str, Any]) -> str:
    """One row per op, one column per way; "=" where all bits agree, else the largest difference, and in ulps of its row."""
    ways = report["ways"]
    lines = [
        f"{report['dtype']} on {report['device']}, {report['layers']} layers, {report['prompt_tokens']} prompt tokens, "
        f"torch {report['torch']}, transformers {report['transformers']}, {report['threads']} threads",
        f"{'':12}" + "".join(f"{name:>20}" for name in ways),
    ]
    for op in OPS:
        cells = [way["ops"].get(op) for way in ways.values()]
        if any(cells):
            lines.append(f"{op:12}" + "".join(f"{cell_text(cell):>20}" for cell in cells))
    for name, way in ways.items():
        if not way["equal"]:
            lines.append(
                f"{name}: first difference in {way['first_difference']}; logits within "
                f"{number(way['ops']['logits']['max_rel'])} of the row's largest, mean KL {number(way['mean_kl'])}, "
                f"top-1 agreement {way['top1_agreement']:.2%}" + ("" if way["holds"] else "; OUTSIDE THE BOUND")
            )
    greedy = report["greedy"]
    lines.append(
        f"greedy: {greedy['tokens']} tokens, "
        + ("equal" if greedy["equal"] else f"equal only up to token {greedy['same_until']}")
    )
    lines.append("within the stated bounds" if report["ok"] else "OUTSIDE THE STATED BOUNDS")
    return "\n".join(lines)


def cell_text(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    if cell["equal"]:
        return "="
    if cell["max_abs"] is None:
        return "not finite, or shape"
    return f"{cell['max_abs']:.1e} ({cell['max_ulp']:.3g} ulp)"


def number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1e}"


def prompt_ids(folder: str, prompt: str | None, vocab_size: int) -> list[int]:
    """The text's ids, or 64 fixed random ones where the checkpoint has no tokenizer."""
    if prompt is None and not (Path(folder).expanduser() / "tokenizer.json").exists():
        return torch.randint(0, vocab_size, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    return Tokenizer(folder).encode(PROMPT if prompt is None else prompt)


def build_parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="python -m qwen_scratch.parity",
        description="Compare every tensor of every layer with transformers, in every way the model is used.",
        epilog="Exit codes: 0 the stated bound holds, 1 it does not, 2 wrong input. On the CPU the bound is: all bits equal, "
        f"except rows of a ragged batch, which in float32 stay within {ROWS_ALIKE:g} of the row's largest logit and in half "
        f"precision within a mean KL divergence of {KL_ALIKE:g}. Off the CPU these two bounds hold throughout.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "ref", nargs="?", metavar="REF", help="a checkpoint folder or a hub id; default: the bundled demo"
    )
    parser.add_argument(
        "--dtype", help="float32, bfloat16, float16; default: float32 and bfloat16, one after the other"
    )
    parser.add_argument("--device", default="cpu", help="cpu (the default), cuda, cuda:N or mps")
    parser.add_argument("--prompt", metavar="TEXT", help="compare on this text, taken as it is; default: a short one")
    parser.add_argument(
        "--steps", type=int, default=16, metavar="N", help="single-token steps and greedy tokens; default 16"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per dtype instead of the table")
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    if args.steps < 1:
        raise InputError(f"--steps must be at least 1, not {args.steps}")
    device = choose_device(args.device)
    folder = str(find(args.ref).folder)
    ok = True
    for dtype in [args.dtype] if args.dtype else ["float32", "bfloat16"]:
        model = load_model(folder, device=device, dtype=dtype, exact=True)
        ids = prompt_ids(folder, args.prompt, model.config.vocab_size)
        report = check(model, Reference(folder, model.dtype, device), ids, args.steps)
        print(json.dumps(report) if args.json else table(report) + "\n", flush=True)
        ok = ok and report["ok"]
        del model
    return cli.ANSWERED if ok else cli.FAILED


if __name__ == "__main__":
    sys.exit(cli.run_command("parity", main))
