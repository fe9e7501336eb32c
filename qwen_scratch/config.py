"""The shape of a Qwen, read from a checkpoint's `config.json`.

Field names are the checkpoint's own, so a name means the same here, in the file and in `transformers`.
Whatever this package does not implement is refused by name: a setting that is silently ignored gives a
model that runs and talks nonsense.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from qwen_scratch.errors import InputError

ARCHITECTURES = {
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Model"),  # Qwen2 and Qwen2.5 share one architecture
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Model"),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Yarn:
    """YaRN context extension (https://arxiv.org/abs/2309.00071); `rope.inverse_frequencies` applies it."""

    factor: float  # how many times longer the context becomes
    original_max_position_embeddings: int  # the context before extension, in tokens
    attention_factor: float  # multiplies cos and sin, so attention scores by its square
    beta_fast: float = 32.0  # dimensions that turn more often than this over the original context stay as they are
    beta_slow: float = 1.0  # dimensions that turn less often than this are slowed down by `factor`
    truncate: bool = True  # round the border dimensions outwards to whole numbers


@dataclass(frozen=True)
class QwenConfig:
    """All sizes and switches of one model; build it with `QwenConfig.from_dict(json)`."""

    model_type: str  # "qwen2" | "qwen3"
    vocab_size: int  # V: rows of the embedding; may exceed the tokenizer's tokens, the rest is padding
    hidden_size: int  # D
    intermediate_size: int  # F
    num_hidden_layers: int  # L
    num_attention_heads: int  # H
    num_key_value_heads: int  # K: each serves G = H / K query heads
    head_dim: int  # hd: its own number; H * hd need not equal D
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    yarn: Yarn | None = None
    tie_word_embeddings: bool = False  # the head is the embedding matrix
    qkv_bias: bool = False  # Qwen2, Qwen2.5: biases on q, k and v
    o_bias: bool = False  # only a Qwen3 with `attention_bias` has one; no published checkpoint does
    qk_norm: bool = False  # Qwen3: RMSNorm on each query and key head
    dtype: torch.dtype | None = None  # what the file says its weights are; None where it does not say
    eos_token_ids: tuple[int, ...] = ()  # used only where generation_config.json names none

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings",
        ):  # fmt: skip
            require_size(name, getattr(self, name))
        for name in ("rms_norm_eps", "rope_theta"):
            require_number(name, getattr(self, name), above=0)
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"config.json: num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}; each key/value head serves a whole group"
            )
        if self.head_dim % 2:
            raise InputError(f"config.json: head_dim {self.head_dim} is odd; RoPE rotates pairs of dimensions")

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "QwenConfig":
        """Read a parsed config.json. Unknown keys are ignored, absent ones take `transformers`' defaults.

        Raises:
            InputError: a model type, activation, window, rope type or quantisation that is not implemented,
                or a needed key that is missing.
        """
        model_type = data.get("model_type")
        if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
            raise InputError(
                f"config.json: model_type {model_type!r} is not supported; this package runs qwen2 and qwen3"
            )
        named = data.get("architectures") or []
        named = named if isinstance(named, list) else [named]
        if named and not set(named) & set(ARCHITECTURES[model_type]):
            raise InputError(
                f"config.json: architecture {named[0]!r} is not supported, only {ARCHITECTURES[model_type][0]}"
            )
        for key in ("quantization_config", "quantization"):
            if data.get(key):
                method = data[key].get("quant_method", key) if isinstance(data[key], dict) else key
                raise InputError(f"config.json: the weights are quantised ({method}); take the unquantised checkpoint")
        if data.get("hidden_act", "silu") != "silu":
            raise InputError(f"config.json: hidden_act {data['hidden_act']!r} is not supported, only 'silu'")
        for key in ("tie_word_embeddings", "attention_bias", "use_sliding_window"):
            if data.get(key) not in (None, True, False):
                raise InputError(f"config.json: {key} must be true or false, not {data[key]!r}")
        needed = [
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads",
        ]  # fmt: skip
        missing = [key for key in needed if data.get(key) is None]
        if missing:
            raise InputError(f"config.json lacks {', '.join(missing)}")
        for key in needed:
            require_size(key, data[key])
        if data["num_hidden_layers"] > 1000:
            raise InputError(
                f"config.json: {data['num_hidden_layers']} layers cannot be meant; large models have about 100"
            )
        refuse_sliding_window(data)

        is_qwen3 = model_type == "qwen3"
        head_dim = data.get("head_dim")
        if head_dim is None:  # Qwen2 files leave it out; Qwen3 files state it
            head_dim = 128 if is_qwen3 else data["hidden_size"] // data["num_attention_heads"]
        max_positions = data.get("max_position_embeddings", 32768)
        rope_theta, yarn = read_rope(data, max_positions)
        eos = data.get("eos_token_id")
        return cls(
            model_type=model_type,
            **{key: data[key] for key in needed},
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rms_norm_eps=data.get("rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            yarn=yarn,
            tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
            qkv_bias=bool(data.get("attention_bias", False)) if is_qwen3 else True,
            o_bias=bool(data.get("attention_bias", False)) and is_qwen3,
            qk_norm=is_qwen3,
            dtype=read_dtype(data.get("dtype") or data.get("torch_dtype"), source="config.json: "),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        )

    @property
    def context_length(self) -> int:
        """The longest sequence, prompt and answer together, that the model was made for, in tokens."""
        if self.yarn is None:
            return self.max_position_embeddings
        return int(self.yarn.factor * self.yarn.original_max_position_embeddings)

    @property
    def num_parameters(self) -> int:
        """How many learned numbers there are; a tied head counts once."""
        D, F, hd = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_attention_heads * hd, self.num_key_value_heads * hd
        attention = D * q + 2 * D * kv + q * D
        attention += self.qkv_bias * (q + 2 * kv) + self.o_bias * D + self.qk_norm * 2 * hd
        block = attention + 3 * D * F + 2 * D  # gate, up, down; two norms
        matrices = self.vocab_size * D * (1 if self.tie_word_embeddings else 2)
        return matrices + self.num_hidden_layers * block + D

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one more token adds to a row of the cache: a key and a value per layer and K/V head."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * dtype.itemsize


def require_size(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**28:
        raise InputError(f"config.json: {name} must be a positive whole number of sensible size, not {value!r}")


def require_number(name: str, value: Any, above: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not above < value < 2**53:
        raise InputError(f"config.json: {name} must be a number above {above:g}, not {value!r}")


def read_dtype(name: Any, source: str = "") -> torch.dtype | None:
    """`"bfloat16"`, `"torch.bfloat16"` or a torch.dtype → torch.dtype; None stays None."""
    if name is None:
        return None
    dtype = DTYPES.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise InputError(f"{source}dtype {str(name)!r} is not supported; choose one of {', '.join(DTYPES)}")
    return dtype


def refuse_sliding_window(data: dict[str, Any]) -> None:
    """Published files carry a window size that is switched off; refuse only one that is really on."""
    layer_types = data.get("layer_types")
    # The reference's defaults: a switch that is on without a size means 4096; a size of null means none.
    if layer_types is None and data.get("use_sliding_window") and data.get("sliding_window", 4096) is not None:
        full = data.get("max_window_layers", 28)  # this many layers from the bottom see everything
        windowed = data["num_hidden_layers"] - full
        layer_types = ["sliding_attention"] * max(windowed, 0)
    other = sorted({str(kind) for kind in layer_types or [] if kind != "full_attention"})
    if other:
        raise InputError(f"config.json: {', '.join(other)} layers are not supported, only full_attention")


def read_rope(data: dict[str, Any], max_positions: int) -> tuple[float, Yarn | None]:
    """Old files: `rope_theta` and `rope_scaling` with `type`; new ones: all in `rope_parameters` with `rope_type`."""
    rope = data.get("rope_scaling") or data.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise InputError(f"config.json: the rope settings must be an object, not {rope!r}")
    if any(isinstance(value, dict) for value in rope.values()):
        raise InputError("config.json: rope settings per layer type are not supported, only one for all layers")
    theta = rope.get("rope_theta", data.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise InputError(f"config.json: rope type {kind!r} is not supported; supported are default and yarn")

    original = (
        data.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or max_positions
    )
    factor = rope.get("factor")
    if factor is None:
        factor = max_positions / original
    require_size("yarn's original_max_position_embeddings", original)
    require_number("yarn's factor", factor, above=0)

    def scale(weight: float) -> float:  # the paper's 0.1 ln(s) + 1; mscale weighs the logarithm
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        both = rope.get("mscale") and rope.get("mscale_all_dim")
        attention_factor = scale(rope["mscale"]) / scale(rope["mscale_all_dim"]) if both else scale(1.0)
    for name, value in (("attention_factor", attention_factor), ("beta_fast", rope.get("beta_fast") or 32.0),
                        ("beta_slow", rope.get("beta_slow") or 1.0)):  # fmt: skip
        require_number(f"yarn's {name}", value, above=0)
    return theta, Yarn(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention_factor,
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        truncate=rope.get("truncate", True),
    )
