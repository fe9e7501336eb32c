"""The step of fixed shapes that a GPU captures, run as it is on the CPU: the same tokens as the ordinary way."""

import pytest
import torch
from builders import save_tiny

from qwen_scratch import KVCache, SamplingParams, captured, complete, complete_batch, load_model
from qwen_scratch.captured import CapturedQwen, Decoder

IDS = [3, 141, 59, 26, 53, 58, 97, 93, 12, 77]


@pytest.fixture(scope="module")
def models(family, tmp_path_factory):
    """The ordinary model, and the captured kind with its parameters."""
    folder = save_tiny(tmp_path_factory.mktemp("captured") / "m", family)
    plain = load_model(folder, device="cpu", exact=True)
    model = CapturedQwen(plain.config)
    model.load_state_dict(plain.state_dict())
    return plain, model


def near(ours, expected):
    assert (ours - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.fixture
def sizes(monkeypatch):
    """Small ones, so that a short run crosses their borders; returns what was looked at."""
    seen = []
    step = captured.fixed_step
    monkeypatch.setattr(captured, "SIZES", (4, 8, 16))
    monkeypatch.setattr(captured, "fixed_step", lambda *args: seen.append(args[-1]) or step(*args))
    return seen


def test_one_row(models, sizes):
    """Across the borders of the sizes and up to the end of the cache, whose unfilled part must never show."""
    caches = [KVCache(model.config, 1, 19) for model in models]
    for cache in caches:
        cache.k.fill_(1e4)  # whoever looks at what is not there yet would notice
        cache.v.fill_(1e4)
    for model, cache in zip(models, caches, strict=True):
        model(torch.tensor([IDS[:3]]), cache=cache)
    for token in range(3, 19):
        near(*(model(torch.tensor([[token]]), cache=cache) for model, cache in zip(models, caches, strict=True)))
        assert caches[0].lengths == caches[1].lengths == token + 1
    near(caches[1].k, caches[0].k)
    near(caches[1].v, caches[0].v)
    assert sizes == [4] + [8] * 4 + [16] * 8 + [19] * 3
    with pytest.raises(IndexError, match="holds 19 tokens"):
        models[1](torch.tensor([[1]]), cache=caches[1])


def test_ragged_rows_and_truncation(models, sizes):
    """Each row at its own position; a cache that was cut in between is followed."""
    plain = models[0]
    caches = [KVCache(plain.config, 3, 30) for _ in models]
    prompt = torch.tensor([IDS, IDS[::-1], [5] * 10])
    for model, cache in zip(models, caches, strict=True):
        model(prompt, cache=cache, lengths=[10, 3, 6])
    for cut in (None, 7, None, 2, None):
        for cache in caches:
            if cut is not None:
                cache.truncate(cut)
        step = torch.tensor([[9], [8], [7]])
        near(*(model(step, cache=cache) for model, cache in zip(models, caches, strict=True)))
        assert torch.equal(caches[0].lengths, caches[1].lengths)
    assert set(sizes) == {4, 8, 16}


def test_the_same_completions(models, sizes):
    plain, model = models
    for params in (
        SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=3, max_new_tokens=20, ignore_eos=True),
    ):
        assert complete(model, None, IDS, params).token_ids == complete(plain, None, IDS, params).token_ids
        pairs = zip(*(complete_batch(m, None, [IDS, IDS[:4]], params) for m in models), strict=True)
        for expected, ours in pairs:
            assert ours.token_ids == expected.token_ids
    assert sizes  # it was the step in question that ran


def test_no_buffer_is_shared_between_caches(models):
    """Two requests that take turns do not disturb each other, in and out of inference mode."""
    plain, model = models
    caches = [KVCache(plain.config, 1, 20) for _ in range(4)]
    for cache, part in zip(caches, (IDS[:4], IDS[4:]) * 2, strict=True):
        model(torch.tensor([part]), cache=cache)
    for token in (5, 6, 7):
        with torch.inference_mode(token == 6):
            for ours, theirs in ((caches[0], caches[2]), (caches[1], caches[3])):
                near(model(torch.tensor([[token]]), cache=ours), plain(torch.tensor([[token]]), cache=theirs))
    assert isinstance(caches[0].decoder, Decoder)
    assert caches[0].decoder is not caches[1].decoder
