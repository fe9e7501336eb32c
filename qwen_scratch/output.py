"""What a command prints: the answer as it streams, the lines around it, and the result as JSON."""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from qwen_scratch.cli import ANSWERED, INTERRUPTED
from qwen_scratch.completion import Completion, Stream
from qwen_scratch.fast import weight_bytes
from qwen_scratch.model import Qwen
from qwen_scratch.source import Source
from qwen_scratch.template import parse_tool_calls
from qwen_scratch.text import Tokenizer

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def dimmed(text: str) -> str:
    """For stderr: set back where it is a terminal."""
    return f"{DIM}{text}{PLAIN}" if sys.stderr.isatty() else text


@contextmanager
def interrupts_raised() -> Iterator[None]:
    """Inside, Ctrl-C is a KeyboardInterrupt, so that the caller can keep what there is."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def print_stream(running: Stream, show_thinking: bool) -> int:
    """The answer goes to stdout as it comes, thinking to stderr, dimmed on a terminal. Returns the exit code."""
    last = "answer"

    def show(kind: str, text: str) -> None:
        nonlocal last
        if kind != last and show_thinking and last == "thinking":
            print(file=sys.stderr, flush=True)
        last = kind
        if kind == "answer":
            print(text, end="", flush=True)
        elif text and show_thinking:
            print(dimmed(text), end="", file=sys.stderr, flush=True)

    try:
        with interrupts_raised():
            for event in running:
                show(event.kind, event.text)
        code = ANSWERED
    except KeyboardInterrupt:
        for event in running.interrupt():
            show(event.kind, event.text)
        code = INTERRUPTED
    if last == "thinking" and show_thinking:
        print(file=sys.stderr)
    print(flush=True)
    return code


def drain(running: Stream) -> int:
    """Read a stream to its end without printing."""
    try:
        with interrupts_raised():
            for _ in running:
                pass
        return ANSWERED
    except KeyboardInterrupt:
        running.interrupt()
        return INTERRUPTED


def model_line(source: Source, model: Qwen, kv_cache_bytes: int | None = None) -> str:
    quantize = getattr(model, "quantize", None)
    yarn = f"YaRN x{model.config.yarn.factor:g} (on for every length), " if model.config.yarn else ""
    return (
        f"{source}: {model.config.model_type}, {model.config.num_parameters:,} parameters, {yarn}"
        f"{dtype_name(model)} on {model.device}, weights {mib(weight_bytes(model))} MiB"
        + (f" in {quantize}" if quantize else "")
        + (f", KV cache {mib(kv_cache_bytes)} MiB" if kv_cache_bytes is not None else "")
    )


def sampling_line(sampling: dict[str, Any]) -> str:
    return "sampling: " + ", ".join(f"{name} {value}" for name, value in sampling.items() if value is not None)


def speed_line(result: Completion) -> str:
    speed = result.decode_tokens_per_s
    still_thinking = result.stop_reason == "length" and result.thinking and not result.text
    return (
        f"{len(result.prompt_ids)} prompt tokens"
        + (f" ({result.reused_tokens} reused)" if result.reused_tokens else "")
        + f", first token after {result.ttft_s:.2f} s, "
        f"{len(result.token_ids)} new tokens"
        + (f" at {speed:.1f} tokens/s" if speed else "")
        + f", stopped by {result.stop_reason}"
        + (" while still thinking: raise --max-new-tokens" if still_thinking else "")
    )


def result_json(
    source: Source, prompt: Any, model: Qwen, tokenizer: Tokenizer, result: Completion, load_s: float
) -> str:
    """The machine-readable result, one JSON object."""
    fields: dict[str, Any] = {
        "model": source.ref,
        "revision": source.revision,
        "device": str(model.device),
        "dtype": dtype_name(model),
        "quantize": getattr(model, "quantize", None),
        "prompt": prompt,
        "rendered_prompt": result.rendered_prompt,
        "input_ids": result.prompt_ids,
        "prompt_tokens": len(result.prompt_ids),
        "generated_token_ids": result.token_ids,
        "generated_tokens": len(result.token_ids),
        "generated_text": result.text,
        "thinking_text": result.thinking,
        "tool_calls": parse_tool_calls(result.text),
        "stop_reason": result.stop_reason,
        "eos_token_ids": result.eos_token_ids,
        "sampling": result.sampling,
        "first_token_top": [
            {"token_id": i, "text": tokenizer.label(i), "logit": logit, "prob": prob}
            for i, logit, prob in result.request.first_top
        ],
        "notices": result.notices,
        "load_s": load_s,
        "ttft_s": result.ttft_s,
        "decode_tokens_per_s": result.decode_tokens_per_s,
        "kv_cache_mib": result.kv_cache_bytes / 2**20,
        "peak_memory_mib": peak_memory_mib(model),
    }
    if result.request.logprobs is not None:
        fields["logprobs"] = [
            {
                "token_id": token_id,
                "text": tokenizer.label(token_id),
                "logprob": logprob,
                "top": [{"token_id": i, "text": tokenizer.label(i), "logprob": value} for i, value in top],
            }
            for token_id, logprob, top in result.logprobs
        ]
    readable = "utf" in (sys.stdout.encoding or "").lower()  # elsewhere a character that it lacks would be lost
    return json.dumps(fields, ensure_ascii=not readable)


def peak_memory_mib(model: Qwen) -> float | None:
    """The most memory this process held: the GPU's allocator there, else resident pages; None where unknown."""
    if model.device.type == "cuda":
        return torch.cuda.max_memory_allocated(model.device) / 2**20
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # bytes there, KiB elsewhere


def dtype_name(model: Qwen) -> str:
    return str(model.dtype).removeprefix("torch.")


def mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"
