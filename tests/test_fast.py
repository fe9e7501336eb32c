"""The quick path held against the exact one: the same model within rounding, in every way that it is used."""

import shutil
import subprocess
import sys

import pytest
import torch
from builders import save_tiny
from safetensors.torch import load_file, save_file
from test_smollm2 import CHAT, RAW

import qwen_scratch
from qwen_scratch import KVCache, SamplingParams, complete, complete_batch, load_model
from qwen_scratch.errors import InputError
from qwen_scratch.fast import weight_bytes
from qwen_scratch.linears import HalfLinear, HeldLinear, PackedLinear

IDS = [3, 141, 59, 26, 53, 58, 97, 93, 12, 77]
SHAPES = [
    {},
    {"num_attention_heads": 6, "num_key_value_heads": 2},
    {"num_attention_heads": 4, "num_key_value_heads": 4},
    {"num_attention_heads": 4, "num_key_value_heads": 1},
    {"tie_word_embeddings": False},
    {"attention_bias": True},
]


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def both(request, family, tmp_path_factory):
    """The fast and the exact model of one tiny checkpoint in float32."""
    folder = save_tiny(tmp_path_factory.mktemp("fast") / "m", family, **request.param)
    return load_model(folder, device="cpu"), load_model(folder, device="cpu", exact=True)


def near(ours, exact, bound=2e-5):
    assert (ours - exact).abs().max() <= bound * exact.abs().max()


def test_whole_prompts_chunks_and_single_tokens(both):
    fast, exact = both
    assert isinstance(fast.lm_head, PackedLinear)
    assert not isinstance(exact.lm_head, PackedLinear)
    ids = torch.tensor([IDS])
    near(fast(ids), exact(ids))
    for sizes in ((10,), (4, 6), (7, 1, 1, 1), (1,) * 10):
        caches = [KVCache(exact.config, 1, 10) for _ in both]
        start = 0
        for size in sizes:
            part = ids[:, start : start + size]
            near(fast(part, cache=caches[0]), exact(part, cache=caches[1]))
            start += size
        near(caches[0].k, caches[1].k)
        near(caches[0].v, caches[1].v)
        with pytest.raises(IndexError, match="holds 10 tokens per row"):  # and is left as it was
            fast(ids[:, :1], cache=caches[0])
        assert caches[0].lengths.tolist() == [10]


def test_ragged_rows(both):
    """Rows of different length, in prefill and then one token each, where a mask hides what shorter rows lack."""
    exact = both[1]
    ids = torch.tensor([IDS, IDS[::-1], [5] * 10])
    caches = [KVCache(exact.config, 3, 14) for _ in both]
    lengths = [10, 3, 6]
    ours, expected = (m(ids, cache=c, lengths=lengths, last_only=True) for m, c in zip(both, caches, strict=True))
    near(ours, expected)
    for token in (9, 8, 7):
        step = torch.tensor([[token]] * 3)
        near(*(m(step, cache=c) for m, c in zip(both, caches, strict=True)))


def test_greedy_and_sampled_ids_are_the_same(both):
    fast, exact = both
    for params in (
        SamplingParams(temperature=0, max_new_tokens=40),
        SamplingParams(temperature=1.0, seed=3, max_new_tokens=40),
    ):
        assert complete(fast, None, IDS, params).token_ids == complete(exact, None, IDS, params).token_ids
        together = complete_batch(fast, None, [IDS, IDS[:4]], params)
        assert [result.token_ids for result in together] == [
            complete(exact, None, ids, params).token_ids for ids in (IDS, IDS[:4])
        ]


def test_where_nothing_can_be_packed(tiny, monkeypatch):
    """Without oneDNN's operations, and for numbers that they do not know, the exact path is taken."""

    def missing(*_, **__):
        raise AttributeError("no such operation")

    monkeypatch.setattr("qwen_scratch.kinds.PackedLinear", missing)
    plain = load_model(tiny, device="cpu")
    assert torch.equal(plain(torch.tensor([IDS])), load_model(tiny, device="cpu", exact=True)(torch.tensor([IDS])))
    cache = KVCache(plain.config, 1, 2)
    for _ in range(2):  # one token by itself too
        plain(torch.tensor([[1]]), cache=cache)


def test_what_does_not_fit_stays_mapped(tiny, monkeypatch):
    monkeypatch.setattr("qwen_scratch.loading.available_memory", lambda: 1000.0)
    with pytest.warns(UserWarning, match="do not fit into memory packed"):
        model = load_model(tiny, device="cpu")
    assert not isinstance(model.lm_head, PackedLinear)
    cache = KVCache(model.config, 1, 2)
    for _ in range(2):
        model(torch.tensor([[1]]), cache=cache)
    with pytest.raises(InputError, match="more than the free memory"):
        load_model(tiny, device="cpu", quantize="int4")


@pytest.mark.parametrize("quantize", ["int8", "int4", "int4-128"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_quantised_model_is_one_model(family, tmp_path, quantize, dtype):
    """Prompt, chunks, single tokens, ragged rows: all the same function, up to the rounding of the activations."""
    folder = save_tiny(tmp_path / "m", family, num_attention_heads=6, num_key_value_heads=2)
    model, exact = load_model(folder, "cpu", dtype, quantize=quantize), load_model(folder, "cpu", "float32", exact=True)
    whole = model(torch.tensor([IDS]))
    assert whole.dtype == model.dtype == getattr(torch, dtype)
    bound = 0.1 if quantize == "int8" else 0.03
    for sizes in ((4, 6), (7, 1, 1, 1), (1,) * 10):
        cache = KVCache(model.config, 1, 10, dtype=model.dtype)
        parts = torch.tensor([IDS]).split(sizes, 1)
        near(torch.cat([model(part, cache=cache) for part in parts], 1).float(), whole.float(), bound)
    cache = KVCache(model.config, 2, 12, dtype=model.dtype)
    last = model(torch.tensor([IDS, IDS[::-1]]), cache=cache, lengths=[10, 4], last_only=True)
    near(last[0].float(), whole[0, -1:].float(), bound)
    assert kl(exact(torch.tensor([IDS]))[0], whole[0]) < {"int8": 0.01, "int4": 0.6, "int4-128": 0.8}[quantize]


def test_weights_are_counted_as_they_are_held(tiny, tmp_path):
    plain = load_model(tiny, "cpu", "bfloat16", exact=True)
    assert weight_bytes(plain) == 2 * plain.config.num_parameters
    biases = sum(p.nbytes for name, p in plain.named_parameters() if name.endswith("bias"))
    heads = sum(p.nbytes for name, p in plain.named_parameters() if name.endswith(("q_norm.weight", "k_norm.weight")))
    assert (
        weight_bytes(load_model(tiny, "cpu", "bfloat16")) == weight_bytes(plain) - biases - heads
    )  # a few small vectors
    quantised = weight_bytes(load_model(tiny, "cpu", "bfloat16", quantize="int8"))
    assert quantised < 0.9 * weight_bytes(plain)  # half of it, but for blocks that are filled up
    both = [save_tiny(tmp_path / str(tied), "qwen3", tie_word_embeddings=tied) for tied in (True, False)]
    tied, untied = (weight_bytes(load_model(folder, "cpu", "float32", quantize="int8")) for folder in both)
    embedding = load_model(both[1], "cpu", "float32").model.embed_tokens.weight
    assert untied - tied == embedding.nbytes  # beside the head in 8 bits, which both have


def test_16_bit_weights_are_held_as_such_in_float32(tiny_copy, monkeypatch):
    """Where all of them are, made by one thread or several; a single matrix with more bits, and none is."""

    def stored_as(kinds):
        (file,) = tiny_copy.glob("*.safetensors")
        tensors = load_file(file)
        save_file({name: tensor.to(kinds(name)) for name, tensor in tensors.items()}, file, {"format": "pt"})
        return load_model(tiny_copy, "cpu", "float32")

    ids = torch.tensor([IDS])
    wide = stored_as(lambda name: torch.float32 if "down_proj" in name else torch.bfloat16)
    assert {type(part) for part in wide.modules() if isinstance(part, HeldLinear)} == {PackedLinear}
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)
    several = stored_as(lambda _: torch.bfloat16)
    assert {type(part) for part in several.modules() if isinstance(part, HeldLinear)} == {HalfLinear}
    near(several(ids), load_model(tiny_copy, "cpu", "float32", exact=True)(ids))
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    assert torch.equal(load_model(tiny_copy, "cpu", "float32")(ids), several(ids))
    half, quarter = weight_bytes(wide), weight_bytes(several)
    assert half == pytest.approx(2 * quarter, rel=0.01)


def test_what_a_thread_cannot_do_is_the_callers_error(tiny, monkeypatch):
    def full(*_, **__):
        raise MemoryError

    monkeypatch.setattr("torch.get_num_threads", lambda: 3)
    monkeypatch.setattr("qwen_scratch.fast.FastMLP", full)
    with pytest.raises(RuntimeError, match="out of memory on cpu"):
        load_model(tiny, "cpu", "float32")


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@pytest.mark.parametrize(("stored", "dtype"), [("bfloat16", "float32"), ("float16", "bfloat16"), ("mixed", "float16")])
def test_weights_of_another_dtype_than_the_models(family, tmp_path, stored, dtype, quantize):
    """Also where a file mixes them; biases, norms and what is looked up are cast."""
    folder = (
        save_tiny(tmp_path / "m", family, attention_bias=True)
        if family == "qwen3"
        else save_tiny(tmp_path / "m", family)
    )
    for file in folder.glob("*.safetensors"):
        kinds = [torch.bfloat16, torch.float32, torch.float16] if stored == "mixed" else [getattr(torch, stored)]
        tensors = {name: tensor.to(kinds[n % len(kinds)]) for n, (name, tensor) in enumerate(load_file(file).items())}
        save_file(tensors, file, {"format": "pt"})
    model, exact = load_model(folder, "cpu", dtype, quantize=quantize), load_model(folder, "cpu", "float32", exact=True)
    expected = exact(torch.tensor([IDS]))
    cache = KVCache(model.config, 1, 10, dtype=model.dtype)
    ours = torch.cat([model(part, cache=cache) for part in torch.tensor([IDS]).split((9, 1), 1)], 1)
    assert ours.dtype == getattr(torch, dtype)
    bound = {None: 1e-5 if (stored, dtype) == ("bfloat16", "float32") else 0.1, "int8": 0.2, "int4": 1.0}[quantize]
    near(ours.float(), expected, bound)


MEASURE = """
import sys, torch
from qwen_scratch import SamplingParams, complete, load_model
from qwen_scratch.fast import weight_bytes

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

torch.nn.functional.linear(torch.ones(1, 8), torch.ones(8, 8)).sum()
before = status("VmRSS")
model = load_model(sys.argv[1], device="cpu", dtype=sys.argv[2], quantize=None if sys.argv[3] == "None" else sys.argv[3])
complete(model, None, [1, 2, 3], SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True))
print(status("VmHWM") - before, weight_bytes(model))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("dtype", "quantize", "layers"),  # 350 to 650 MB each as they are held, the 4-bit one 200
    [("bfloat16", None, 24), ("float32", None, 20), ("bfloat16", "int8", 24), ("float32", "int4", 24)],
)
def test_peak_memory_is_once_the_weights(tmp_path_factory, dtype, quantize, layers):
    """Packed layer by layer, each tensor from a mapping of its own that is then let go: never both forms of all."""
    folder = tmp_path_factory.getbasetemp() / f"packed-{dtype}-{quantize}"
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": layers, "vocab_size": 16384}
    save_tiny(folder, "qwen3", dtype=torch.bfloat16, **sizes)
    command = [sys.executable, "-c", MEASURE, folder, dtype, str(quantize)]
    out = subprocess.run(command, check=True, capture_output=True, text=True)
    peak, weights = map(int, out.stdout.split())
    print(f"{dtype}, {quantize}: {weights / 2**20:.0f} MiB as held, peak {peak / 2**20:.0f} MiB")
    assert peak < 1.2 * weights + 100 * 2**20  # what the libraries set up for themselves does not grow with the weights
    shutil.rmtree(folder)


def kl(p, q):
    """Mean KL divergence of the next-token distributions, in nats; logits [N, V]."""
    a, b = p.float().log_softmax(-1), q.float().log_softmax(-1)
    return float((a.exp() * (a - b)).sum(-1).mean())


def decode_logits(model, ids, start):
    """Logits of ids[start:], fed one by one behind a prompt."""
    cache = KVCache(model.config, 1, len(ids), dtype=model.dtype)
    model(torch.tensor([ids[:start]]), cache=cache)
    return torch.cat([model(torch.tensor([[i]]), cache=cache)[0] for i in ids[start:]])


def test_trained_weights_in_bfloat16(smollm2):
    """As near to the exact path, decoding, as that is to itself when it reads the same tokens as a prompt."""
    (fast, tokenizer), exact = (
        qwen_scratch.load(smollm2, "cpu", "bfloat16"),
        load_model(smollm2, "cpu", "bfloat16", exact=True),
    )
    ours, own = [], []
    for prompt in (CHAT[6], CHAT[9], RAW[2], RAW[4]):
        ids = tokenizer.encode(prompt)
        start = len(ids) // 2
        expected = decode_logits(exact, ids, start)
        ours.append(kl(expected, decode_logits(fast, ids, start)))
        own.append(kl(expected, exact(torch.tensor([ids]))[0, start:]))
    print(
        f"mean KL, decoding: fast against exact {sum(ours) / 4:.2e}, exact against its own prefill {sum(own) / 4:.2e}"
    )
    assert sum(ours) <= sum(own)
