"""Can the comparison fail? Each fault is put into the real source at test time, and must turn it red."""

import inspect
import textwrap

import pytest
import torch
from builders import save_tiny

from qwen_scratch import cache, load_model, model, parity, rope
from qwen_scratch.reference import Reference

IDS = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33, 83, 27, 95]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

Q_LINE = "q = self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2)"
K_LINE = "k = self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2)"
ROTATED = "return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v"
SDPA = "F.scaled_dot_product_attention(q, k, v, "

# fault: (family, dtype, where, function, {what the source says: what it says instead})
FAULTS = {
    "q bias dropped": ("qwen2", "float32", model.Attention, "project", {"self.q_proj(x)": "F.linear(x, self.q_proj.weight)"}),
    "v bias dropped": ("qwen2", "float32", model.Attention, "project", {"self.v_proj(x)": "F.linear(x, self.v_proj.weight)"}),
    "q and k norm swapped": (
        "qwen3", "float32", model.Attention, "project",
        {"self.q_norm(": "self.k_norm(", "self.k_norm(self.k_proj": "self.q_norm(self.k_proj"},
    ),
    "q/k norm skipped in decode": (
        "qwen3", "float32", model.Attention, "project",
        {"self.q_norm(": "(self.q_norm if x.shape[1] > 1 else torch.clone)(",
         "self.k_norm(": "(self.k_norm if x.shape[1] > 1 else torch.clone)("},
    ),
    "norm after RoPE": (
        "qwen3", "float32", model.Attention, "project",
        {Q_LINE: "q = self.q_proj(x).view(heads).transpose(1, 2)",
         K_LINE: "k = self.k_proj(x).view(heads).transpose(1, 2)",
         ROTATED: "return self.q_norm(apply_rope(q, cos, sin)), self.k_norm(apply_rope(k, cos, sin)), v"},
    ),
    "norm weight before the cast": (
        "qwen3", "bfloat16", model.RMSNorm, "forward", {"self.weight * wide.to(x.dtype)": "(self.weight * wide).to(x.dtype)"},
    ),
    "wrong eps": ("qwen3", "float32", model.RMSNorm, "forward", {"self.eps": "1e-5"}),
    "theta / 10": ("qwen3", "float32", rope, "inverse_frequencies", {"config.rope_theta **": "(config.rope_theta / 10) **"}),
    "interleaved RoPE": (
        "qwen3", "float32", rope, "rotate_half",
        {"torch.cat((-b, a), dim=-1)": "torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)"},
    ),
    "angles in bfloat16": (
        "qwen3", "bfloat16", rope.Rope, "__call__", {".float() * self.inv_freq": ".bfloat16() * self.inv_freq.bfloat16()"},
    ),
    "position off by one": ("qwen3", "float32", model.Qwen, "forward", {"self.rope(positions.": "self.rope(1 + positions."}),
    "position off by one in decode": (
        "qwen3", "float32", model.Qwen, "forward", {"self.rope(positions.": "self.rope(int(T == 1) + positions."},
    ),
    "repeat for repeat_interleave": (
        "qwen3", "float32", model.Attention, "attend",
        {SDPA: "F.scaled_dot_product_attention(q, k.repeat(1, q.shape[1] // k.shape[1], 1, 1), "
               "v.repeat(1, q.shape[1] // v.shape[1], 1, 1), "},
    ),
    "top-left causal mask on a warm cache": (
        "qwen3", "float32", model, "attention_mask", {"<= positions[:, :, None]": "<= (positions - past[:, None])[:, :, None]"},
    ),
    "no mask on a warm cache": (
        "qwen3", "float32", model, "attention_mask",
        {"<= positions[:, :, None]": "<= S + 0 * positions[:, :, None]"},
    ),
    "wrong attention scale": (
        "qwen3", "float32", model.Attention, "attend",
        {"enable_gqa=True": "enable_gqa=True, scale=48**-0.5"},
    ),
    "gelu for silu": ("qwen2", "float32", model.MLP, "forward", {"F.silu(": "F.gelu("}),
    "gate and up swapped": (
        "qwen2", "float32", model.MLP, "forward",
        {"F.silu(self.gate_proj(x)) * self.up_proj(x)": "self.gate_proj(x) * F.silu(self.up_proj(x))"},
    ),
    "head from the wrong matrix": (
        "qwen3", "float32", model.Qwen, "forward",
        {"logits = self.lm_head(x)": "logits = 0 * self.lm_head(x) + x @ self.model.embed_tokens.weight.T"},
    ),
    "attention factor left out": (
        "qwen3", "float32", rope.Rope, "__init__",
        {"config.yarn.attention_factor if config.yarn else 1.0": "1.0"},
    ),
    "YaRN's slow points not slowed": ("qwen3", "float32", rope, "yarn_frequencies", {"(yarn.factor * slowness)": "slowness"}),
    "residual of the normed stream": (
        "qwen3", "float32", model.Block, "forward", {"return x + self.mlp": "return self.post_attention_layernorm(x) + self.mlp"},
    ),
    "truncate keeps one too many": ("qwen3", "float32", cache.KVCache, "truncate", {"clamp(max=n)": "clamp(max=max(n - 1, 0))"}),
    "padding counted as tokens": (
        "qwen3", "float32", model.Qwen, "forward",
        {"cache.lengths = past + new": "cache.lengths = past + T"},
    ),
    "rows share the first row's position": (
        "qwen3", "float32", model.Qwen, "forward", {"self.rope(positions.": "self.rope(positions[:1].expand(B, T)."},
    ),
}  # fmt: skip


def check(tmp_path, fault=None):
    family, dtype = FAULTS[fault][:2] if fault else ("qwen3", "float32")
    changes = {}
    if fault == "head from the wrong matrix":
        changes = {"tie_word_embeddings": False}
    elif fault and ("factor" in fault or "YaRN" in fault):
        changes = {"rope_theta": None, "rope_parameters": dict(YARN)}
    folder = tmp_path / "model"
    if not folder.exists():
        save_tiny(folder, family, dtype=getattr(torch, dtype), **changes)
    ours = load_model(folder, device="cpu", exact=True, dtype=dtype)
    return parity.check(ours, Reference(folder, ours.dtype), IDS, steps=6)


def spoil(monkeypatch, where, name, edits):
    """Recompile one function of the package with its source edited; a text that is not there exactly once is an error."""
    function = getattr(where, name)
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in edits.items():
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {name}"
        source = source.replace(old, new)
    names = dict(function.__globals__)
    exec(compile("from __future__ import annotations\n" + source, f"<spoiled {name}>", "exec"), names)
    spoiled = names[name]
    monkeypatch.setattr(where, name, spoiled)
    for module in (model, rope):  # a function that another file has imported by name
        if getattr(module, name, None) is function:
            monkeypatch.setattr(module, name, spoiled)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_turns_the_comparison_red(tmp_path, monkeypatch, fault):
    sound = check(tmp_path, fault)
    assert sound["ok"], parity.table(sound)
    spoil(monkeypatch, *FAULTS[fault][2:])
    try:
        report = check(tmp_path, fault)
    except RuntimeError as error:
        assert "order of operations differs" in str(error)  # noqa: PT017 (red in its own way)
    else:
        assert not report["ok"], parity.table(report)


def test_an_edit_that_changes_nothing_stays_green(tmp_path, monkeypatch):
    """The way of spoiling does no harm by itself."""
    spoil(monkeypatch, model.Attention, "project", {Q_LINE: Q_LINE + "  # the same"})
    spoil(monkeypatch, rope, "rotate_half", {"torch.cat((-b, a)": "torch.cat((-1 * b, a)"})
    report = check(tmp_path)
    assert report["ok"], parity.table(report)
