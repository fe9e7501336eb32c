import math

import pytest
import torch
from builders import save_tiny, tiny_config
from transformers import (
    GenerationConfig,
    MinPLogitsWarper,
    Qwen2ForCausalLM,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from qwen_scratch import InputError, SamplingParams, complete, load_model, sampling
from qwen_scratch.sampling import Sampler, draw, keep_min_p, keep_top_k, keep_top_p, penalize_repetition

CPU = torch.device("cpu")


def sampler(file=None, prompt=(0,), vocab=1000, **asked):
    made = Sampler(SamplingParams(**asked), file)
    made.begin(list(prompt), vocab, CPU)
    return made


def random_logits(n, seed=0, ties=False):
    logits = torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 4
    return logits.bfloat16().float() if ties else logits  # bfloat16 has many equal values


V = 151_936  # Qwen's vocabulary


def wide_logits(kind, seed=0):
    """Random logits as a head gives them: float32, or bfloat16 with its many equal values, or with ties at the top."""
    logits = torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 3
    if kind == "ties":
        logits = (logits * 2).round() / 2
    return logits.bfloat16() if kind == "bfloat16" else logits


def at_boundaries(logits):
    """Values of top_p that a token ends exactly on, counted from the small end as the filter does; and both sides of them."""
    sums = logits.sort().values.softmax(-1).cumsum(-1)
    exact = [1 - float(sums[-n]) for n in (2, 3, 10, 100, 2000)]
    return [p for x in exact for p in (x, x - 1e-6, x + 1e-6) if 0 < p < 1]


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "ties"])
@pytest.mark.parametrize("seed", range(3))
def test_filters_equal_the_reference(kind, seed):
    logits = wide_logits(kind, seed).float()  # the reference's loop, too, goes on in float32
    ids = torch.randint(0, V, (1, 40), generator=torch.Generator().manual_seed(seed))
    seen = torch.zeros(V, dtype=torch.bool)
    seen[ids[0]] = True
    for penalty in (0.7, 1.0, 1.05, 2.0):
        theirs = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits[None])[0]
        assert torch.equal(penalize_repetition(logits, seen, penalty), theirs)
    for k in (1, 7, 50, V - 1, V):
        assert torch.equal(keep_top_k(logits, k), TopKLogitsWarper(k)(ids, logits[None])[0])
    for p in [0.01, 0.5, 0.95, 1 - 1e-7, *at_boundaries(logits)]:
        assert torch.equal(keep_top_p(logits, p), TopPLogitsWarper(p)(ids, logits[None])[0]), p
    ratios = (logits - logits.max()).exp().sort(descending=True).values  # a token exactly on min_p
    for p in [0.001, 0.05, 0.5, 1.0, *(float(ratios[n]) for n in (1, 5, 100))]:
        assert torch.equal(keep_min_p(logits, p), MinPLogitsWarper(p)(ids, logits[None])[0]), p


CHOOSER = Qwen2ForCausalLM(tiny_config("qwen2"))  # the reference's `generate` is a method of its models


def reference_chain(ids, logits, penalty=1.0, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The processors that the reference's `generate` makes of these values, applied to the last position's logits [V]."""
    config = GenerationConfig(
        do_sample=True,
        repetition_penalty=penalty,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p or None,
    )
    chain = CHOOSER._get_logits_processor(config, input_ids_seq_length=ids.shape[1])
    return chain(ids, logits.float()[None])[0]


CHAINS = [
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "penalty": 1.05},  # Qwen2.5's file
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},  # Qwen3's, thinking
    {"temperature": 1.3, "top_k": 0, "top_p": 0.9, "min_p": 0.02, "penalty": 1.3},
    {"temperature": 2.0, "top_k": 1000, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 0, "top_p": 0.5},
]


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "ties"])
@pytest.mark.parametrize("values", CHAINS, ids=str)
def test_whole_chain_equals_the_reference(kind, values, monkeypatch):
    """What is drawn from is, bit for bit, what the reference would draw from."""
    drawn_from = []
    monkeypatch.setattr(sampling, "draw", lambda scores, generator: drawn_from.append(scores) or scores.argmax())
    for seed in range(3):
        logits = wide_logits(kind, seed)
        ids = torch.arange(seed, 3000, 7)
        asked = {"repetition_penalty" if name == "penalty" else name: value for name, value in values.items()}
        sampler(prompt=ids.tolist(), vocab=V, seed=0, **asked).pick(logits)
        assert torch.equal(drawn_from[-1], reference_chain(ids[None], logits, **values))


def p_value(counts, probs):
    """Pearson's chi-square test that the counts come from these probabilities; rare tokens are taken together."""
    expected = probs * counts.sum()
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]]).double()
    expected = torch.cat([expected[common], expected[~common].sum()[None]]).double()
    if expected[-1] < 1e-9:
        if observed[-1] > 0:  # a token came out that the filters had dropped
            return 0.0
        observed, expected = observed[:-1], expected[:-1]
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(observed) - 1) / 2).double(), statistic / 2))


@pytest.fixture(scope="module")
def constant(tmp_path_factory):
    """A checkpoint whose logits are the same at every position: each token has the same embedding."""
    model = load_model(save_tiny(tmp_path_factory.mktemp("m") / "m", "qwen3", tie_word_embeddings=False), device="cpu")
    model.model.embed_tokens.weight[:] = model.model.embed_tokens.weight[0].clone()
    return model


def sampled_counts(model, **values):
    """How often each token came out in 20 seeds x 50 tokens, through the whole loop."""
    counts = torch.zeros(model.config.vocab_size)
    for seed in range(20):
        ids = complete(model, None, [1], SamplingParams(seed=seed, max_new_tokens=50, **values)).token_ids
        counts += torch.bincount(torch.tensor(ids), minlength=len(counts))
    assert counts.sum() == 1000
    return counts


@pytest.mark.parametrize("values", [v for v in CHAINS if "penalty" not in v], ids=str)
def test_samples_follow_the_distribution(constant, values):
    """And those of another temperature would not pass for it."""
    logits = constant(torch.tensor([[1]]))[0, -1]
    probs = reference_chain(torch.tensor([[1]]), logits, **values).softmax(-1)
    assert p_value(sampled_counts(constant, **values), probs) > 1e-3
    hotter = values | {"temperature": 2 * values["temperature"]}
    assert p_value(sampled_counts(constant, **hotter), probs) < 1e-6


def test_a_generator_seeded_at_every_step_is_found_out(constant, monkeypatch):
    pick = sampling.Sampler.pick

    def seeded_anew(self, logits):
        self.generator.manual_seed(self.seed)
        return pick(self, logits)

    monkeypatch.setattr(sampling.Sampler, "pick", seeded_anew)
    probs = constant(torch.tensor([[1]]))[0, -1].softmax(-1)
    assert p_value(sampled_counts(constant, temperature=1.0, top_k=0), probs) < 1e-6


def test_nucleus_keeps_the_token_that_crosses_p():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert keep_top_p(logits, 0.6).isfinite().sum() == 2
    assert keep_top_p(logits, 0.85).isfinite().sum() == 3
    assert keep_top_p(torch.tensor([0.6, 0.4]).log(), 0.5).isfinite().sum() == 1
    assert keep_top_p(torch.zeros(4), 0.5).isfinite().sum() == 2  # reached exactly: the next one goes


@pytest.mark.parametrize("p", [1 - 1e-7, 0.9999999])
def test_top_p_just_below_one(p):
    assert keep_top_p(torch.zeros(V), p).isfinite().all()
    assert 0 <= int(sampler(temperature=1.0, top_k=0, top_p=p, seed=0, vocab=V).pick(torch.zeros(V))[0]) < V


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
    assert {int(draw(scores, generator)) for _ in range(20_000)} <= {5, 70_000, 151_935}


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
