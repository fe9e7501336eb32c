#!/usr/bin/env python3
"""How near decoding comes to the speed of the memory, and how that compares with transformers in the same call.

    python scripts/bench.py --model REF [--against transformers] [--prompt-tokens 32,512] [--new-tokens 64]
        [--exact] [--quantize int8,int4] [--batch 1] [--device cpu] [--runs 3] [--json] [--plot FILE.png]

One new token reads every weight once, so weight bytes / read bandwidth is the least time that a step can take. The bandwidth is
that of the quickest of several ways to read eight times what the caches hold, and it is measured in every round, before the
sides take their turns, because machines drift. Every run is a process of its own; medians over the rounds are printed. Peak
memory is resident memory, file-backed pages included, above what the process held once everything was imported; on a GPU, what
its allocator held.
`process_to_first_token_s` is what somebody waits who starts the program. Linux only (it reads /proc).
"""

import argparse
import json
import statistics
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from time import perf_counter, time
from typing import Any

REFERENCE = "transformers"
# What the sides would import on the way, so that it counts neither as loading nor as memory.
MODULES = {
    True: ["transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen3.modeling_qwen3"],
    False: ["qwen_scratch.completion", "qwen_scratch.fast", "qwen_scratch.loading"],
}


def status(key: str, file: str = "/proc/self/status") -> int:
    """A field of /proc/self/status, in bytes."""
    with open(file) as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def cache_bytes() -> int:
    """The largest cache that this CPU shows."""
    sizes = [file.read_text().strip() for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes), default=2**25)


def bandwidth(device: str, passes: int = 5) -> float:
    """How fast this process reads memory, in GB/s: the quickest of sums, maxima, dot products and one-row products."""
    import torch

    size = min(max(8 * cache_bytes(), 2**30), status("MemAvailable", "/proc/meminfo") // 3)
    numbers = torch.ones(size // 2**14 * 2**12, device=device)
    matrix = numbers.view(torch.bfloat16).view(-1, 4096)  # the same bytes
    row = torch.ones(1, 4096, dtype=torch.bfloat16, device=device)
    ways = [
        numbers.sum,
        numbers.max,
        lambda: numbers.dot(numbers),
        lambda: torch.nn.functional.linear(row, matrix),
    ]
    speeds = []
    for way in ways:
        times = []
        for _ in range(passes):
            wait(device)
            start = perf_counter()
            way()
            wait(device)
            times.append(perf_counter() - start)
        speeds.append(numbers.nbytes / statistics.median(times))
    return max(speeds) / 1e9


def wait(device: str) -> None:
    """Until the device has done what it was told; a CPU always has."""
    import torch

    if device != "cpu":
        torch.cuda.synchronize(device)


def peak_bytes(device: str, baseline: int) -> int:
    import torch

    return status("VmHWM") - baseline if device == "cpu" else torch.cuda.max_memory_allocated(device)


def measure(side: str, args: argparse.Namespace) -> dict[str, Any]:
    """One run in this process: `side` is transformers, exact, fast, int8, int4 or int4-128."""
    import torch

    if side == REFERENCE:
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    else:
        import qwen_scratch
    for module in MODULES[side == REFERENCE]:
        import_module(module)
    quantize = side if side.startswith("int") else None
    torch.nn.functional.linear(torch.ones(1, 64), torch.ones(64, 64))  # start the thread pool
    baseline = status("VmRSS")

    start = perf_counter()
    model: Any
    if side == REFERENCE:
        model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
        model = model.to(args.device)
    else:
        model = qwen_scratch.load_model(args.model, args.device, args.dtype, exact=side == "exact", quantize=quantize)
    wait(args.device)
    load_s = perf_counter() - start

    def generate(prompt: int, new: int) -> float:
        ids = torch.randint(
            0, model.config.vocab_size, (args.batch, prompt), generator=torch.Generator().manual_seed(0)
        )
        start = perf_counter()
        if side == REFERENCE:
            options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
            ids = ids.to(args.device)
            made = model.generate(ids, attention_mask=torch.ones_like(ids), **options).shape[1] - prompt
        else:
            params = qwen_scratch.SamplingParams(max_new_tokens=new, temperature=0, ignore_eos=True)
            results = qwen_scratch.complete_batch(model, None, ids.tolist(), params)
            made = len(results[-1].token_ids)
        wait(args.device)
        assert made == new
        return perf_counter() - start

    first_s = generate(args.prompt_tokens[0], 1)
    result: dict[str, Any] = {
        "load_s": load_s,
        "load_and_first_token_s": load_s + first_s,
        "process_to_first_token_s": time() - args.started,
        "cases": {},
    }
    generate(args.prompt_tokens[0], args.new_tokens)
    result["peak_mib"] = peak_bytes(args.device, baseline) / 2**20
    for prompt in args.prompt_tokens:
        generate(prompt, 2)
        prefill_s = min(generate(prompt, 1) for _ in range(2))
        decode_s = generate(prompt, args.new_tokens) - prefill_s  # what more tokens take longer is decoding
        speed = args.batch * (args.new_tokens - 1) / decode_s
        result["cases"][prompt] = {"prefill_s": prefill_s, "decode_tokens_per_s": speed}
    result["peak_with_longest_prompt_mib"] = peak_bytes(args.device, baseline) / 2**20
    if side == REFERENCE:
        weights = sum(parameter.nbytes for parameter in model.parameters())
    else:
        weights = qwen_scratch.fast.weight_bytes(model)
    return result | {"weights_mib": weights / 2**20, "threads": torch.get_num_threads()}


def in_own_process(side: str) -> dict[str, Any]:
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", side, "--started", str(time())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{side} failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def summarize(runs: list[dict[str, Any]], gbs: float, batch: int) -> dict[str, Any]:
    """Medians over the runs of one side, with the achieved GB/s and the share of the limit per case."""
    whole = {key: statistics.median(run[key] for run in runs) for key in runs[0] if key != "cases"}
    cases = {}
    for prompt in runs[0]["cases"]:
        case = {k: statistics.median(run["cases"][prompt][k] for run in runs) for k in runs[0]["cases"][prompt]}
        case["gb_per_s"] = case["decode_tokens_per_s"] / batch * whole["weights_mib"] * 2**20 / 1e9
        case["share_of_limit"] = case["gb_per_s"] / gbs
        cases[prompt] = case
    return whole | {"peak_of_weights": whole["peak_mib"] / whole["weights_mib"], "cases": cases}


def table(summary: dict[str, Any]) -> str:
    sides = list(summary)
    lines = [f"{'':30}" + "".join(f"{side:>14}" for side in sides)]

    def row(name: str, values: list[float], digits: int, ratios: bool) -> None:
        cells = ""
        for side, value in zip(sides, values, strict=True):
            ratio = f" {value / values[0]:5.2f}x" if ratios and REFERENCE in summary and side != REFERENCE else ""
            cells += f"{f'{value:,.{digits}f}{ratio}':>14}"
        lines.append(f"{name:30}" + cells)

    for key in (
        "load_s", "load_and_first_token_s", "process_to_first_token_s", "peak_mib", "peak_with_longest_prompt_mib",
        "weights_mib", "peak_of_weights",
    ):  # fmt: skip
        row(key, [summary[side][key] for side in sides], 0 if "mib" in key else 2, key.endswith("_s"))
    for prompt in summary[sides[0]]["cases"]:
        lines.append(f"after {prompt} prompt tokens")
        for key in ("prefill_s", "decode_tokens_per_s", "gb_per_s", "share_of_limit"):
            values = [summary[side]["cases"][prompt][key] for side in sides]
            row(f"  {key}", values, 3 if key == "prefill_s" else 2 if "share" in key else 1, key.endswith("_s"))
    return "\n".join(lines)


def plot(file: Path, summary: dict[str, Any], title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    prompts = list(next(iter(summary.values()))["cases"])
    width = 0.8 / len(prompts)
    for n, prompt in enumerate(prompts):
        speeds = [side["cases"][prompt]["decode_tokens_per_s"] for side in summary.values()]
        bars = axes.bar([x + n * width for x in range(len(summary))], speeds, width, label=f"after {prompt} tokens")
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
    axes.set_xticks([x + (len(prompts) - 1) * width / 2 for x in range(len(summary))], list(summary))
    axes.set(ylabel="tokens/s", title=title)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=120)


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a checkpoint folder")
    parser.add_argument("--against", choices=[REFERENCE])
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--exact", action="store_true", help="measure the exact path too")
    parser.add_argument(
        "--quantize", type=lambda text: text.split(","), default=[], help="int8, int4, int4-128, by commas"
    )
    parser.add_argument("--prompt-tokens", type=numbers, default=[32, 512])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line that otherwise comes last")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the decoding speeds (extra: plot)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker and args.threads:
        import torch

        torch.set_num_threads(args.threads)
    if args.worker == "bandwidth":
        print(bandwidth(args.device))
        return
    if args.worker:
        print(json.dumps(measure(args.worker, args)))
        return

    import torch

    sides = [REFERENCE] * bool(args.against) + ["exact"] * args.exact + ["fast", *args.quantize]
    speeds = []
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    in_own_process(sides[0])  # warms the file cache
    for _ in range(args.runs):
        speeds.append(float(in_own_process("bandwidth")))
        for side in sides:
            runs[side].append(in_own_process(side))
    gbs = statistics.median(speeds)
    summary = {side: summarize(runs[side], gbs, args.batch) for side in sides}
    threads = args.threads or torch.get_num_threads()
    title = (
        f"{args.model}, {args.device}, {args.dtype}, batch {args.batch}, {threads} threads, torch {torch.__version__}"
    )
    if not args.json:
        print(f"{title}, medians of {args.runs} runs, memory read at {gbs:.1f} GB/s")
        print(table(summary))
    if args.plot:
        plot(args.plot, summary, title)
    print(json.dumps({"title": title, "bandwidth_gb_per_s": gbs, **summary}))


if __name__ == "__main__":
    main()
