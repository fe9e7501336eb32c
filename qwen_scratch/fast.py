"""The same model, quicker on a CPU. Its sums are grouped otherwise, so it is close to the exact path, not equal to its bits.

One new token needs every weight once and little arithmetic, so the limit is how fast the memory can be read. What stands
between the plain path and that limit, and what is done about it here:

- a product with a plain matrix reads it at half the speed of the memory: weights are *packed* once, into the order in which
  oneDNN's kernels read them best, and one token goes in as two equal rows, for which oneDNN has a quicker kernel than for one;
- many small products: q, k, v are one product, gate and up are one;
- many small operations between the products, each of which costs tens of microseconds whatever it computes, because the
  weights that stream through the caches have pushed its code out: `FastQwen.one_token` gets by with as few as it can;
- attention that repeats each key/value head for its queries: there the queries of a group are taken as rows instead.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from qwen_scratch.cache import KVCache
from qwen_scratch.kinds import Kinds, MakeLinear
from qwen_scratch.linears import HeldLinear, Space, Weight
from qwen_scratch.model import MLP, Attention, Qwen, RMSNorm
from qwen_scratch.rope import apply_rope


class StoredEmbedding(nn.Module):
    """Looked up as it lies in the file, so that rows which are not needed are never read; what is found is cast."""

    def __init__(self, plain: nn.Embedding, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.dtype = plain.weight, dtype

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight).to(self.dtype)


class FastNorm(RMSNorm):
    """RMSNorm with its many steps as one operation, rounded where the plain one rounds."""

    def __init__(self, plain: RMSNorm, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.weight = plain.weight.to(dtype)  # type: ignore[assignment]  # not trained, so no Parameter
        self.eps = plain.eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * normed(x, self.eps)

    def equal_rows(self, x: Tensor) -> Tensor:
        """For x [n, D] of equal rows: their length is one number, which on a CPU is taken out of its tensor at no cost."""
        length = float(torch.linalg.vector_norm(x, dtype=torch.float32))
        return self.weight * (x * (length**2 / x.numel() + self.eps) ** -0.5)


def normed(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)


def normed_heads(x: Tensor, eps: float) -> Tensor:
    """As `normed`, for x [n, hd]: a batch norm with given means of 0 and given variances does each row in one operation."""
    mean_square = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).square_().div_(x.shape[-1])  # [n]
    return torch.batch_norm(x[None], None, None, torch.zeros_like(mean_square), mean_square, False, 0.0, eps, False)[0]


class OneStep(NamedTuple):
    """What one layer needs to know of one token's place."""

    cos: Tensor  # [hd]
    sin: Tensor  # [hd], with the sign of rotate_half: its first half is negative
    new_k: Tensor  # [K, hd]: where in the cache the token's key and value go
    new_v: Tensor
    k: Tensor  # [1, K, S, hd]: all keys and values, the new one among them
    v: Tensor


class FastAttention(Attention):
    """As the plain one, with q, k and v of all heads as one tensor for as long as they are treated alike."""

    o_proj: HeldLinear

    def __init__(self, plain: Attention, make: MakeLinear, dtype: torch.dtype, space: Space) -> None:
        nn.Module.__init__(self)
        self.layer, self.head_dim = plain.layer, plain.head_dim
        parts = (plain.q_proj, plain.k_proj, plain.v_proj)
        self.heads, self.kv_heads = (part.out_features // self.head_dim for part in parts[:2])
        bias = None if plain.q_proj.bias is None else torch.cat([part.bias for part in parts]).to(dtype)
        self.qkv_proj = make(joined([part.weight for part in parts], space), bias)
        bias = None if plain.o_proj.bias is None else plain.o_proj.bias.to(dtype)
        self.o_proj = make(plain.o_proj.weight, bias)
        self.norm: Tensor | None = None  # [H + K, hd]
        if isinstance(plain.q_norm, RMSNorm) and isinstance(plain.k_norm, RMSNorm):
            self.eps = plain.q_norm.eps
            q, k = (
                norm.weight.expand(n, -1) for norm, n in ((plain.q_norm, self.heads), (plain.k_norm, self.kv_heads))
            )
            self.norm = torch.cat((q, k)).to(dtype)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.qkv_proj(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)  # [B, H + 2K, T, hd]
        qk, v = torch.split(heads, [self.heads + self.kv_heads, self.kv_heads], dim=1)
        if self.norm is not None:
            qk = self.norm[:, None] * normed(qk, self.eps)
        q, k = torch.split(apply_rope(qk, cos, sin), [self.heads, self.kv_heads], dim=1)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return attend_in_groups(self, q, k, v, mask)

    def one_token(self, x: Tensor, step: OneStep) -> Tensor:
        """x [n, D] of equal rows → the same."""
        heads = self.qkv_proj.equal_rows(x)[0].view(-1, self.head_dim)  # [H + 2K, hd]
        qk, v = torch.split(heads, [self.heads + self.kv_heads, self.kv_heads])
        if self.norm is not None:
            qk = self.norm * normed_heads(qk, self.eps)
        qk = qk * step.cos + qk.roll(self.head_dim // 2, -1) * step.sin
        q, k = torch.split(qk, [self.heads, self.kv_heads])
        step.new_k.copy_(k)
        step.new_v.copy_(v)
        groups = q.view(1, self.kv_heads, -1, self.head_dim)  # [1, K, G, hd]
        mix = F.scaled_dot_product_attention(groups, step.k, step.v)
        return self.o_proj.equal_rows(mix.view(1, -1).expand(len(x), -1))


def attend_in_groups(self: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """`Attention.attend`, but one token's queries that share a key/value head are rows of one: kernels that take a mask then
    need no copies of the heads."""
    if q.shape[2] > 1:
        return Attention.attend(self, q, k, v, mask)
    groups = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])  # [B, K, G, hd]
    if mask is not None:
        mask = mask.expand(-1, -1, groups.shape[2], -1)  # [B, 1, G, S]
    return F.scaled_dot_product_attention(groups, k, v, mask).reshape(q.shape[0], 1, -1)  # [B, 1, H * hd]


class FastMLP(MLP):
    """SwiGLU with gate and up as one product."""

    down_proj: HeldLinear

    def __init__(self, plain: MLP, make: MakeLinear, space: Space) -> None:
        nn.Module.__init__(self)
        self.gate_up_proj = make(joined([plain.gate_proj.weight, plain.up_proj.weight], space), None)
        self.down_proj = make(plain.down_proj.weight, None)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)

    def equal_rows(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj.equal_rows(x).chunk(2, dim=-1)
        return self.down_proj.equal_rows(F.silu(gate) * up)


class FastQwen(Qwen):
    """Made and loaded as a `Qwen`; then `accelerate` replaces its parts."""

    lm_head: HeldLinear
    prefill_chunk = 512  # tokens; see `engine.prefill`
    quantize: str | None = None  # how the weights are held, where not as the checkpoint has them

    def forward(
        self,
        input_ids: Tensor,
        cache: KVCache | None = None,
        lengths: Sequence[int] | None = None,
        last_only: bool = False,
    ) -> Tensor:
        one = cache is not None and input_ids.shape == (1, 1) and len(cache.lengths) == 1 and lengths in (None, [1])
        if cache is None or not one or cache.k.dtype != self.dtype or cache.lengths >= cache.max_seq_len:
            return super().forward(input_ids, cache, lengths, last_only)
        return self.one_token(input_ids[0], cache)

    def one_token(self, token_id: Tensor, cache: KVCache) -> Tensor:
        """One token of one row: [1] → logits [1, 1, V]."""
        n = int(cache.lengths)
        cos, sin = (turn.view(-1) for turn in self.rope(cache.lengths[None], self.dtype))  # [hd]
        sin = torch.cat((-sin[: len(sin) // 2], sin[len(sin) // 2 :]))
        new = [whole[:, 0, :, n].unbind() for whole in (cache.k, cache.v)]
        seen = [whole[:, :, :, : n + 1].unbind() for whole in (cache.k, cache.v)]
        backbone: Any = self.model  # its layers are of the classes above
        x = backbone.embed_tokens(token_id.expand(2))  # [2, D]: two equal rows from here on
        for block, *places in zip(backbone.layers, *new, *seen, strict=True):
            x = x + block.self_attn.one_token(block.input_layernorm.equal_rows(x), OneStep(cos, sin, *places))
            x = x + block.mlp.equal_rows(block.post_attention_layernorm.equal_rows(x))
        logits = self.lm_head.equal_rows(backbone.norm.equal_rows(x))  # [2, V]
        cache.lengths = cache.lengths + 1
        return logits[None, :1]


def joined(weights: list[Tensor], space: Space) -> Tensor:
    """Weights [out, in] below each other."""
    shape = (sum(len(weight) for weight in weights), weights[0].shape[1])
    dtypes = {weight.dtype for weight in weights}
    return torch.cat(weights, out=space.take(shape, dtypes.pop() if len(dtypes) == 1 else torch.float32))


def accelerate(model: Qwen, head: Weight, kinds: Kinds, dtype: torch.dtype, progress: bool = False) -> None:
    """Replace the parts of a loaded model, each by itself, so that both forms of all are never held at once.

    Args:
        model: as its weights are stored, on the CPU. The embedding stays so, to be looked up row by row.
        head: [V, D], the head's weight; where that is tied, read apart from the embedding, so that its pages can go again.
        kinds: what makes the linear layers.
        dtype: to run in.
        progress: show a bar on stderr where this takes more than a second.
    """
    space = Space()
    backbone: Any = model.model  # other classes than it was made with take the same places
    backbone.embed_tokens = StoredEmbedding(backbone.embed_tokens, dtype)
    backbone.norm = FastNorm(backbone.norm, dtype)

    def replace_head() -> None:
        model.lm_head = kinds.head(head, None)

    def replace(block: Any) -> None:
        block.self_attn = FastAttention(block.self_attn, kinds.inner, dtype, space)
        block.mlp = FastMLP(block.mlp, kinds.inner, space)
        block.input_layernorm = FastNorm(block.input_layernorm, dtype)
        block.post_attention_layernorm = FastNorm(block.post_attention_layernorm, dtype)

    jobs: list[Callable[[], None]] = [replace_head, *(partial(replace, block) for block in backbone.layers)]
    with ThreadPoolExecutor(kinds.makers) as pool:
        done = (pool.map if kinds.makers > 1 else map)(lambda job: job(), jobs)
        for _ in tqdm(done, "packing", len(jobs), leave=False, unit="layer", delay=1, disable=not progress):
            pass


def weight_bytes(model: Qwen) -> int:
    """Memory that the weights take in the form that is multiplied by; a head that is tied to the embedding counts once."""
    held = sum(part.held_bytes for part in model.modules() if isinstance(part, HeldLinear))
    if not held:
        return model.config.num_parameters * model.dtype.itemsize
    embedding = 0 if model.config.tie_word_embeddings else model.model.embed_tokens.weight.nbytes
    norms = sum(part.weight.nbytes for part in model.modules() if isinstance(part, RMSNorm))
    return held + embedding + norms
