"""The comparison of every tensor with the reference, and the command that runs it."""

import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from builders import edit_json, randomize, save_tiny, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode

import qwen_scratch
from qwen_scratch import KVCache, QwenConfig, SamplingParams, load_model, parity
from qwen_scratch.compare import Way, compare, lockstep
from qwen_scratch.loading import expand_heads
from qwen_scratch.model import RMSNorm
from qwen_scratch.observe import OPS, observe
from qwen_scratch.reference import Reference
from qwen_scratch.rope import Rope, apply_rope

IDS = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33, 83, 27, 95]
DTYPES = [torch.float32, torch.bfloat16]

# hidden, MLP, heads, key/value heads, head_dim, tied: all divided by 8, so that every ratio is the published one
PUBLISHED = {
    "qwen2.5-0.5b": (112, 608, 14, 2, 8, True),
    "qwen2.5-1.5b": (192, 1120, 12, 2, 16, True),
    "qwen2.5-3b": (256, 1376, 16, 2, 16, True),
    "qwen2.5-7b": (448, 2368, 28, 4, 16, False),
    "qwen2.5-14b": (640, 1728, 40, 8, 16, False),
    "qwen2.5-32b": (640, 3456, 40, 8, 16, False),
    "qwen2.5-72b": (1024, 3696, 64, 8, 16, False),
    "qwen3-0.6b": (128, 384, 16, 8, 16, True),
    "qwen3-1.7b": (256, 768, 16, 8, 16, True),
    "qwen3-4b": (320, 1216, 32, 8, 16, True),
    "qwen3-8b": (512, 1536, 32, 8, 16, False),
    "qwen3-14b": (640, 2176, 40, 8, 16, False),
    "qwen3-32b": (640, 3200, 64, 8, 16, False),
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def both(folder, dtype=torch.float32):
    return load_model(folder, device="cpu", exact=True, dtype=dtype), Reference(folder, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_ratios_are_equal_at_every_op(tmp_path, name, dtype):
    hidden, mlp, heads, kv, hd, tied = PUBLISHED[name]
    family = name.split("-")[0].replace("qwen2.5", "qwen2")
    sizes = {
        "hidden_size": hidden, "intermediate_size": mlp, "num_attention_heads": heads, "num_key_value_heads": kv,
        "head_dim": hd, "tie_word_embeddings": tied, "num_hidden_layers": 2,
    }  # fmt: skip
    if family == "qwen2":
        del sizes["head_dim"]
        assert hidden // heads == hd
    folder = save_tiny(tmp_path / name, family, dtype=dtype, **sizes)
    report = parity.check(*both(folder, dtype), IDS, steps=6)
    assert report["ok"], parity.table(report)
    wanted = set(OPS) - (set() if family == "qwen3" else {"q_norm", "k_norm"})
    for way, result in report["ways"].items():
        assert result["ops"].keys() == wanted, way
        assert result["equal"] or way == "ragged batch"
    assert report["greedy"] == {"tokens": 6, "equal": True, "same_until": 6}


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_shortest_prompts(tiny, length):
    report = parity.check(*both(tiny), IDS[:length], steps=4)
    assert report["ok"], parity.table(report)


def test_float16_within_bounds(tiny):
    report = parity.check(*both(tiny, torch.float16), IDS, steps=4)
    assert report["ok"], parity.table(report)
    assert all(way["equal"] for name, way in report["ways"].items() if name != "ragged batch")


def test_observation_leaves_nothing_behind(tiny):
    model = load_model(tiny, device="cpu", exact=True)
    ids = torch.tensor([IDS])
    before = model(ids)
    seen = []
    with observe(model, lambda op, layer, tensor: seen.append((op, layer, tuple(tensor.shape)))):
        model(ids)
    count = len(seen)
    assert torch.equal(model(ids), before)
    assert len(seen) == count
    assert "project" not in vars(model.model.layers[0].self_attn)
    c = model.config
    assert seen[0] == ("embedding", None, (1, 16, c.hidden_size))
    assert ("k_rope", 2, (1, c.num_key_value_heads, 16, c.head_dim)) in seen
    assert seen[-1] == ("logits", None, (1, 16, c.vocab_size))


def test_differences_are_measured():
    a = torch.tensor([[1.0, -2.0], [4.0, 0.5]])
    assert compare(a, a.clone()).equal
    b = a.clone()
    b[1, 0] += 2**-20  # two units in the last place of 4
    difference = compare(b, a)
    assert (difference.equal, difference.max_abs, difference.max_ulp) == (False, 2**-20, 2.0)
    assert difference.max_rel == pytest.approx(2**-22)
    assert not compare(a[:1], a).equal
    assert not compare(a.bfloat16(), a).equal
    nan = torch.tensor([[float("nan"), float("inf")]])
    assert compare(nan, nan.clone()).equal
    for ours, theirs in ((nan, torch.tensor([[float("nan"), 1.0]])), (torch.tensor([[2.0, 1.0]]), nan)):
        assert compare(ours, theirs).max_abs == float("inf")
        assert compare(ours, theirs).max_rel > 1
    assert not compare(torch.tensor([[-0.0]]), torch.tensor([[0.0]])).equal  # all bits means all bits
    way = Way("broken")
    way.add("logits", None, torch.full((1, 2, 4), float("nan")).half(), torch.ones(1, 2, 4).half())
    assert not parity.bound_holds(way, exact=False, wide=False)
    json.dumps(way.ops["logits"].as_json(), allow_nan=False)


def test_an_observer_cannot_change_the_forward(tiny):
    model = load_model(tiny, device="cpu", exact=True)
    before, first = model(torch.tensor([IDS])), {}
    with observe(model, lambda op, layer, tensor: first.setdefault(op, tensor)):  # returns something
        assert torch.equal(model(torch.tensor([IDS])), before)


def test_a_failure_on_our_side_ends_the_comparison(tiny):
    model, reference = both(tiny)
    ids = torch.tensor([IDS])

    def fail():
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        lockstep(Way("x"), model, fail, reference, lambda: reference.logits(ids))
    with pytest.raises(KeyError, match="broken"):
        lockstep(Way("x"), model, lambda: model(ids), reference, fail)
    with pytest.raises(RuntimeError, match="order of operations differs"):
        lockstep(Way("x"), model, lambda: model.lm_head(torch.ones(1, 48)), reference, lambda: reference.logits(ids))
    assert parity.check(model, reference, IDS, steps=2)["ok"]  # nothing is left hooked


def test_the_first_difference_is_named(tiny):
    model, reference = both(tiny)
    model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    report = parity.check(model, reference, IDS, steps=4)
    assert not report["ok"]
    assert report["ways"]["whole prompt"]["first_difference"] == "layer 1, up"
    assert "whole prompt: first difference in layer 1, up" in parity.table(report)
    assert "OUTSIDE THE STATED BOUNDS" in parity.table(report)


def command(*args, cwd):
    run = [sys.executable, "-m", "qwen_scratch.parity", *map(str, args)]
    return subprocess.run(run, capture_output=True, text=True, check=False, cwd=cwd)


def test_command(tiny, tmp_path):
    done = command(tiny, "--steps", 4, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("within the stated bounds") == 2  # float32 and bfloat16
    assert done.stdout.count("\nk_rope ") == 2
    done = command(tiny, "--steps", 4, "--dtype", "float32", "--prompt", "the cat", "--json", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert report["ok"] and report["prompt_tokens"] < 5 and report["dtype"] == "float32"
    assert report["ways"]["chunks"]["ops"]["q_rope"] == {"equal": True, "max_abs": 0.0, "max_ulp": 0.0, "max_rel": 0.0}


def test_command_without_a_tokenizer(tmp_path):
    folder = save_tiny(tmp_path / "model", "qwen3")
    done = command(folder, "--dtype", "float32", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["prompt_tokens"] == 64
    assert command(folder, "--prompt", "hi", cwd=tmp_path).returncode == 2


def test_command_says_where_it_failed(tiny_copy, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: F.rms_norm(x, x.shape[-1:], self.weight, 1e-3))
    assert parity.main([str(tiny_copy), "--dtype", "float32", "--steps", "2"]) == 1
    assert "first difference in layer 0, input_norm" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "word"),
    [(["nowhere"], "nowhere"), (["{}", "--steps", "0"], "--steps"), (["{}", "--dtype", "int8"], "int8")],
)
def test_command_with_wrong_input(tiny, tmp_path, args, word):
    done = command(*[arg.format(tiny) for arg in args], cwd=tmp_path)
    assert done.returncode == 2
    assert word in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_without_transformers(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(qwen_scratch.InputError, match=r"pip install 'qwen_scratch\[test\]'"):
        Reference(tiny)


# --- ragged batches


def test_rows_of_a_batch_give_what_they_give_alone(tiny):
    """Prompts of 3, 7 and 12 tokens, 20 steps: logits within 1e-5 of the row's largest, and the same ids."""
    model = load_model(tiny, device="cpu", exact=True)
    lengths, tolerance, closest = [3, 7, 12], 1e-5, 1.0
    rows = [(torch.tensor(IDS[:n]) + 26) % 160 for n in lengths]  # a choice without near-ties, see the end
    together, alone = KVCache(model.config, 3, 32), [KVCache(model.config, 1, 32) for _ in rows]
    for _ in range(21):
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=155)
        logits = model(padded, cache=together, lengths=[len(row) for row in rows], last_only=True)
        singles = [model(row[None], cache=cache, last_only=True) for row, cache in zip(rows, alone, strict=True)]
        for row, single in zip(logits, singles, strict=True):
            largest = single.abs().max()
            assert (row - single[0]).abs().max() <= tolerance * largest
            first, second = single.flatten().topk(2).values
            closest = min(closest, float((first - second) / largest))
        rows = [row.argmax(-1) for row in logits]
        assert [int(row) for row in rows] == [int(single.argmax()) for single in singles]
    assert closest > 100 * tolerance  # the winners are clear, so equal ids mean something


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.0, "top_k": 20, "seed": 3}], ids=str)
def test_complete_batch_equals_one_by_one(tiny, params):
    model, tokenizer = qwen_scratch.load(tiny, device="cpu", exact=True)
    params = SamplingParams(max_new_tokens=20, **params)
    prompts = ["the cat", IDS, [{"role": "user", "content": "the dog ran " * 6}], "漢字"]
    together = qwen_scratch.complete_batch(model, tokenizer, prompts, params)
    for prompt, result in zip(prompts, together, strict=True):
        single = qwen_scratch.complete(model, tokenizer, prompt, params)
        assert result.token_ids == single.token_ids
        assert (result.text, result.thinking, result.stop_reason) == (single.text, single.thinking, single.stop_reason)
    assert qwen_scratch.complete_batch(model, tokenizer, [], params) == []


def test_rows_finish_at_different_times(tiny):
    model = load_model(tiny, device="cpu", exact=True)
    prompts = [IDS[:3], IDS[:9], IDS[:5]]
    free = [
        qwen_scratch.complete(model, None, ids, SamplingParams(temperature=0, max_new_tokens=12)) for ids in prompts
    ]
    model.generation_config = {"eos_token_id": [free[0].token_ids[1], free[1].token_ids[6]]}
    calls = []
    model.model.embed_tokens.register_forward_pre_hook(lambda module, args: calls.append(args[0].shape))
    params = SamplingParams(temperature=0, max_new_tokens=12)
    single = [qwen_scratch.complete(model, None, ids, params) for ids in prompts]
    longest = max(len(result.token_ids) for result in single)
    calls.clear()
    results = qwen_scratch.complete_batch(model, None, prompts, params)
    assert [r.token_ids for r in results] == [r.token_ids for r in single]
    assert [r.stop_reason for r in results] == [r.stop_reason for r in single]
    assert len({len(r.token_ids) for r in results}) > 1
    assert len(calls) == longest  # no forward after the last row has ended


def test_a_seeded_row_does_not_depend_on_its_neighbours(tiny):
    model = load_model(tiny, device="cpu", exact=True)
    params = SamplingParams(temperature=1.2, top_k=0, seed=1, max_new_tokens=10)
    alone = qwen_scratch.complete(model, None, IDS, params).token_ids
    for other in (IDS[:2], IDS[::-1]):
        assert qwen_scratch.complete_batch(model, None, [other, IDS], params)[1].token_ids == alone


def test_an_aborted_run_leaves_no_trace(tiny):
    model = load_model(tiny, device="cpu", exact=True)
    params = SamplingParams(temperature=0, max_new_tokens=8)
    before = qwen_scratch.complete(model, None, IDS, params).token_ids

    def explode(module, args):
        if args[0].shape[1] == 1:
            raise RuntimeError("power cut")

    hook = model.model.layers[1].register_forward_pre_hook(explode)
    with pytest.raises(RuntimeError, match="power cut"):
        qwen_scratch.complete(model, None, IDS[::-1], params)
    hook.remove()
    assert qwen_scratch.complete(model, None, IDS, params).token_ids == before


# --- RoPE


def reference_rope(changes, max_positions=131072):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    config = tiny_config("qwen3", head_dim=128, max_position_embeddings=max_positions, **changes)
    return Qwen3RotaryEmbedding(config), QwenConfig.from_dict(json.loads(config.to_json_string(use_diff=False)))


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_type": "default"},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32768},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "attention_factor": 1.3},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
            "beta_fast": 16,
            "beta_slow": 2,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "truncate": False},
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 4096,
            "mscale": 0.7,
            "mscale_all_dim": 1.0,
        },
        {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 4096},
    ],
    ids=str,
)
def test_rope_tables_equal_the_reference(settings):
    theirs, config = reference_rope({"rope_parameters": {"rope_theta": 1000000.0} | settings})
    positions = torch.tensor([[0, 1, 5, 1000, 4095, 32767, 32768, 131071]])
    for dtype in (torch.float32, torch.bfloat16):
        cos, sin = Rope(config)(positions, dtype)
        their_cos, their_sin = theirs(torch.zeros(1, dtype=dtype), positions)
        assert torch.equal(cos[:, 0], their_cos)
        assert torch.equal(sin[:, 0], their_sin)
    if settings["rope_type"] == "yarn":
        assert config.context_length == int(settings["factor"] * settings["original_max_position_embeddings"])


def test_rotation_equals_the_reference_at_any_position():
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    theirs, config = reference_rope({"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}})
    positions = torch.tensor([[0, 1, 5, 1000]])
    q, k = torch.randn(1, 4, 4, 128), torch.randn(1, 2, 4, 128)
    cos, sin = Rope(config)(positions, torch.float32)
    their_q, their_k = apply_rotary_pos_emb(q, k, *theirs(q, positions))
    assert torch.equal(apply_rope(q, cos, sin), their_q)
    assert torch.equal(apply_rope(k, cos, sin), their_k)


def test_spellings_of_one_setting():
    base = tiny_config("qwen3", max_position_embeddings=256).to_dict()
    base = {key: value for key, value in base.items() if key not in ("rope_parameters", "rope_theta")}
    yarn = {"factor": 4.0, "original_max_position_embeddings": 64}
    configs = [
        QwenConfig.from_dict(base | spelling)
        for spelling in (
            {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **yarn}},
            {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", **yarn}},
            {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "type": "yarn", **yarn}},
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **yarn}},
            {"rope_parameters": {"type": "yarn", "rope_theta": 1e6, **yarn}},
            {"rope_theta": 1e6, "rope_parameters": {"rope_type": "yarn", **yarn}},
        )
    ]
    assert configs[0].yarn is not None
    assert all(config == configs[0] for config in configs)
    plain = [
        QwenConfig.from_dict(base | {"rope_theta": 1e6} | spelling)
        for spelling in (
            {},
            {"rope_scaling": None},
            {"rope_scaling": {}},
            {"rope_scaling": {"type": "default"}},
            {"rope_parameters": {"rope_type": "default"}},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        )
    ]
    assert plain[0].yarn is None
    assert all(config == plain[0] for config in plain)


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_yarn_changes_short_prompts_too(family, tmp_path, spelling):
    folder = save_tiny(
        tmp_path / "yarn", family, rope_theta=None, rope_parameters=dict(YARN), max_position_embeddings=256
    )
    if spelling == "rope_scaling":  # as older files and Qwen's own instructions have it
        old = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
        edit_json(folder / "config.json", rope_parameters=None, rope_theta=10000.0, rope_scaling=old)
    plain = load_model(save_tiny(tmp_path / "plain", family), device="cpu", exact=True)
    model, reference = both(folder)
    ids = torch.tensor([IDS[:5]])
    assert torch.equal(model(ids), reference.logits(ids))
    assert not torch.allclose(model(ids), plain(ids), rtol=1e-3)
    assert model.config.context_length == 256
    report = parity.check(model, reference, IDS, steps=4)
    assert report["ok"], parity.table(report)


# --- numerics


def test_cached_keys_equal_the_references(tiny):
    """Stored after norm and rotation, in the first layer and the last."""
    model, reference = both(tiny)
    cache = KVCache(model.config, 1, 16)
    for piece in torch.tensor([IDS]).split([9, 1, 6], dim=1):
        model(piece, cache=cache)
        reference.feed(piece)
    for layer in (0, 2):
        assert torch.equal(cache.k[layer], reference.cache.layers[layer].keys)
        assert torch.equal(cache.v[layer], reference.cache.layers[layer].values)


@pytest.mark.parametrize("scale", [0.02, 1, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_norm_equals_the_reference(scale, dtype):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    for shape in ((2, 7, 96), (2, 7, 4, 32)):
        ours, theirs = RMSNorm(shape[-1], 1e-6), Qwen3RMSNorm(shape[-1], 1e-6)
        weight = (1 + 0.3 * torch.randn(shape[-1])).to(dtype)
        ours.weight.data, theirs.weight.data = weight, weight
        x = (scale * torch.randn(shape)).to(dtype)
        assert torch.equal(ours(x), theirs(x))


@pytest.fixture
def large_biases(tmp_path):
    """q·k reaches 230,400 before scaling: beyond float16, and coarse in bfloat16."""
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    from transformers import Qwen2ForCausalLM

    model = randomize(Qwen2ForCausalLM(tiny_config("qwen2", **sizes)))
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.q_proj.bias.fill_(60)
            block.self_attn.k_proj.bias.fill_(60)
    model.save_pretrained(tmp_path / "biased")
    return tmp_path / "biased"


def attention_of_first_layer(model, ids):
    seen = {}
    with observe(model, lambda op, layer, tensor: seen.setdefault((op, layer), tensor)):
        model(ids)
    return seen["attention", 0].float()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 0.02), (torch.bfloat16, 0.1)], ids=str)
def test_large_queries_and_keys_neither_overflow_nor_coarsen(large_biases, dtype, bound):
    ids = torch.tensor([IDS])
    wide = attention_of_first_layer(load_model(large_biases, device="cpu", exact=True), ids)
    model = load_model(large_biases, device="cpu", exact=True, dtype=dtype)
    half = attention_of_first_layer(model, ids)
    assert half.isfinite().all()
    # What the fused kernel itself loses on float32 inputs rounded to this dtype is the yardstick.
    assert (half - wide).abs().max() <= bound * wide.abs().max()
    report = parity.check(model, Reference(large_biases, dtype), IDS, steps=4)
    assert report["ok"], parity.table(report)


def test_float16_overflow_is_an_error_that_says_so(large_biases):
    model = load_model(large_biases, device="cpu", exact=True, dtype=torch.float16)
    model.model.layers[0].mlp.down_proj.weight.mul_(1e4)
    with pytest.raises(RuntimeError, match=r"non-finite logits.*float16 overflows"):
        qwen_scratch.complete(model, None, IDS, SamplingParams(temperature=0, max_new_tokens=4))


@pytest.mark.parametrize(("queries", "keys"), [(1, 5), (1, 37), (5, 5), (5, 37)])
def test_expanded_grouped_and_plain_attention_agree(queries, keys):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 6, queries, 32, generator=generator)
    k, v = (torch.randn(1, 2, keys, 32, generator=generator) for _ in range(2))
    mask = torch.arange(keys) <= torch.arange(keys - queries, keys)[:, None]
    wide_k, wide_v = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)
    scores = (q @ wide_k.transpose(2, 3) / 32**0.5).masked_fill(~mask, -torch.inf)
    plain = scores.softmax(-1) @ wide_v
    for out in (
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True),
        F.scaled_dot_product_attention(q, wide_k, wide_v, attn_mask=mask),
    ):
        assert (out - plain).abs().max() <= 1e-5


def test_expanding_heads_changes_nothing(tiny):
    model = load_model(tiny, device="cpu", exact=True)
    ids = torch.tensor([IDS])
    before = model(ids)
    expand_heads(model)
    assert torch.allclose(model(ids), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv"), [(6, 2), (4, 2)])
def test_query_head_reads_its_own_group(tmp_path, heads, kv):
    model = load_model(
        save_tiny(tmp_path / "m", "qwen3", num_attention_heads=heads, num_key_value_heads=kv), device="cpu", exact=True
    )
    ids = torch.tensor([IDS])
    before = attention_of_first_layer(model, ids)
    hd = model.config.head_dim
    model.model.layers[0].self_attn.v_proj.weight[hd : 2 * hd] = 0  # key/value head 1
    changed = (attention_of_first_layer(model, ids) != before).view(1, 16, heads, hd).any(-1).any(1)[0]
    group = heads // kv
    assert changed.tolist() == [h // group == 1 for h in range(heads)]


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return out


def test_a_long_prompt_makes_no_square_tensor(tmp_path):
    """Prefill of 2k, 4k, 8k tokens: the largest tensor grows with the length, not with its square."""
    model = load_model(save_tiny(tmp_path / "m", "qwen3", max_position_embeddings=8192), device="cpu", exact=True)
    sizes = []
    for length in (2048, 4096, 8192):
        cache = KVCache(model.config, 1, length)
        with torch.inference_mode(), Largest() as largest:
            model(torch.randint(0, 160, (1, length)), cache=cache, last_only=True)
        sizes.append(largest.numbers)
    assert sizes[1] == 2 * sizes[0]
    assert sizes[2] == 4 * sizes[0]
    assert sizes[2] < 8192 * 8192 / 10
