"""The exact path against the reference: every comparison here is of all bits."""

import subprocess
import sys

import pytest
import torch
from builders import save_tiny
from conftest import ROOT

from qwen_scratch import KVCache, load_model
from qwen_scratch.model import attention_mask
from qwen_scratch.reference import Reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOKENS = torch.tensor([[3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64]])  # 12 of them


def compare_to_reference(folder, dtype, ids):
    """Whole prompt, then prefill and 8 decode steps, each fed the same tokens."""
    ours, reference = load_model(folder, device="cpu", exact=True, dtype=dtype), Reference(folder, dtype)
    assert ours.dtype == dtype
    assert torch.equal(ours(ids), reference.logits(ids))
    cache = KVCache(ours.config, 1, ids.shape[1] + 8, dtype=dtype)
    logits = ours(ids, cache=cache, last_only=True)
    assert torch.equal(logits, reference.feed(ids, last_only=True))
    for _ in range(8):
        token = logits.argmax(-1)
        logits = ours(token, cache=cache)
        assert torch.equal(logits, reference.feed(token))
    assert cache.lengths.tolist() == [ids.shape[1] + 8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"num_attention_heads": 6, "num_key_value_heads": 2},  # groups of three
        {"num_attention_heads": 4, "num_key_value_heads": 4},  # no groups
        {"num_attention_heads": 4, "num_key_value_heads": 1},
    ],
    ids=lambda changes: ",".join(f"{k}={v}" for k, v in changes.items()) or "base",
)
def test_logits_equal_the_reference(family, tmp_path, dtype, changes):
    folder = save_tiny(tmp_path / "model", family, dtype=dtype, **changes)
    compare_to_reference(folder, dtype, TOKENS)


def test_qwen3_with_attention_bias(tmp_path):
    folder = save_tiny(tmp_path / "model", "qwen3", attention_bias=True)
    compare_to_reference(folder, torch.float32, TOKENS)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("qwen2.5-0.5b", []),
        ("qwen3-0.6b", []),
        ("qwen2.5-7b", ["--vocab", "19008", "--shard-mb", "310"]),  # an untied head, in 5 shards
    ],
)
def test_published_shapes_cut_to_two_layers(shape, options, dtype, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / f"{shape}-2-layers"
    if not folder.exists():
        script = ROOT / "scripts" / "make_checkpoint.py"
        subprocess.run(
            [sys.executable, script, shape, folder, "--layers", "2", *options], check=True, capture_output=True
        )
    if "7b" in shape:
        assert len(list(folder.glob("*.safetensors"))) == 5
    ids = torch.randint(0, 19008, (1, 29), generator=torch.Generator().manual_seed(1))
    compare_to_reference(folder, dtype, ids)


@pytest.mark.parametrize("split", range(1, 12))
def test_every_split_of_a_prompt_gives_the_logits_of_the_whole(tiny, split):
    model = load_model(tiny, device="cpu", exact=True)
    whole = model(TOKENS)
    limit = 1e-5 * whole.abs().amax(-1, keepdim=True)
    cache = KVCache(model.config, 1, 12)
    parts = [model(TOKENS[:, :split], cache=cache)]
    parts += [model(TOKENS[:, i : i + 1], cache=cache) for i in range(split, 12)]
    assert ((torch.cat(parts, 1) - whole).abs() <= limit).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunks", [(12,), (5, 7), (1, 4, 1, 6), (1,) * 12], ids=str)
def test_one_shot_chunks_and_decode_in_every_dtype(tiny, dtype, chunks):
    """Warm caches meet masks and buffers of the model's dtype; half precision stays near float32."""
    model, wide = load_model(tiny, device="cpu", exact=True, dtype=dtype), load_model(tiny, device="cpu", exact=True)
    reference = Reference(tiny, dtype)
    cache = KVCache(model.config, 1, 12, dtype=dtype)
    for piece in TOKENS.split(chunks, dim=1):
        logits = model(piece, cache=cache)
        assert logits.dtype == dtype
        assert torch.equal(logits, reference.feed(piece))
    expected = wide(TOKENS)[:, -1]
    assert (logits[:, -1].float() - expected).abs().max() <= 0.1 * expected.abs().max()


def test_mask_is_aligned_to_the_last_position():
    def mask(past, new, T):
        past, new = torch.tensor(past), torch.tensor(new)
        return attention_mask(past, new, past[:, None] + torch.arange(T))

    assert mask([0], [5], 5) is None  # a prompt: is_causal
    assert mask([7], [1], 1) is None  # one token sees everything
    assert mask([3], [2], 2).int().tolist() == [[[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]]]
    rows = mask([3, 1], [1, 1], 1)  # rows of different length
    assert rows.int().tolist() == [[[[1, 1, 1, 1]]], [[[1, 1, 0, 0]]]]


def test_ragged_rows_equal_the_same_rows_alone(tiny):
    """Prompts of 3, 7 and 12 tokens in one call, then 5 more tokens each: nothing looks at padding."""
    model = load_model(tiny, device="cpu", exact=True)
    lengths = [3, 7, 12]
    padded = torch.stack([torch.cat((TOKENS[0, :n], torch.full((12 - n,), 155))) for n in lengths])
    together, alone = KVCache(model.config, 3, 17), [KVCache(model.config, 1, 17) for _ in lengths]
    logits = model(padded, cache=together, lengths=lengths, last_only=True)
    singles = [model(TOKENS[:, :n], cache=c, last_only=True) for n, c in zip(lengths, alone, strict=True)]
    for _ in range(5):
        for row, single in zip(logits, singles, strict=True):
            assert (row - single[0]).abs().max() <= 1e-5 * single.abs().max()
            assert row.argmax() == single.argmax()
        tokens = logits.argmax(-1)
        logits = model(tokens, cache=together)
        singles = [model(t[None], cache=c) for t, c in zip(tokens, alone, strict=True)]
    assert together.lengths.tolist() == [8, 12, 17]


def test_last_only_takes_each_rows_last_real_position(tiny):
    model = load_model(tiny, device="cpu", exact=True)
    ids = TOKENS.repeat(2, 1)
    full, last = model(ids), model(ids, lengths=[4, 12], last_only=True)
    for row, n in enumerate((4, 12)):
        assert torch.allclose(last[row, 0], full[row, n - 1], rtol=1e-5, atol=1e-5)


def test_lengths_shorter_than_the_padding_everywhere(tiny):
    model = load_model(tiny, device="cpu", exact=True)
    cache = KVCache(model.config, 1, 9)
    logits = model(TOKENS, cache=cache, lengths=[9], last_only=True)
    assert torch.allclose(logits[0, 0], model(TOKENS[:, :9])[0, -1], rtol=1e-5, atol=1e-5)
    assert cache.lengths.tolist() == [9]


def test_key_norm_and_query_norm_are_not_the_same(tmp_path):
    """Swapping the two weights must show; so must leaving the norm out for one token in decode."""
    model = load_model(save_tiny(tmp_path / "model", "qwen3"), device="cpu", exact=True)
    before = model(TOKENS)
    for block in model.model.layers:
        attention = block.self_attn
        attention.q_norm, attention.k_norm = attention.k_norm, attention.q_norm
    assert not torch.allclose(model(TOKENS), before, rtol=1e-2)


def test_positions_beyond_max_position_embeddings(family, tmp_path):
    """Angles come from positions, so no table ends; the plain forward checks no limit."""
    folder = save_tiny(tmp_path / "model", family, max_position_embeddings=32)
    ids = torch.arange(50)[None] * 3 % 160
    model = load_model(folder, device="cpu", exact=True)
    assert torch.equal(model(ids), Reference(folder).logits(ids))
    cos, _ = model.rope(torch.tensor([[49]]), torch.float32)
    hd = model.config.head_dim
    angle = 49 / 10000 ** (torch.arange(0, hd, 2).float() / hd)
    assert torch.allclose(cos[0, 0, 0], torch.cat((angle, angle)).cos(), atol=1e-5)


def test_casting_the_model_does_not_round_the_frequencies(tiny):
    model = load_model(tiny, device="cpu", exact=True)
    before = model.rope.inv_freq.clone()
    model.to(torch.bfloat16)
    assert torch.equal(model.rope.inv_freq, before)
    assert torch.equal(model(TOKENS), Reference(tiny, torch.bfloat16).logits(TOKENS))


def test_no_gradients_by_default(tiny):
    model = load_model(tiny, device="cpu", exact=True)
    cache = KVCache(model.config, 1, 12)
    logits = model(TOKENS, cache=cache)
    assert logits.grad_fn is None
    assert not logits.requires_grad
    assert cache.k.grad_fn is None
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.requires_grad_()
    model(TOKENS).sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(torch.zeros(1, 0, dtype=torch.int64)), "at least one token"),
        (lambda m: m(torch.zeros(3, dtype=torch.int64)), "at least one token"),
        (lambda m: m(TOKENS, lengths=[13]), "from 1 to 12"),
        (lambda m: m(TOKENS, lengths=[0]), "from 1 to 12"),
        (lambda m: m(TOKENS, lengths=[3, 3]), "1 numbers"),
        (lambda m: m(TOKENS, cache=KVCache(m.config, 2, 20)), "2 rows"),
    ],
)
def test_bad_calls(tiny, call, message):
    with pytest.raises(ValueError, match=message):
        call(load_model(tiny, device="cpu", exact=True))
