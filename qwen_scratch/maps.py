"""What only a picture can show of a prompt: at every layer and position, where each head looks and what would be said.

The logit lens takes the stream as it is after some layer for the last one: final norm and head make a prediction of it
(nostalgebraist, "interpreting GPT: the logit lens", 2020).
"""

import math
from typing import Any

import torch
from torch import Tensor

from qwen_scratch.model import Qwen
from qwen_scratch.observe import observe
from qwen_scratch.text import Tokenizer

SHOWN = 64  # positions at most
NUMBERS = 2_000_000  # attention weights at most, so that a page stays a page


@torch.inference_mode()
def maps(model: Qwen, tokenizer: Tokenizer, ids: list[int]) -> dict[str, Any]:
    """A forward of its own over a prompt, as plain data.

    Args:
        model: loaded with `exact`, so that its parts are those of model.py.

    Returns:
        `positions`: those shown. `layers`: the embedding (layer None), then each layer, with lists along the positions: the root
        mean square of the stream and of what attention and MLP added, and what the lens says. `attention`:
        [layer][head][from][to], both by their place in `positions`, as far as `from` can look.
    """
    config = model.config
    positions = shown(len(ids), config.num_hidden_layers * config.num_attention_heads)
    at = torch.tensor(positions, device=model.device)
    kept: dict[tuple[str, int | None], Tensor] = {}  # [n, D], of the shown positions
    queries: dict[int | None, Tensor] = {}
    attention: list[list[list[list[float]]]] = []

    def watch(op: str, layer: int | None, x: Tensor) -> None:
        if op in ("embedding", "residual_2", "o", "down", "logits"):
            kept[op, layer] = x[0, at]
        elif op == "q_rope":
            queries[layer] = x[0]
        elif op == "k_rope":
            weights = attention_weights(queries.pop(layer), x[0], at)[:, :, at]  # [H, n, n]
            attention.append([lower_half(head) for head in weights])

    with observe(model, watch):
        model(torch.tensor([ids], device=model.device))
    rows = [{"layer": None, **row(model, tokenizer, kept["embedding", None])}]
    for n in range(config.num_hidden_layers):
        last = n == config.num_hidden_layers - 1
        stream = row(model, tokenizer, kept["residual_2", n], kept["logits", None] if last else None)
        added = {name: rms(kept[op, n]) for name, op in (("attention_added", "o"), ("mlp_added", "down"))}
        rows.append({"layer": n, **stream, **added})
    return {"positions": positions, "layers": rows, "attention": attention}


def shown(T: int, maps: int) -> list[int]:
    """All of T positions; or of what can be shown of so many maps, a quarter at the beginning and the rest at the end."""
    most = min(SHOWN, math.isqrt(2 * NUMBERS // maps))
    if most >= T:
        return list(range(T))
    return [*range(most // 4), *range(T - (most - most // 4), T)]


def row(model: Qwen, tokenizer: Tokenizer, x: Tensor, logits: Tensor | None = None) -> dict[str, Any]:
    """The stream x [n, D], and its prediction; the last layer's is the model's own."""
    if logits is None:
        logits = model.lm_head(model.model.norm(x))  # [n, V]
    best = logits.float().softmax(-1).max(-1)
    says = [
        {"token_id": i, "token": tokenizer.label(i), "prob": round(prob, 6)}
        for i, prob in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    return {"stream": rms(x), "says": says}


def rms(x: Tensor) -> list[float]:
    """x [n, D] → n root mean squares."""
    return x.float().pow(2).mean(-1).sqrt().tolist()


def attention_weights(q: Tensor, k: Tensor, at: Tensor) -> Tensor:
    """How much some positions look at each.

    q [H, T, hd], k [K, T, hd], both turned, and positions `at` [n] → [H, n, T] float32; what is later gets 0.
    """
    k = k.repeat_interleave(len(q) // len(k), dim=0).float()
    scores = q[:, at].float() @ k.transpose(1, 2) / q.shape[-1] ** 0.5  # [H, n, T]
    later = torch.arange(k.shape[1], device=k.device) > at[:, None]  # [n, T]
    return scores.masked_fill(later, -torch.inf).softmax(-1)


def lower_half(weights: Tensor) -> list[list[float]]:
    """[n, n] → rows of 1 to n numbers; the rest is 0, as it is later."""
    return [[round(weight, 4) for weight in line[: n + 1]] for n, line in enumerate(weights.tolist())]
