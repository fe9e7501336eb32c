import gc
import weakref

import pytest
import torch

from qwen_scratch import InputError, KVCache, SamplingParams, engine, load_model
from qwen_scratch.sampling import Sampler

IDS = torch.tensor([[3, 141, 59, 26, 53, 58, 97, 93, 23, 84]])


@pytest.fixture
def model(tiny):
    return load_model(tiny, device="cpu", exact=True)


def request(ids, new):
    return engine.Request(ids, Sampler(SamplingParams(temperature=0)), max_new_tokens=new)


def test_shape_and_size(model):
    cache = KVCache(model.config, batch_size=2, max_seq_len=16, dtype=torch.bfloat16)
    c = model.config
    assert cache.k.shape == cache.v.shape == (3, 2, c.num_key_value_heads, 16, c.head_dim)
    assert cache.lengths.tolist() == [0, 0]
    assert cache.nbytes == 2 * 16 * c.kv_bytes_per_token(torch.bfloat16)


def test_raises_before_it_would_overflow_and_stays_as_it_was(model):
    cache = KVCache(model.config, 1, 12)
    model(IDS, cache=cache)
    k = cache.k.clone()
    with pytest.raises(IndexError, match=r"holds 12 .* 13"):
        model(IDS[:, :3], cache=cache)
    assert torch.equal(cache.k, k)
    assert cache.lengths.tolist() == [10]
    model(IDS[:, :2], cache=cache)  # exactly full
    with pytest.raises(IndexError, match=r"holds 12 .* 13"):
        cache.write(0, cache.k[0, :, :, :1], cache.v[0, :, :, :1], torch.tensor([1]))


def test_one_row_that_overflows_writes_nothing(model):
    cache = KVCache(model.config, 2, 12)
    model(IDS.repeat(2, 1), cache=cache, lengths=[10, 4])
    k = cache.k.clone()
    with pytest.raises(IndexError):
        model(IDS.repeat(2, 1)[:, :3], cache=cache)
    assert torch.equal(cache.k, k)
    model(IDS.repeat(2, 1)[:, :3], cache=cache, lengths=[2, 3])  # the padding of a full row is dropped
    assert cache.lengths.tolist() == [12, 7]


def test_request_that_does_not_fit_is_refused_before_any_token(model):
    cache = KVCache(model.config, 1, 16)
    assert len(list(engine.run(model, [request(IDS[0].tolist(), 6)], cache))) == 6
    cache = KVCache(model.config, 1, 16)
    with pytest.raises(InputError, match=r"17 .* 16"):
        next(engine.run(model, [request(IDS[0].tolist(), 7)], cache))
    assert cache.lengths.tolist() == [0]


def test_truncate_equals_a_fresh_run(model):
    cache = KVCache(model.config, 1, 20)
    model(IDS, cache=cache)
    for i in range(5):
        model(IDS[:, i : i + 1], cache=cache)
    cache.truncate(12)
    assert cache.lengths.tolist() == [12]
    again = model(torch.tensor([[77]]), cache=cache)

    fresh = KVCache(model.config, 1, 20)
    model(IDS, cache=fresh)
    for i in range(2):
        model(IDS[:, i : i + 1], cache=fresh)
    assert torch.equal(again, model(torch.tensor([[77]]), cache=fresh))
    cache.truncate(50)  # nothing there to forget
    assert cache.lengths.tolist() == [13]
    with pytest.raises(ValueError, match="-1"):
        cache.truncate(-1)


def test_buffers_stay_in_place_and_nothing_outlives_the_request(model, monkeypatch):
    made = []
    original = KVCache.__init__

    def spy(self, *args, **kwargs):
        original(self, *args, **kwargs)
        made.append((weakref.ref(self), self.k.data_ptr()))

    monkeypatch.setattr(KVCache, "__init__", spy)
    pointers = set()
    write = KVCache.write
    monkeypatch.setattr(KVCache, "write", lambda self, *a: pointers.add(self.k.data_ptr()) or write(self, *a))
    list(engine.run(model, [request(IDS[0].tolist(), 20)]))
    gc.collect()
    ((cache, pointer),) = made
    assert pointers == {pointer}  # one buffer from the first to the last token
    assert cache() is None


def test_cache_is_as_long_as_the_request(model, monkeypatch):
    sizes = []
    original = KVCache.__init__
    monkeypatch.setattr(KVCache, "__init__", lambda self, *a, **k: sizes.append(a[2]) or original(self, *a, **k))
    list(engine.run(model, [request(IDS[0].tolist(), 5)]))
    assert sizes == [15]  # not max_position_embeddings


def test_masked_leftovers_cannot_leak(model):
    """What a longer, forgotten row left behind must not change a shorter one."""
    cache = KVCache(model.config, 2, 20)
    model(IDS.repeat(2, 1), cache=cache)
    cache.truncate(0)
    cache.k.fill_(1e4)
    cache.v.fill_(-1e4)
    model(IDS.repeat(2, 1), cache=cache, lengths=[4, 10])
    logits = model(torch.tensor([[7], [7]]), cache=cache)
    alone = model(torch.cat((IDS[:, :4], torch.tensor([[7]])), 1))[0, -1]
    assert (logits[0, 0] - alone).abs().max() <= 1e-5 * alone.abs().max()
