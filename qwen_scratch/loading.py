"""A checkpoint → a model that is ready to run, and its tokenizer."""

import math
import warnings
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qwen_scratch.captured import CapturedQwen
from qwen_scratch.checkpoint import head_rows, load_weights, open_checkpoint, settle_head
from qwen_scratch.config import QwenConfig, read_dtype
from qwen_scratch.errors import InputError, is_out_of_memory
from qwen_scratch.fast import FastQwen, accelerate
from qwen_scratch.kinds import choose_linears
from qwen_scratch.model import Attention, Qwen
from qwen_scratch.source import find
from qwen_scratch.text import Tokenizer


def load(
    ref: str | Path | None = None,
    device: torch.device | str = "auto",
    dtype: torch.dtype | str = "auto",
    revision: str | None = None,
    exact: bool = False,
    quantize: str | None = None,
    *,
    progress: bool = False,
) -> tuple[Qwen, Tokenizer]:
    """Load a checkpoint: the model and its tokenizer.

    Args:
        ref: a folder as a hub snapshot has it, or a hub id; None: the bundled demo. See `source.find`.
        device: "cpu", "cuda", "cuda:1", "mps", or "auto": the best that is there.
        dtype: "float32", "bfloat16", "float16" or a torch.dtype; "auto": see `choose_dtype`.
        revision: a branch, tag or commit, where the checkpoint comes from the hub.
        exact: the path that equals the reference bit for bit, and that is in model.py as it is read. By default a quicker one
            that is close to it (fast.py on a CPU, captured.py on a GPU).
        quantize: "int8", "int4" or "int4-128": hold the weights in fewer bits, made while loading (see quantized.py).
        progress: show a bar on stderr where loading takes more than a second.

    Raises:
        InputError: the checkpoint, device, dtype or quantisation cannot be used; the message says why.
        RuntimeError, OSError: a download or the reading failed.
    """
    folder = find(ref, revision).folder
    return load_model(folder, device, dtype, exact=exact, quantize=quantize, progress=progress), Tokenizer(folder)


def load_model(
    ref: str | Path | None = None,
    device: torch.device | str = "auto",
    dtype: torch.dtype | str = "auto",
    revision: str | None = None,
    exact: bool = False,
    quantize: str | None = None,
    *,
    progress: bool = False,
) -> Qwen:
    """As `load`, for a checkpoint that has no tokenizer."""
    if exact and quantize:
        raise InputError("exact and quantize exclude each other: quantised weights are not the checkpoint's")
    device = choose_device(device)
    checkpoint = settle_head(open_checkpoint(find(ref, revision).folder))
    dtype = choose_dtype(dtype, checkpoint.dtype, device)
    kinds = None if exact else choose_linears(quantize, device, dtype, checkpoint.widest)
    config = checkpoint.config
    need = config.num_parameters * (kinds.held_bytes if kinds else dtype.itemsize)
    if kinds and need > 0.9 * available_memory():
        if quantize:
            raise InputError(
                f"the weights take {need / 2**20:,.0f} MiB in {quantize}, which is more than the free memory"
            )
        warnings.warn(
            f"the {need / 2**20:,.0f} MiB of weights do not fit into memory packed: the exact path, from the mapped file",
            stacklevel=2,
        )
        kinds = None
    model = shapes_only(config, FastQwen if kinds else Qwen if exact or device.type != "cuda" else CapturedQwen)
    try:
        load_weights(model, checkpoint, device, None if kinds else dtype, progress, to_be_copied=kinds is not None)
        if kinds and isinstance(model, FastQwen):
            model.quantize = quantize
            accelerate(model, head_rows(checkpoint), kinds, dtype, progress)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise RuntimeError(
            f"out of memory on {device}: the weights need {need / 2**20:,.0f} MiB in {str(dtype).removeprefix('torch.')}; "
            "a smaller --dtype or another --device may do"
        ) from None
    model.generation_config = checkpoint.generation_config
    if device.type == "mps":
        expand_heads(model)
    return model.eval()


def shapes_only(config: QwenConfig, kind: type[Qwen] = Qwen) -> Qwen:
    """A model that takes no memory and draws no random numbers, to be filled or only looked at."""
    with torch.device("meta"), NoInit():
        return kind(config)


def available_memory() -> float:
    """Bytes that can be had without pushing others out; only Linux says so in a plain way, elsewhere without limit."""
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return math.inf


def expand_heads(model: Qwen) -> None:
    """Repeat each key/value head for its query heads before attention: Metal's grouped attention gives wrong results."""

    def attend(self: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)  # [B, H, S, hd]
        return Attention.attend(self, q, k, v, mask)

    for block in model.model.layers:
        attention: Any = block.self_attn
        attention.attend = MethodType(attend, attention)


class NoInit(TorchFunctionMode):
    """Leave out the random initialisation of modules; on the meta device it does nothing but import half of torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def choose_device(name: torch.device | str) -> torch.device:
    """A device that exists here; "auto" prefers cuda, then mps, then the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise InputError(f"unknown device {str(name)!r}; use cpu, cuda, cuda:N or mps") from None
    count = {
        "cpu": 1,
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }.get(device.type, 0)
    if (device.index or 0) >= count:
        raise InputError(f"device {str(device)!r} is not available: this torch sees {count} of its kind here; try cpu")
    return device


def choose_dtype(name: torch.dtype | str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype to run in. "auto" is the checkpoint's own, but float32 for bfloat16 on a CPU that has to emulate it."""
    if name != "auto":
        dtype = read_dtype(name)
        if dtype is None:
            raise InputError("dtype must be a name, a torch.dtype or 'auto', not None")
        return dtype
    if stored == torch.bfloat16 and device.type == "cpu" and not cpu_has_bfloat16():
        return torch.float32
    return stored


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 itself (AVX512-BF16, AMX, or Arm's BF16)."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
