import math

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from qwen_scratch import InputError, SamplingParams
from qwen_scratch.sampling import Sampler, draw, keep_min_p, keep_top_k, keep_top_p, penalize_repetition

CPU = torch.device("cpu")


def sampler(file=None, prompt=(0,), vocab=1000, **asked):
    made = Sampler(SamplingParams(**asked), file)
    made.begin(list(prompt), vocab, CPU)
    return made


def random_logits(n, seed=0, ties=False):
    logits = torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 4
    return logits.bfloat16().float() if ties else logits  # bfloat16 has many equal values


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_filters_equal_the_reference(seed, ties):
    logits = random_logits(5000, seed, ties)
    ids = torch.randint(0, 5000, (1, 40), generator=torch.Generator().manual_seed(seed))
    seen = torch.zeros(5000, dtype=torch.bool)
    seen[ids[0]] = True
    for penalty in (0.7, 1.05, 2.0):
        theirs = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits[None])[0]
        assert torch.equal(penalize_repetition(logits, seen, penalty), theirs)
    for k in (1, 7, 50, 4999):
        assert torch.equal(keep_top_k(logits, k), TopKLogitsWarper(k)(ids, logits[None])[0])
    for p in (0.01, 0.5, 0.9, 0.95, 1 - 1e-7):
        assert torch.equal(keep_top_p(logits, p), TopPLogitsWarper(p)(ids, logits[None])[0])
    for p in (0.001, 0.05, 0.5, 1.0):
        assert torch.equal(keep_min_p(logits, p), MinPLogitsWarper(p)(ids, logits[None])[0])


def test_whole_chain_is_in_the_reference_order():
    logits = random_logits(5000, 3)
    ids = torch.arange(100)[None]
    chain = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(0.5),
            TopKLogitsWarper(40),
            TopPLogitsWarper(0.8),
            MinPLogitsWarper(0.1),
        ]
    )
    expected = chain(ids, logits[None])[0].softmax(-1)
    made = sampler(temperature=0.5, top_k=40, top_p=0.8, min_p=0.1, repetition_penalty=1.3, seed=0, vocab=5000)
    counts = torch.zeros(5000)
    for _ in range(4000):
        made.in_text.fill_(False)
        made.in_text[ids[0]] = True  # as at the first token, every time
        counts[int(made.pick(logits)[0])] += 1
    assert set(counts.nonzero().flatten().tolist()) <= set(expected.nonzero().flatten().tolist())
    assert (counts / 4000 - expected).abs().max() < 0.03


def test_nucleus_keeps_the_token_that_crosses_p():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert keep_top_p(logits, 0.6).isfinite().sum() == 2
    assert keep_top_p(logits, 0.85).isfinite().sum() == 3
    assert keep_top_p(torch.tensor([0.6, 0.4]).log(), 0.5).isfinite().sum() == 1


def test_temperature_comes_before_top_p():
    made = sampler(temperature=0.5, top_p=0.8, top_k=0, seed=1, vocab=3)
    assert {int(made.pick(torch.tensor([3.0, 2.0, 1.0]))[0]) for _ in range(200)} == {0}


def test_top_k_beyond_the_vocabulary_is_all_of_it():
    logits = random_logits(64)
    runs = [sampler(temperature=1.0, top_k=k, seed=5, vocab=64) for k in (100_000, 0)]
    draws = [[int(r.pick(logits)[0]) for _ in range(50)] for r in runs]
    assert draws[0] == draws[1]


def test_only_kept_tokens_are_drawn():
    scores = torch.full((151_936,), -math.inf)
    scores[[5, 70_000, 151_935]] = torch.tensor([0.0, 1.0, -20.0])
    generator = torch.Generator().manual_seed(0)
    assert {int(draw(scores, generator)) for _ in range(5000)} <= {5, 70_000, 151_935}


def test_greedy_takes_the_first_of_equals_and_no_random_numbers():
    state = torch.get_rng_state()
    made = sampler(temperature=0)
    logits = torch.zeros(1000)
    logits[[17, 400]] = 3.0
    assert {int(made.pick(logits)[0]) for _ in range(100)} == {17}
    assert made.generator is None
    assert torch.equal(torch.get_rng_state(), state)


def test_tiny_temperature_does_not_overflow():
    for logits in (torch.tensor([1e4, -1e4, 0.0]), torch.tensor([-5.0, -6.0, -7.0])):
        for temperature in (1e-5, 1e-20, 1e-40, 5e-324):
            for top_p in (1.0, 0.9):
                made = sampler(temperature=temperature, top_p=top_p, seed=0, vocab=3)
                assert {int(made.pick(logits)[0]) for _ in range(20)} == {0}


def test_a_seed_seeds_once_per_request():
    logits = torch.zeros(1000)
    state = torch.get_rng_state()

    def draws(seed):
        made = sampler(temperature=1.0, top_k=0, seed=seed)
        return [int(made.pick(logits)[0]) for _ in range(30)]

    assert draws(0) == draws(0)
    assert len(set(draws(0))) > 20
    assert draws(0) != draws(1)
    assert draws(None) != draws(None)
    assert torch.equal(torch.get_rng_state(), state)


def test_presence_penalty_counts_the_answer_only_and_once():
    made = sampler(temperature=0, presence_penalty=1.5, prompt=[2], vocab=4)
    logits = torch.tensor([1.0, 0.5, 0.4, -9.0])
    assert [int(made.pick(logits)[0]) for _ in range(6)] == [0, 1, 2, 0, 0, 0]


QWEN25 = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "num_beams": 1}


@pytest.mark.parametrize(
    ("file", "asked", "expected"),
    [
        ({}, {}, {"temperature": 0, "repetition_penalty": 1.0, "max_new_tokens": 512}),
        (QWEN25, {}, {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}),
        (QWEN25, {"top_p": 0.5}, {"temperature": 0.7, "top_p": 0.5, "top_k": 20}),
        (QWEN25, {"temperature": 0}, {"temperature": 0, "repetition_penalty": 1.05}),
        (QWEN25 | {"do_sample": False}, {}, {"temperature": 0}),
        (QWEN25 | {"do_sample": False}, {"temperature": 0.9}, {"temperature": 0.9, "top_k": 20}),
        ({"do_sample": True}, {}, {"temperature": 1.0, "top_k": 50, "top_p": 1.0}),
        ({}, {"top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9, "top_k": 50}),
        ({"max_new_tokens": 2048}, {}, {"max_new_tokens": 2048}),
        ({"max_new_tokens": 2048}, {"max_new_tokens": 5}, {"max_new_tokens": 5}),
    ],
)
def test_options_override_the_file_field_by_field(file, asked, expected):
    values = Sampler(SamplingParams(**asked), file).values()
    assert {name: values[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("temperature", [-0.1, math.nan, math.inf, "1", 10**400], [0, 1, 2.5]),
        ("top_p", [0, -1, 1.01, math.nan], [1, 1.0, 0.001]),
        ("top_k", [-1, 2.5, True], [0, 1, 10**9]),
        ("min_p", [-0.1, 1.5, math.nan], [0, 1.0]),
        ("repetition_penalty", [0, -1, math.inf], [0.5, 1]),
        ("presence_penalty", [math.nan, "x"], [-2, 0, 2]),
        ("max_new_tokens", [0, -5, 1.5], [1, 10**6]),
        ("seed", [-1, 2**64, 0.5], [0, 2**64 - 1]),
    ],
)
def test_values_out_of_range_are_named(name, bad, good):
    for value in bad:
        with pytest.raises(InputError, match=name):
            SamplingParams(**{name: value})
        if name not in ("seed",):
            with pytest.raises(InputError, match=rf"generation_config\.json: {name}"):
                Sampler(SamplingParams(), {name: value})
    for value in good:
        Sampler(SamplingParams(**{name: value}))


def test_other_values_of_the_wrong_kind():
    for bad in (2, None, [[1]], "12", ["2"], [2.5], [-5]):
        with pytest.raises(InputError, match="stop_token_ids"):
            SamplingParams(stop_token_ids=bad)
    with pytest.raises(InputError, match="ignore_eos"):
        SamplingParams(ignore_eos="no")
    with pytest.raises(InputError, match="do_sample"):
        Sampler(SamplingParams(), {"do_sample": "false"})
