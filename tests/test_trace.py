"""The walk through one inference: its numbers are the model's own, and the anatomy is that of the real shapes."""

import json
import math
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch
from builders import save_tiny, save_tokenizer
from trace_schema import TRACE

import qwen_scratch
from qwen_scratch import SamplingParams, load, load_model
from qwen_scratch.anatomy import QWEN3, QWEN25, anatomy, published, read_size, readable, table
from qwen_scratch.completion import stream
from qwen_scratch.errors import InputError
from qwen_scratch.loading import shapes_only
from qwen_scratch.maps import attention_weights
from qwen_scratch.observe import observe
from qwen_scratch.trace import main
from qwen_scratch.transcript import MANY, as_json, transcript
from qwen_scratch.walk import checks, sampling, walk

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "weights" / "qwen3-demo"
QUESTION = "What is 347 + 586?"


def trace(*options, code=0):
    command = [sys.executable, "-m", "qwen_scratch.trace", *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done


@pytest.mark.parametrize("name", [*QWEN25, *QWEN3])
def test_anatomy_is_that_of_the_model(name):
    """Every tensor by name and shape, and the sums, against the modules themselves."""
    config = published(name)
    report = anatomy(config, torch.bfloat16)
    real = {key: list(parameter.shape) for key, parameter in shapes_only(config).named_parameters()}
    ours = {}
    for key, shape in report["tensors"].items():
        for layer in range(config.num_hidden_layers) if "*" in key else [0]:
            ours[key.replace("*", str(layer))] = shape
    assert ours == real
    assert sum(report["parameters"].values()) == 2 * report["parameters"]["total"]
    assert report["parameters"]["total"] == config.num_parameters
    assert report["weights"]["float32"] == 2 * report["weights"]["bfloat16"] == 4 * config.num_parameters


def test_anatomy_of_what_is_published():
    small = anatomy(published("Qwen2.5-0.5B"), torch.bfloat16, 24 * 2**30)
    assert small["parameters"]["total"] == 494_032_768
    assert small["kv_per_token"] == 12 * 2**10
    assert small["kv_at_full_context"] == 384 * 2**20
    assert small["kv_per_token_if_every_head_had_its_own"] == 84 * 2**10
    assert small["longest_context_that_fits"] == 32_768
    eight = anatomy(published("qwen3-8b"), torch.bfloat16, 17 * 2**30)
    assert eight["tensors"]["model.layers.*.self_attn.q_proj.weight"] == [4096, 4096]
    assert eight["tensors"]["model.layers.*.self_attn.k_proj.weight"] == [1024, 4096]
    assert eight["tensors"]["model.layers.*.self_attn.v_proj.weight"] == [1024, 4096]
    assert eight["tensors"]["model.layers.*.mlp.gate_proj.weight"] == [12288, 4096]
    assert eight["tensors"]["model.layers.*.mlp.up_proj.weight"] == [12288, 4096]
    assert eight["cache_shape_of_a_layer"] == [1, 8, "S", 128]
    assert 0 < eight["longest_context_that_fits"] < 40_960
    assert eight["read_per_token"] + eight["longest_context_that_fits"] * eight["kv_per_token"] <= 17 * 2**30
    seven = published("qwen2.5-7b")
    assert anatomy(seven, torch.bfloat16)["parameters"]["total"] == 7_615_616_512
    assert anatomy(seven, torch.bfloat16)["kv_per_token"] == 56 * 2**10
    assert anatomy(seven, torch.bfloat16, 2**30)["longest_context_that_fits"] == 0
    assert "the weights alone do not fit" in table("x", anatomy(seven, torch.bfloat16, 2**30))
    # A token's products: every weight but the embedding's once, a multiplication and an addition each.
    assert anatomy(seven, torch.bfloat16)["flops_per_token"] == 2 * (7_615_616_512 - 152_064 * 3584)
    assert published("qwen3-9b") is None


def test_sizes_of_memory():
    assert [read_size(text) for text in ("24GiB", "24 GB", "24g", "1.5K", "7")] == [24 * 2**30] * 3 + [1536, 7]
    for text in ("", "GiB", "-1G", "0", "24 GiBs", "24X", "1e3"):
        with pytest.raises(InputError, match="no size of a memory"):
            read_size(text)
    assert [readable(n) for n in (7, 12 * 2**10, 2**30 + 2**29, 5 * 2**40)] == ["7 B", "12 KiB", "1.5 GiB", "5 TiB"]


def walked(folder, prompt, layer=0, steps=6, **options):
    model, tokenizer = load(folder, "cpu", "float32", exact=True)
    prepared = stream(model, tokenizer, prompt, SamplingParams(max_new_tokens=steps), **options).result
    return model, tokenizer, prepared, walk(model, tokenizer, prepared, layer, steps)


def near(ours, expected):
    assert ours == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.fixture(scope="module")
def qwen3_widths(tmp_path_factory):
    """Two layers as wide as those of Qwen3-0.6B."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 2}
    folder = tmp_path_factory.mktemp("widths") / "m"
    save_tiny(folder, "qwen3", hidden_size=1024, intermediate_size=3072, vocab_size=320, **heads)
    save_tokenizer(folder)
    return folder


@pytest.mark.parametrize(("source", "layer"), [("demo", 0), ("demo", -1), ("smollm2", 17), ("qwen3_widths", 1)])
def test_the_numbers_are_the_models_own(source, layer, request):
    """Held against a forward of its own, watched op by op, and for attention against the mix that the model computed."""
    folder = DEMO if source == "demo" else request.getfixturevalue(source)
    model, tokenizer, prepared, data = walked(folder, QUESTION, layer, steps=2)
    ids = prepared.prompt_ids
    seen = {}
    with torch.inference_mode(), observe(model, lambda op, at, tensor: seen.__setitem__((op, at), tensor[0].clone())):
        model(torch.tensor([ids]))
    assert [token["id"] for token in data["prompt"]["tokens"]] == ids
    asked = tokenizer.render([{"role": "user", "content": QUESTION}])
    assert data["prompt"]["text"] == prepared.rendered_prompt == asked
    assert "".join(token["text"] for token in data["prompt"]["tokens"]) == tokenizer.decode(ids)
    for row in data["embedding"]["positions"]:
        x = seen["embedding", None][row["position"]]
        near(row["first"] + [row["norm"]], [*x[:4].tolist(), float(x.norm())])
    L = model.config.num_hidden_layers
    assert [row["layer"] for row in data["layers"]] == list(range(L))
    for n, row in enumerate(data["layers"]):
        x = seen["residual_2", n][-1]
        near([row["rms"], *row["first"]], [float(x.pow(2).mean().sqrt()), *x[:4].tolist()])
        for added, op in (("attention_added", "o"), ("mlp_added", "down")):
            near(row[added], float(seen[op, n][-1].pow(2).mean().sqrt()))
    inside = data["one_layer"]
    n = inside["layer"]
    H, K, hd = model.config.num_attention_heads, model.config.num_key_value_heads, model.config.head_dim
    assert (n, inside["query_heads"], inside["kv_heads"], inside["queries_per_kv_head"]) == (layer % L, H, K, H // K)
    assert inside["scores"] == [1, H, len(ids), len(ids)]
    block = model.model.layers[n]
    for row in inside["projections"]:
        assert row["weight"] == list(block.get_submodule(row["name"]).weight.shape)
        assert (row["in"][-1], row["out"][-1]) == tuple(row["weight"][::-1])
    for row in inside["first_head"]:
        near(row["projected"]["first"], seen[row["kind"], n][-1][:4].tolist())
        if model.config.qk_norm:
            near(row["normed"]["first"], seen[f"{row['kind']}_norm", n][-1, 0, :4].tolist())
        turned = seen[f"{row['kind']}_rope", n][0, -1]
        near(row["turned"]["first"], turned[:4].tolist())
        assert row["pair"]["of"] == [0, hd // 2]
        near(row["pair"]["after"], turned[[0, hd // 2]].tolist())
        angle = len(ids) - 1.0  # number 0 turns by one radian for each token
        a, b = row["pair"]["before"]
        cos, sin = math.cos(angle), math.sin(angle)
        near(row["pair"]["after"], [a * cos - b * sin, b * cos + a * sin])
    weights = attention_weights(seen["q_rope", n], seen["k_rope", n], torch.arange(len(ids)))
    values = seen["v", n].view(len(ids), K, hd).transpose(0, 1).repeat_interleave(H // K, 0)
    mix = (weights @ values).transpose(0, 1).flatten(1)
    assert (mix - seen["attention", n]).abs().max() <= 1e-5 * mix.abs().max()
    for head, row in enumerate(inside["looks"]):
        assert (row["head"], row["kv_head"]) == (head, head // (H // K))
        best = weights[head, -1].topk(3)
        assert [look["position"] for look in row["at"]] == best.indices.tolist()
        near([look["weight"] for look in row["at"]], best.values.tolist())
        assert [look["token"] for look in row["at"]] == [tokenizer.label(ids[p]) for p in best.indices.tolist()]
    near(inside["mix"]["first"], mix[-1, :4].tolist())
    near(inside["value"]["first"], seen["v", n][-1, :4].tolist())
    assert inside["mix_shape"] == [1, len(ids), H * hd]
    for op in ("gate", "gate_up", "down"):
        near(inside[op]["first"], seen[op, n][-1, :4].tolist())


def test_the_prediction():
    model, _, prepared, data = walked(DEMO, QUESTION)
    seen = []
    with model.model.norm.register_forward_hook(lambda module, args, out: seen.append(out[0])):
        logits = model(torch.tensor([prepared.prompt_ids]))[0]
    (normed,) = seen
    near(data["logits"]["final_norm"]["first"], normed[-1, :4].tolist())
    near([data["logits"]["largest"], data["logits"]["smallest"]], [float(logits[-1].max()), float(logits[-1].min())])
    assert data["logits"]["shape"] == list(logits.shape)
    best = logits[-1].softmax(-1).topk(5)
    assert [row["token_id"] for row in data["logits"]["top"]] == best.indices.tolist()
    near([row["prob"] for row in data["logits"]["top"]], best.values.tolist())


def test_tokens_and_cache_step_by_step():
    model, tokenizer, prepared, data = walked(DEMO, QUESTION, steps=7)
    T = len(prepared.prompt_ids)
    steps = data["decode"]["steps"]
    made = qwen_scratch.complete(model, tokenizer, QUESTION, SamplingParams(temperature=0, max_new_tokens=7)).token_ids
    assert [step["token_id"] for step in steps] == made
    assert [step["input"] for step in steps] == [[1, T]] + [[1, 1]] * 6
    assert [step["fed"] for step in steps] == ["the prompt"] + [repr(tokenizer.label(i)) for i in made[:-1]]
    assert [(step["before"], step["after"]) for step in steps] == [(0, T)] + [(T + n, T + n + 1) for n in range(6)]
    K, hd = model.config.num_key_value_heads, model.config.head_dim
    assert [step["cache"] for step in steps] == [[1, K, T + n, hd] for n in range(7)]
    whole = torch.tensor([prepared.prompt_ids + made])
    probs = model(whole)[0, T - 1 : -1].softmax(-1)
    near([step["prob"] for step in steps], [float(row[i]) for row, i in zip(probs, made, strict=True)])
    assert [step["bytes"] for step in steps] == [len(tokenizer.token_bytes(i)) for i in made]
    assert data["decode"]["bytes_at_full_context"] == data["decode"]["bytes_per_token"] * model.config.context_length
    assert data["decode"]["bytes_per_token"] == 2 * model.config.num_hidden_layers * K * hd * 4
    assert data["checks"]["equal_without_cache"] and data["checks"]["equal_to_complete"]
    assert not data["decode"]["ended"]
    other = checks(model, prepared.prompt_ids, [*made[:-1], 0])
    assert not other["equal_without_cache"] and not other["equal_to_complete"]
    whole = walked(DEMO, QUESTION, steps=200)[3]["decode"]
    assert whole["ended"] and len(whole["steps"]) < 200 and whole["steps"][-1]["token_id"] in prepared.eos_token_ids


def test_what_sampling_would_leave():
    model, _tokenizer, prepared, data = walked(DEMO, "Tell me a story.", thinking=False)
    probs = model(torch.tensor([prepared.prompt_ids]))[0, -1].softmax(-1)
    rows = {row["way"]: row for row in data["sampling"]}
    V = model.config.vocab_size
    assert rows["temperature 1"]["candidates"] == rows["temperature 0.5"]["candidates"] == V
    assert (rows["greedy"]["candidates"], rows["top-k 5"]["candidates"], rows["top-k 50"]["candidates"]) == (1, 5, 50)
    near(rows["greedy"]["probability_kept"], float(probs.max()))
    near(rows["top-k 5"]["probability_kept"], float(probs.topk(5).values.sum()))
    assert 0.9 <= rows["top-p 0.9"]["probability_kept"] <= 1
    assert rows["min-p 0.05"]["candidates"] == int((probs >= 0.05 * probs.max()).sum())
    first = {way: rows[way]["top"][0]["prob"] for way in rows}
    assert first["greedy"] == 1
    assert first["temperature 0.5"] > first["temperature 0.7"] > first["temperature 1"] > first["temperature 1.5"]


def test_one_token_and_many(family, tmp_path):
    """Both families, the shortest prompt there is, and one of which the terminal leaves out the middle."""
    folder = save_tiny(tmp_path / "m", family, vocab_size=320, max_position_embeddings=1000)
    save_tokenizer(folder)
    for text, prompt in (("a", 1), ("a b " * 100, None)):
        data = walked(folder, text, steps=2, raw=True)[3]
        tokens = len(data["prompt"]["tokens"])
        assert prompt in (None, tokens)
        printed = transcript(data)
        assert (f"{'...':>8}\n" in printed) == (tokens > MANY)
        assert ("after its norm" in printed) == (family == "qwen3")
        assert (" and a bias" in printed) == (family == "qwen2")


def test_command(tmp_path):
    out = tmp_path / "trace.json"
    done = trace(QUESTION, "--layer", "-1", "--steps", 4, "--json", out, "--html", tmp_path / "trace.html")
    assert (tmp_path / "trace.html").stat().st_size > 2_000_000  # with the script that draws
    for n in range(1, 9):
        assert f"\n{n}. " in f"\n{done.stdout}"
    assert "transformers' generate: equal" in done.stdout and "NOT equal" not in done.stdout
    data = json.loads(out.read_text(encoding="utf-8"))
    jsonschema.validate(data, TRACE)
    assert len(data["decode"]["steps"]) == 4
    assert data["checks"]["equal_to_reference"]
    assert len(data["where"]) == 8
    for place in data["where"].values():  # the code is where it says
        file, *names = place.replace(",", " ").replace(";", " ").split()
        source = (Path(qwen_scratch.__file__).parent / file).read_text(encoding="utf-8")
        for name in names:
            if name.endswith(".py"):
                source = (Path(qwen_scratch.__file__).parent / name).read_text(encoding="utf-8")
            elif name != "and":
                assert name.split(".")[-1] in source, (place, name)
    quiet = trace(QUESTION, "--quiet", "--steps", 1)
    assert (quiet.stdout, quiet.stderr) == ("", "")


def test_the_command_without_weights(tmp_path, tiny):
    done = trace("--config-only", "qwen3-8b", "--device-memory", "24GiB", "--json", tmp_path / "a.json")
    assert "8,190,735,360 parameters" in done.stdout and "a context of 40,960 tokens" in done.stdout
    assert json.loads((tmp_path / "a.json").read_text())["kv_per_token"] == 144 * 2**10
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "config.json").write_bytes((tiny / "config.json").read_bytes())
    assert f"{load_model(tiny).config.num_parameters:,} parameters" in trace("--config-only", folder).stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["hi", "--layer", "99"], "--layer"),
        (["hi", "--steps", "0"], "--steps"),
        (["hi", "--quantize", "int8"], "quantised"),
        (["hi", "--device-memory", "24GiB"], "--config-only"),
        ([], "give a prompt"),
        (["--config-only", "qwen3-9b"], "qwen3-9b"),
        (["--config-only", "qwen3-8b", "--device-memory", "much"], "much"),
        (["--config-only", "qwen3-8b", "--html", "a.html"], "--html shows an inference"),
        (["hi", "--html", "no/such/a.html"], "no/such/a.html cannot be written: there is no such folder"),
        (["hi", "--json", "a", "--html", "a"], "name the same file"),
        (["hi", "--json", "/tmp"], "/tmp cannot be written: it is a folder"),
    ],
    ids=str,
)
def test_wrong_options(options, words):
    done = trace(*options, code=2)
    assert words in done.stderr and len(done.stderr.splitlines()) <= 2 and done.stdout == ""


def test_what_is_not_finite_is_null():
    assert json.loads(as_json({"a": [1.5, -math.inf, {"b": math.nan}], "c": "NaN"})) == {
        "a": [1.5, None, {"b": None}],
        "c": "NaN",
    }


def test_a_prompt_that_was_cut_is_shown_as_it_went_in():
    model, tokenizer = load(DEMO, "cpu", exact=True)
    cut = stream(
        model, tokenizer, "What is 347 + 586? " * 9, SamplingParams(max_new_tokens=2), max_context=40, truncate=True
    )
    data = walk(model, tokenizer, cut.result, 0, 2)
    assert data["prompt"]["text"] == "".join(token["text"] or token["piece"] for token in data["prompt"]["tokens"])
    assert len(data["prompt"]["tokens"]) < 40


def test_greedy_keeps_one_of_a_tie():
    rows = {row["way"]: row for row in sampling(torch.tensor([1.0, 3, 3, 0, 3, 2]), load(DEMO, "cpu", exact=True)[1])}
    assert rows["greedy"]["candidates"] == 1 and rows["greedy"]["top"][0]["prob"] == 1


def test_without_plotly(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="not installed: pip install plotly"):
        main(["hi", "--html", str(tmp_path / "a.html")])
