"""The same model, quicker on a CPU. Its sums are grouped otherwise, so it is close to the exact path, not equal to its bits.

One new token needs every weight once and little arithmetic, so the limit is how fast the memory can be read. What stands
between the plain path and that limit, and what is done about it here:

- a product of one row with a plain matrix reads it at half the speed of the memory: weights are *packed* once, into the
  order in which oneDNN's kernels read them best;
- many small products and sums: q, k, v are one product, gate and up are one, norms are one operation each;
- attention that repeats each key/value head for its queries: for one token the queries of a group are taken as rows instead.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen_scratch.model import MLP, Attention, Qwen, RMSNorm
from qwen_scratch.rope import apply_rope


class PackedLinear(nn.Linear):
    """x [..., in] → [..., out], by a weight in oneDNN's own order."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.bias = bias  # type: ignore[assignment]  # not a Parameter: nothing here is trained

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class FastNorm(RMSNorm):
    """RMSNorm with its many steps as one operation, rounded where the plain one rounds."""

    def __init__(self, plain: RMSNorm) -> None:
        nn.Module.__init__(self)
        self.weight = plain.weight
        self.eps = plain.eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * normed(x, self.eps)


def normed(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)


class FastAttention(Attention):
    """As the plain one, with q, k and v of all heads as one tensor for as long as they are treated alike."""

    def __init__(self, plain: Attention, space: Tensor) -> None:
        nn.Module.__init__(self)
        self.layer, self.head_dim = plain.layer, plain.head_dim
        parts = (plain.q_proj, plain.k_proj, plain.v_proj)
        self.heads, self.kv_heads = (part.out_features // self.head_dim for part in parts[:2])
        bias = None if plain.q_proj.bias is None else torch.cat([part.bias for part in parts])
        self.qkv_proj = PackedLinear(joined([part.weight for part in parts], space), bias)
        self.o_proj = PackedLinear(plain.o_proj.weight, plain.o_proj.bias)
        self.norm: Tensor | None = None  # [H + K, 1, hd]
        if isinstance(plain.q_norm, RMSNorm) and isinstance(plain.k_norm, RMSNorm):
            self.eps = plain.q_norm.eps
            q, k = (
                norm.weight.expand(n, 1, -1) for norm, n in ((plain.q_norm, self.heads), (plain.k_norm, self.kv_heads))
            )
            self.norm = torch.cat((q, k))

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.qkv_proj(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)  # [B, H + 2K, T, hd]
        qk, v = torch.split(heads, [self.heads + self.kv_heads, self.kv_heads], dim=1)
        if self.norm is not None:
            qk = self.norm * normed(qk, self.eps)
        q, k = torch.split(apply_rope(qk, cos, sin), [self.heads, self.kv_heads], dim=1)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if q.shape[2] > 1:
            return super().attend(q, k, v, mask)
        groups = q.reshape(q.shape[0], self.kv_heads, -1, self.head_dim)  # [B, K, G, hd]: a group's queries as rows
        return F.scaled_dot_product_attention(groups, k, v, mask).reshape(q.shape[0], 1, -1)  # [B, 1, H * hd]


class FastMLP(MLP):
    """SwiGLU with gate and up as one product."""

    def __init__(self, plain: MLP, space: Tensor) -> None:
        nn.Module.__init__(self)
        self.gate_up_proj = PackedLinear(joined([plain.gate_proj.weight, plain.up_proj.weight], space), None)
        self.down_proj = PackedLinear(plain.down_proj.weight, None)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


def joined(weights: list[Tensor], space: Tensor) -> Tensor:
    """Weights [out, in] below each other, in a space that is used again and again: fresh ones would leave holes in the heap."""
    rows, width = sum(len(weight) for weight in weights), weights[0].shape[1]
    return torch.cat(weights, out=space[: rows * width].view(rows, width))


def accelerate(model: Qwen, head: Tensor) -> None:
    """Replace the parts of a loaded model, one after the other, so that both forms are never held at once.

    Args:
        model: as it was loaded on the CPU. Its embedding stays as it is, to be looked up row by row.
        head: [V, D], the head's weight; where that is tied, read anew, so that all its pages can be let go again.
    """
    model.lm_head = PackedLinear(head, None)
    sizes = model.config
    widest = max(
        2 * sizes.intermediate_size, (sizes.num_attention_heads + 2 * sizes.num_key_value_heads) * sizes.head_dim
    )
    space = torch.empty(widest * sizes.hidden_size, dtype=head.dtype)
    del head
    backbone: Any = model.model  # other classes than it was made with take the same places
    for block in backbone.layers:
        block.self_attn = FastAttention(block.self_attn, space)
        block.mlp = FastMLP(block.mlp, space)
        block.input_layernorm = FastNorm(block.input_layernorm)
        block.post_attention_layernorm = FastNorm(block.post_attention_layernorm)
    backbone.norm = FastNorm(backbone.norm)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch has oneDNN's operations for this kind of number; they are its own, and may go one day."""
    if device.type != "cpu":
        return False
    try:
        weight = torch.ones(16, 16, dtype=dtype)
        return torch.equal(PackedLinear(weight, None)(weight[:1]), torch.full((1, 16), 16.0, dtype=dtype))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
