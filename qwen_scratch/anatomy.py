"""A model's body without its weights: every tensor's shape, what the parts weigh, what a token costs. config.json says it all."""

import math
import re
from dataclasses import replace
from typing import Any

import torch

from qwen_scratch.config import DTYPES, QwenConfig
from qwen_scratch.errors import InputError
from qwen_scratch.loading import shapes_only

# hidden_size, intermediate_size, layers, heads, key/value heads, tied head, vocabulary; as the published config.json have them.
QWEN25 = {
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, True, 151936),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, True, 151936),
    "qwen2.5-3b": (2048, 11008, 36, 16, 2, True, 151936),
    "qwen2.5-7b": (3584, 18944, 28, 28, 4, False, 152064),
    "qwen2.5-14b": (5120, 13824, 48, 40, 8, False, 152064),
    "qwen2.5-32b": (5120, 27648, 64, 40, 8, False, 152064),
    "qwen2.5-72b": (8192, 29568, 80, 64, 8, False, 152064),
}
QWEN3 = {
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, True, 151936),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, True, 151936),
    "qwen3-4b": (2560, 9728, 36, 32, 8, True, 151936),
    "qwen3-8b": (4096, 12288, 36, 32, 8, False, 151936),
    "qwen3-14b": (5120, 17408, 40, 40, 8, False, 151936),
    "qwen3-32b": (5120, 25600, 64, 64, 8, False, 151936),
}
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def published(name: str) -> QwenConfig | None:
    """The config of a published size by its name, qwen3-8b say; None if there is none of that name."""
    sizes = (QWEN25 | QWEN3).get(name.lower())
    if sizes is None:
        return None
    hidden, width, layers, heads, kv_heads, tied, vocab = sizes
    is_qwen3 = name.lower() in QWEN3
    return QwenConfig.from_dict(
        {
            "model_type": "qwen3" if is_qwen3 else "qwen2",
            "hidden_size": hidden,
            "intermediate_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 128 if is_qwen3 else hidden // heads,
            "tie_word_embeddings": tied,
            "vocab_size": vocab,
            "max_position_embeddings": 40960 if is_qwen3 else 32768,
            "rope_theta": 1_000_000.0,
            "dtype": "bfloat16",
        }
    )


def anatomy(config: QwenConfig, dtype: torch.dtype, device_memory: int | None = None) -> dict[str, Any]:
    """All there is to know of a shape; sizes in bytes unless a key says otherwise.

    Args:
        dtype: of weights and cache, where one is meant.
        device_memory: bytes for weights and cache; None leaves out what fits.
    """
    L, V, D = config.num_hidden_layers, config.vocab_size, config.hidden_size
    one = shapes_only(replace(config, num_hidden_layers=1)).model.layers[0]
    tensors = {name: list(parameter.shape) for name, parameter in one.named_parameters()}

    def count(*parts: str) -> int:
        return sum(math.prod(shape) for name, shape in tensors.items() if name.startswith(parts))

    head = 0 if config.tie_word_embeddings else V * D
    parameters = {
        "embedding": V * D,
        "attention": L * count("self_attn"),
        "mlp": L * count("mlp"),
        "norms": L * count("input_layernorm", "post_attention_layernorm") + D,
        "head": head,
    }
    total = sum(parameters.values())
    multiplied = (
        total - V * D + (V * D if config.tie_word_embeddings else 0)
    )  # the embedding is looked up; a head is multiplied by
    kv = config.kv_bytes_per_token(dtype)
    S = config.context_length
    report: dict[str, Any] = {
        "model_type": config.model_type,
        "layers": L,
        "dtype": str(dtype).removeprefix("torch."),
        "tensors": {
            "model.embed_tokens.weight": [V, D],
            **{f"model.layers.*.{name}": shape for name, shape in tensors.items()},
            "model.norm.weight": [D],
            **({} if config.tie_word_embeddings else {"lm_head.weight": [V, D]}),
        },
        "tied_head": config.tie_word_embeddings,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "queries_per_kv_head": config.num_attention_heads // config.num_key_value_heads,
        "parameters": parameters | {"total": total},
        "weights": {name: total * kind.itemsize for name, kind in DTYPES.items()},
        "context_length": S,
        "kv_per_token": kv,
        "kv_per_token_if_every_head_had_its_own": kv * config.num_attention_heads // config.num_key_value_heads,
        "kv_at_full_context": kv * S,
        "cache_shape_of_a_layer": [1, config.num_key_value_heads, "S", config.head_dim],
        "read_per_token": total * dtype.itemsize,
        "flops_per_token": 2 * multiplied,
        "attention_flops_per_token_and_position": 4 * L * config.num_attention_heads * config.head_dim,
    }
    if device_memory is not None:
        room = device_memory - total * dtype.itemsize
        report |= {"device_memory": device_memory, "longest_context_that_fits": max(min(room // kv, S), 0)}
    return report


def read_size(text: str) -> int:
    """`24GiB`, `24GB`, `512M` or a number of bytes → bytes; GB too are taken as powers of 2, as memory is sold."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise InputError(f"{text!r} is no size of a memory; write 24GiB, say")
    return int(float(match[1]) * UNITS[match[2].upper()])


def readable(count: int) -> str:
    """Bytes as people read them."""
    power = max((n for n in range(5) if count >= 2 ** (10 * n)), default=0)
    number = f"{count / 2 ** (10 * power):,.2f}".rstrip("0").rstrip(".")
    return f"{number} {['B', 'KiB', 'MiB', 'GiB', 'TiB'][power]}"


def table(name: str, report: dict[str, Any]) -> str:
    lines = [
        f"{name}: {report['model_type']}, {report['layers']} layers, {report['parameters']['total']:,} parameters",
        "",
    ]
    lines.append("tensors (a weight is [out, in]; * stands for every layer)")
    lines += [f"  {key:50} {shape}" for key, shape in report["tensors"].items()]
    if report["tied_head"]:
        lines.append(f"  {'lm_head.weight':50} is model.embed_tokens.weight")
    lines += ["", "parameters"]
    total = report["parameters"]["total"]
    lines += [f"  {part:10} {count:>18,}  {count / total:6.1%}" for part, count in report["parameters"].items()]
    lines += [
        "",
        "weights: " + ", ".join(f"{readable(count)} in {dtype}" for dtype, count in report["weights"].items()),
    ]
    lines += [
        "",
        f"attention: {report['heads']} query heads share {report['kv_heads']} key/value heads, "
        f"{report['queries_per_kv_head']} each",
        f"  cache of one layer after S tokens: keys and values, each {report['cache_shape_of_a_layer']}".replace(
            "'", ""
        ),
        f"  cache per token: {readable(report['kv_per_token'])} in {report['dtype']}; if every query head had its own keys and "
        f"values: {readable(report['kv_per_token_if_every_head_had_its_own'])}",
        f"  cache at the full context of {report['context_length']:,} tokens: {readable(report['kv_at_full_context'])}",
        "",
        f"one token: reads {readable(report['read_per_token'])} of weights, takes {report['flops_per_token']:,} "
        f"floating-point operations in products with weights, and {report['attention_flops_per_token_and_position']:,} for each "
        "position that it looks back at",
    ]
    if "device_memory" in report:
        fits = report["longest_context_that_fits"]
        memory = readable(report["device_memory"])
        lines.append(
            f"in {memory}: a context of {fits:,} tokens beside the weights"
            if fits
            else f"in {memory}: the weights alone do not fit in {report['dtype']}"
        )
    return "\n".join(lines)
