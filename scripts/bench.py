#!/usr/bin/env python3
"""Time and memory of loading, first token and decoding, against transformers in the same call.

    python scripts/bench.py --model FOLDER [--against transformers] [--dtype bfloat16 float32] [--runs 5]

Every run is a process of its own; the two sides alternate, because machines drift; medians are printed. Load, first
token and decoding are timed apart. Peak memory is resident memory, file-backed pages included, above what the process
held once everything was imported. Linux only (it reads /proc).
"""

import argparse
import json
import statistics
import subprocess
import sys
from time import perf_counter
from typing import Any

SIDES = ("ours", "transformers")


def status(key: str) -> int:
    """A field of /proc/self/status, in bytes."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def measure(side: str, args: argparse.Namespace, dtype: str) -> dict[str, float]:
    """One run in this process."""
    import torch

    if args.threads:
        torch.set_num_threads(args.threads)
    if side == "ours":
        import qwen_scratch.completion
        import qwen_scratch.loading
    else:
        import transformers
        import transformers.models.qwen2.modeling_qwen2
        import transformers.models.qwen3.modeling_qwen3

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    torch.nn.functional.linear(torch.ones(1, 64), torch.ones(64, 64))  # start the thread pool
    baseline = status("VmRSS")

    start = perf_counter()
    if side == "ours":
        model = qwen_scratch.load_model(args.model, device="cpu", dtype=dtype, exact=True)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, dtype))
    load_s = perf_counter() - start
    ids = torch.randint(0, model.config.vocab_size, (1, args.prompt_tokens), generator=torch.Generator().manual_seed(0))

    def generate(new: int) -> float:
        start = perf_counter()
        if side == "ours":
            params = qwen_scratch.SamplingParams(max_new_tokens=new, temperature=0, ignore_eos=True)
            made = len(qwen_scratch.complete(model, None, ids[0].tolist(), params).token_ids)
        else:
            mask = torch.ones_like(ids)
            options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
            made = model.generate(ids, attention_mask=mask, **options).shape[1] - ids.shape[1]
        assert made == new
        return perf_counter() - start

    first_s = generate(1)
    peak = status("VmHWM") - baseline
    again_s = generate(1)  # pages are warm now; what more tokens take longer is decoding
    decode_s = generate(args.new_tokens) - again_s
    return {
        "load_s": load_s,
        "first_token_s": first_s,
        "load_and_first_token_s": load_s + first_s,
        "prefill_s": again_s,
        "decode_tokens_per_s": (args.new_tokens - 1) / decode_s,
        "peak_mib": peak / 2**20,
        "weights_mib": sum(p.nbytes for p in model.parameters()) / 2**20,
    }


def in_own_process(side: str, dtype: str) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", side, dtype]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a checkpoint folder")
    parser.add_argument("--against", choices=["transformers"])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        side, dtype = args.worker
        print(json.dumps(measure(side, args, dtype)))
        return

    import torch

    sides = SIDES if args.against else SIDES[:1]
    print(
        f"{args.model}, {args.threads or torch.get_num_threads()} threads, torch {torch.__version__}, {args.runs} runs"
    )
    summary: dict[str, Any] = {}
    for dtype in args.dtype:
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for n in range(args.runs + 1):
            for side in sides:
                result = in_own_process(side, dtype)
                if n > 0:  # the first round only warms the file cache
                    runs[side].append(result)
        medians = {
            side: {key: statistics.median(r[key] for r in runs[side]) for key in runs[side][0]} for side in sides
        }
        summary[dtype] = medians
        print(f"\n{dtype:24}" + "".join(f"{side:>14}" for side in sides) + (f"{'ratio':>10}" if args.against else ""))
        for key in medians["ours"]:
            values = [medians[side][key] for side in sides]
            ratio = f"{values[0] / values[1]:10.2f}" if args.against else ""
            print(f"{key:24}" + "".join(f"{value:14.2f}" for value in values) + ratio)
        print(f"peak / weights          {medians['ours']['peak_mib'] / medians['ours']['weights_mib']:14.3f}")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
