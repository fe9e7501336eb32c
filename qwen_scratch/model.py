"""Qwen2, Qwen2.5 and Qwen3: token ids in, next-token logits out. Read config, rope and cache first.

The two families are one model with two switches: Qwen2 has biases on q, k, v; Qwen3 instead norms each
query and key head.

Shapes:  B batch   T new tokens   S cached + new tokens   D hidden size   V vocabulary   F MLP width
         H query heads   K key/value heads   G = H / K query heads per key/value head   hd head_dim

The order of operations and of casts is the one of `transformers`, step by step, so that on the CPU every
tensor comes out equal to the last bit. Where the order looks arbitrary, that is why.

    ids [B, T] → embed_tokens → x [B, T, D] → block → block → ... → norm → lm_head → logits [B, T, V]
                                               │
              x ─┬─ input_layernorm ─ self_attn ─ + ─┬─ post_attention_layernorm ─ mlp ─ + → x
                 └────────────────────────────────┘  └───────────────────────────────────┘
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen_scratch.cache import KVCache
from qwen_scratch.config import QwenConfig
from qwen_scratch.rope import Rope, apply_rope


class Step(NamedTuple):
    """What all layers of one forward share."""

    cos: Tensor  # [B, 1, T, hd]
    sin: Tensor  # [B, 1, T, hd]
    mask: Tensor | None  # [B, 1, T, S], True = may look; None: see `Attention.attend`
    cache: KVCache | None
    new: Tensor  # [B] real tokens per row among the T


class RMSNorm(nn.Module):
    """Scale each vector to a root mean square of 1, then by a learned weight (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()  # squares of bfloat16 numbers need float32
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)  # rounded before the weight, as in the reference


class Attention(nn.Module):
    """Grouped-query attention: H query heads share K key/value heads, which makes the cache G times smaller."""

    def __init__(self, config: QwenConfig, layer: int) -> None:
        super().__init__()
        D, hd = config.hidden_size, config.head_dim
        self.layer = layer
        self.head_dim = hd
        self.q_proj = nn.Linear(D, config.num_attention_heads * hd, bias=config.qkv_bias)
        self.k_proj = nn.Linear(D, config.num_key_value_heads * hd, bias=config.qkv_bias)
        self.v_proj = nn.Linear(D, config.num_key_value_heads * hd, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_attention_heads * hd, D, bias=config.o_bias)
        self.q_norm = RMSNorm(hd, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(hd, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, step: Step) -> Tensor:
        q, k, v = self.project(x, step.cos, step.sin)
        if step.cache is not None:
            k, v = step.cache.write(self.layer, k, v, step.new)  # [B, K, S, hd]: now with all earlier tokens
        return self.o_proj(self.attend(q, k, v, step.mask))

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, D] → q [B, H, T, hd], k and v [B, K, T, hd]; q and k normed (Qwen3), then rotated."""
        heads = (*x.shape[:2], -1, self.head_dim)  # [B, T, H or K, hd]
        q = self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2)  # [B, H, T, hd]
        k = self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2)  # [B, K, T, hd]
        v = self.v_proj(x).view(heads).transpose(1, 2)  # [B, K, T, hd]
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """softmax(q·kᵀ / √hd) · v: q [B, H, T, hd], k and v [B, K, S, hd] → [B, T, H * hd].

        Query head h reads key/value head h // G. Without a mask, one query looks at everything, and several are
        a prompt on an empty cache. Only there is `is_causal` right: it aligns its triangle to the top left. Padding
        needs no mask of its own: it stands to the right, where a real token does not look.
        """
        causal = mask is None and q.shape[2] > 1
        mix = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)  # [B, H, T, hd]
        return mix.transpose(1, 2).flatten(2)  # [B, T, H * hd]


class MLP(nn.Module):
    """SwiGLU (https://arxiv.org/abs/2002.05202): one projection gates the other."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        D, width = config.hidden_size, config.intermediate_size  # the width is F in comments; in code F is functional
        self.gate_proj = nn.Linear(D, width, bias=False)
        self.up_proj = nn.Linear(D, width, bias=False)
        self.down_proj = nn.Linear(width, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # [B, T, D] → [B, T, F] → [B, T, D]


class Block(nn.Module):
    """One layer: look around (attention), then think it over (MLP); each adds to the residual stream x."""

    def __init__(self, config: QwenConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), step)  # [B, T, D]
        return x + self.mlp(self.post_attention_layernorm(x))  # [B, T, D]


class Backbone(nn.Module):
    """Everything up to the head; the checkpoint calls this part `model`. `Qwen.forward` runs it."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Qwen(nn.Module):
    """The whole model. Modules bear the checkpoint's names, so loading weights maps every name to itself.

    Gradients are off by default; `model.requires_grad_()` turns them on.
    """

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.config = config
        self.generation_config: dict[str, Any] = {}  # the checkpoint's own sampling defaults, if it states any
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight  # one matrix, used at both ends
        self.rope = Rope(config)
        self.requires_grad_(False)

    @property
    def device(self) -> torch.device:
        return self.model.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    def forward(
        self,
        input_ids: Tensor,
        cache: KVCache | None = None,
        lengths: Sequence[int] | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits of the token after each given one.

        Args:
            input_ids: [B, T] int64, T ≥ 1; with a cache they continue each row where it ends.
            cache: filled with the T tokens; None computes from scratch and remembers nothing.
            lengths: real tokens per row, 1 to T, where rows are padded on the right; None: all T are real.
            last_only: logits of each row's last real position only; a prompt needs no other, and the head is large.

        Returns:
            [B, T, V], or [B, 1, V] with `last_only`, in the model's dtype; meaningless at padding.

        Raises:
            ValueError: ids that are not [B, T ≥ 1], lengths that do not fit them, a cache of other batch size or dtype.
            IndexError: the cache is too short (it is left as it was), or an id is outside the vocabulary.
        """
        if input_ids.dim() != 2 or input_ids.numel() == 0:
            raise ValueError(f"input_ids must be [B, T] with at least one token, not {list(input_ids.shape)}")
        B, T = input_ids.shape
        # Bookkeeping of a few numbers stays on the CPU, where reading them makes no device wait.
        new = torch.tensor([T] * B if lengths is None else list(lengths), device="cpu")  # [B]
        if new.shape != (B,) or new.min() < 1 or new.max() > T:
            raise ValueError(f"lengths must be {B} numbers from 1 to {T}, not {lengths}")
        if cache is not None and len(cache.lengths) != B:
            raise ValueError(f"the cache has {len(cache.lengths)} rows, input_ids has {B}")
        if cache is not None and cache.k.dtype != self.dtype:
            raise ValueError(
                f"the cache is {cache.k.dtype}, the model {self.dtype}; make the cache with dtype=model.dtype"
            )

        past = cache.lengths if cache is not None else torch.zeros_like(new)  # [B]
        positions = past[:, None] + torch.arange(T, device="cpu")  # [B, T]
        mask = attention_mask(past, new, positions)
        if mask is not None:
            mask = mask.to(input_ids.device)
        cos, sin = self.rope(positions.to(input_ids.device), self.dtype)
        step = Step(cos, sin, mask, cache, new)

        x = self.model.embed_tokens(input_ids)  # [B, T, D]
        for block in self.model.layers:
            x = block(x, step)
        x = self.model.norm(x)
        if last_only:
            x = x[range(B), new - 1].unsqueeze(1)  # [B, 1, D]
        logits = self.lm_head(x)  # [B, T, V] or [B, 1, V]
        if cache is not None:
            cache.lengths = past + new
        return logits


def attention_mask(past: Tensor, new: Tensor, positions: Tensor) -> Tensor | None:
    """Which of the S cached and new positions each new token may look at: those up to its own, [B, 1, T, S].

    That also hides what a shorter row has left behind its end: it lies at later positions than the row's own tokens.

    None where `Attention.attend` needs none: a prompt on an empty cache, or one token in rows of equal length.
    """
    if past.max() == 0 or (positions.shape[1] == 1 and past.min() == past.max()):
        return None
    S = int((past + new).max())
    return (torch.arange(S, device="cpu") <= positions[:, :, None])[:, None]  # [B, 1, T, S]
