"""One real inference, taken apart: every stage's numbers, as plain data that can be printed, drawn or kept as JSON.

The numbers come from the model that is read (model.py), watched from outside by observe.py.
"""

from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from qwen_scratch.cache import KVCache
from qwen_scratch.completion import Completion, complete
from qwen_scratch.engine import best
from qwen_scratch.maps import attention_weights
from qwen_scratch.model import Qwen
from qwen_scratch.observe import observe
from qwen_scratch.sampling import SamplingParams, keep_min_p, keep_top_k, keep_top_p
from qwen_scratch.text import Tokenizer

FIRST = 4  # values of a vector that are shown
LOOKS = 3  # positions that a head looks at most
STAGES = {  # where in the code each happens
    "prompt": "text.py Tokenizer.render, Tokenizer.encode",
    "embedding": "model.py Qwen.forward, embed_tokens",
    "layers": "model.py Block.forward",
    "one_layer": "model.py Attention.project, Attention.attend, MLP.forward",
    "logits": "model.py Qwen.forward, norm and lm_head",
    "decode": "engine.py steps; cache.py KVCache.write",
    "sampling": "sampling.py Sampler.pick",
    "checks": "engine.py prefill",
}


@torch.inference_mode()
def walk(model: Qwen, tokenizer: Tokenizer, result: Completion, layer: int, steps: int) -> dict[str, Any]:
    """Follow a prompt through the model, then `steps` tokens more, each the likeliest.

    Args:
        model: loaded with `exact`, so that its parts are those of model.py.
        result: a prepared or finished completion, for its prompt.
        layer: the one whose inside is shown; -1 is the last.
        steps: tokens to make, at least 1; fewer come where the model ends its answer.
    """
    ids = result.prompt_ids
    text = result.rendered_prompt if not result.notices else "".join(map(tokenizer.label, ids))  # it may have been cut
    layer %= model.config.num_hidden_layers
    seen: dict[tuple[str, int | None], Tensor] = {}
    cache = KVCache(model.config, 1, len(ids) + steps, device=model.device, dtype=model.dtype)

    def keep(op: str, at: int | None, tensor: Tensor) -> None:
        if at in (None, layer):
            seen[op, at] = tensor
        elif op in ("residual_2", "o", "down"):  # of the other layers the last position is enough
            seen[op, at] = tensor[:, -1:].clone()

    with observe(model, keep):
        start = perf_counter()
        logits = model(torch.tensor([ids], device=model.device), cache=cache)[0]  # [T, V]
        prefill_s = perf_counter() - start
    decoded = decode(model, tokenizer, cache, logits[-1], result.eos_token_ids, steps, prefill_s)
    return {
        "where": STAGES,
        "prompt": {"text": text, "tokens": tokens(tokenizer, ids)},
        "embedding": embedding(seen["embedding", None][0], model),
        "layers": layers(seen, model),
        "one_layer": one_layer(seen, model, layer, tokenizer, ids),
        "logits": {
            "shape": list(logits.shape),
            "final_norm": vector(seen["final_norm", None][0, -1]),
            "largest": float(logits[-1].max()),
            "smallest": float(logits[-1].min()),
            "top": top(logits[-1], tokenizer),
        },
        "decode": decoded,
        "sampling": sampling(logits[-1], tokenizer),
        "checks": checks(model, ids, [step["token_id"] for step in decoded["steps"]]),
    }


def tokens(tokenizer: Tokenizer, ids: list[int]) -> list[dict[str, Any]]:
    """Each token as it is stored, and as text. A piece can look garbled: it stands for bytes, not letters."""
    return [
        {
            "position": n,
            "id": i,
            "piece": tokenizer.piece(i),
            "text": tokenizer.decode([i]),
            "bytes": len(tokenizer.token_bytes(i)),
        }
        for n, i in enumerate(ids)
    ]


def vector(x: Tensor) -> dict[str, Any]:
    """The beginning of a vector, its length and its root mean square."""
    wide = x.float()
    return {"first": wide[:FIRST].tolist(), "norm": float(wide.norm()), "rms": float(wide.pow(2).mean().sqrt())}


def embedding(x: Tensor, model: Qwen) -> dict[str, Any]:
    """x [T, D]."""
    chosen = sorted({0, len(x) // 2, len(x) - 1})
    return {
        "matrix": list(model.model.embed_tokens.weight.shape),
        "shape": [1, *x.shape],
        "positions": [{"position": n, **vector(x[n])} for n in chosen],
    }


def layers(seen: dict[tuple[str, int | None], Tensor], model: Qwen) -> list[dict[str, Any]]:
    """The residual stream at the last position, after each layer."""
    return [
        {
            "layer": n,
            "shape": list(seen["embedding", None].shape),
            **vector(seen["residual_2", n][0, -1]),
            "attention_added": vector(seen["o", n][0, -1])["rms"],
            "mlp_added": vector(seen["down", n][0, -1])["rms"],
        }
        for n in range(model.config.num_hidden_layers)
    ]


def one_layer(
    seen: dict[tuple[str, int | None], Tensor], model: Qwen, n: int, tokenizer: Tokenizer, ids: list[int]
) -> dict[str, Any]:
    config, T = model.config, len(ids)
    block: Any = model.model.layers[n]
    names = {name: f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")}
    names |= {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    projections = []
    for op, name in names.items():
        linear = block.get_submodule(name)
        projections.append(
            {
                "name": name,
                "weight": list(linear.weight.shape),
                "bias": linear.bias is not None,
                "in": [1, T, linear.in_features],
                "out": list(seen[op, n].shape),
            }
        )
    heads = []
    for kind, count in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
        stages = {"projected": seen[kind, n][0, -1].view(count, -1)[0]}  # head 0 at the last position, [hd]
        if config.qk_norm:
            stages["normed"] = seen[f"{kind}_norm", n][0, -1, 0]
        stages["turned"] = seen[f"{kind}_rope", n][0, 0, -1]
        before = stages.get("normed", stages["projected"])
        pair = [0, config.head_dim // 2]  # what RoPE turns together
        heads.append(
            {
                "kind": kind,
                **{stage: vector(x) for stage, x in stages.items()},
                "pair": {"of": pair, "before": before[pair].tolist(), "after": stages["turned"][pair].tolist()},
            }
        )
    last = torch.tensor([T - 1], device=model.device)
    weights = attention_weights(seen["q_rope", n][0], seen["k_rope", n][0], last)[:, 0]  # [H, T]
    looks = []
    for head, row in enumerate(weights):
        likeliest = row.topk(min(LOOKS, T))
        looks.append(
            {
                "head": head,
                "kv_head": head // (config.num_attention_heads // config.num_key_value_heads),
                "at": [
                    {"position": p, "token": tokenizer.label(ids[p]), "weight": w}
                    for w, p in zip(likeliest.values.tolist(), likeliest.indices.tolist(), strict=True)
                ],
            }
        )
    return {
        "layer": n,
        "projections": projections,
        "query_heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "queries_per_kv_head": config.num_attention_heads // config.num_key_value_heads,
        "head_dim": config.head_dim,
        "first_head": heads,
        "scores": [1, config.num_attention_heads, T, T],
        "looks": looks,
        "value": vector(seen["v", n][0, -1][: config.head_dim]),
        "mix": vector(seen["attention", n][0, -1][: config.head_dim]),
        "mix_shape": list(seen["attention", n].shape),
        "gate": vector(seen["gate", n][0, -1]),
        "gate_up": vector(seen["gate_up", n][0, -1]),
        "down": vector(seen["down", n][0, -1]),
    }


def top(logits: Tensor, tokenizer: Tokenizer, n: int = 5) -> list[dict[str, Any]]:
    return [
        {"token_id": i, "token": tokenizer.label(i), "logit": logit, "prob": prob} for i, logit, prob in best(logits, n)
    ]


def decode(
    model: Qwen, tokenizer: Tokenizer, cache: KVCache, logits: Tensor, eos: list[int], steps: int, prefill_s: float
) -> dict[str, Any]:
    """The likeliest token, appended, and again. The first one comes from the prompt's own forward."""
    config = model.config
    per_token = config.kv_bytes_per_token(model.dtype)
    made: list[dict[str, Any]] = []
    shapes = {"input": [1, int(cache.lengths[0])], "fed": "the prompt", "seconds": prefill_s, "before": 0}
    while True:
        token_id = int(logits.argmax())
        length = int(cache.lengths[0])
        made.append(
            {
                "forward": "prompt" if not made else "token",
                **shapes,
                "after": length,
                "cache": [1, config.num_key_value_heads, length, config.head_dim],
                "token_id": token_id,
                "token": tokenizer.label(token_id),
                "bytes": len(tokenizer.token_bytes(token_id)),
                "prob": float(logits.float().softmax(-1)[token_id]),
            }
        )
        if len(made) == steps or token_id in eos:
            break
        start = perf_counter()
        logits = model(torch.tensor([[token_id]], device=model.device), cache=cache)[0, -1]
        fed = repr(tokenizer.label(token_id))
        shapes = {"input": [1, 1], "fed": fed, "seconds": perf_counter() - start, "before": length}
    return {
        "steps": made,
        "ended": made[-1]["token_id"] in eos,
        "bytes_per_token": per_token,
        "formula": f"2 (keys, values) x {config.num_hidden_layers} layers x {config.num_key_value_heads} key/value heads x "
        f"{config.head_dim} numbers x {model.dtype.itemsize} bytes",
        "context_length": config.context_length,
        "bytes_at_full_context": per_token * config.context_length,
        "bytes_per_token_if_every_head_had_its_own": per_token
        * config.num_attention_heads
        // config.num_key_value_heads,
    }


def sampling(logits: Tensor, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """What each way to choose would leave of this very distribution: how many tokens, and with what probability in all."""
    scores = logits.float()
    plain = scores.softmax(-1)
    ways: dict[str, Tensor] = {
        **{f"temperature {t}": scores / t for t in (0.5, 0.7, 1, 1.5)},
        "top-k 5": keep_top_k(scores, 5),
        "top-k 50": keep_top_k(scores, 50),
        "top-p 0.9": keep_top_p(scores, 0.9),
        "min-p 0.05": keep_min_p(scores, 0.05),
        "greedy": scores.masked_fill(torch.arange(len(scores), device=scores.device) != scores.argmax(), -torch.inf),
    }
    report = []
    for name, kept in ways.items():
        stays = kept != -torch.inf
        report.append(
            {
                "way": name,
                "candidates": int(stays.sum()),
                "probability_kept": float(plain[stays].sum()),
                "top": [{"token": row["token"], "prob": row["prob"]} for row in top(kept, tokenizer)],
            }
        )
    return report


def checks(model: Qwen, ids: list[int], made: list[int]) -> dict[str, Any]:
    """The same tokens without a cache, which computes everything anew for each, and by the package's own loop."""
    start = perf_counter()
    without: list[int] = []
    for _ in made:
        logits = model(torch.tensor([ids + without], device=model.device), last_only=True)
        without.append(int(logits[0, -1].argmax()))
    without_s = perf_counter() - start
    params = SamplingParams(
        temperature=0, max_new_tokens=len(made), ignore_eos=True, repetition_penalty=1, presence_penalty=0
    )
    start = perf_counter()
    loop = complete(model, None, ids, params).token_ids
    return {
        "with_cache_s": perf_counter() - start,
        "without_cache_s": without_s,
        "equal_without_cache": without == made,
        "equal_to_complete": loop == made,
    }
