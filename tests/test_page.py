"""The page of `trace --html`, opened in a real Chromium that may not speak to anybody."""

import json
import math
import os
import shutil
from pathlib import Path
from urllib.parse import urlsplit

import jsonschema
import pytest
import torch
from builders import save_tiny, save_tokenizer
from playwright.sync_api import expect, sync_playwright
from trace_schema import TRACE

from qwen_scratch import SamplingParams, load
from qwen_scratch.completion import stream
from qwen_scratch.maps import SHOWN, maps, shown
from qwen_scratch.observe import observe
from qwen_scratch.trace import main
from qwen_scratch.transcript import stages

DEMO = Path(__file__).parents[1] / "weights" / "qwen3-demo"
# Without these, Chromium itself calls home.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 12 + 30?"},
    {"role": "assistant", "content": "12 + 30 = 42"},
    {"role": "user", "content": "12 × 3 等于？"},
]


@pytest.fixture(scope="session")
def chromium():
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        reason = "no Chromium here: apt-get install chromium, say"
        if os.environ.get("QWEN_SCRATCH_CHROMIUM") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium):
    """Open a file; whatever goes wrong in it, or is asked for outside of it, fails the test at the end."""
    contexts, faults, asked = [], [], []

    def opened(file, width=1280, scheme="light"):
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.on(
            "console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(file.as_uri())
        for name in ("norms", "attention", "lens", "cache", "ways"):
            expect(page.locator(f"#{name} .main-svg").first).to_be_attached()
        return page

    yield opened
    for context in contexts:
        context.close()
    assert faults == []
    assert {urlsplit(url).scheme for url in asked} == {"file"}
    assert len(asked) == len(contexts)  # each page asks for itself alone


def make(folder, *options):
    """The page, and the numbers that are written beside it."""
    html, numbers = folder / "trace.html", folder / "trace.json"
    assert main([*map(str, options), "--quiet", "--html", str(html), "--json", str(numbers)]) == 0
    data = json.loads(numbers.read_text(encoding="utf-8"), parse_constant=pytest.fail)  # NaN is not JSON
    jsonschema.validate(data, TRACE)
    return html, data


@pytest.fixture(scope="module", params=["demo", "smollm2"])
def chat(request, tmp_path_factory):
    """A conversation of some sixty tokens."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "chat.json").write_text(json.dumps(CHAT))
    model = DEMO if request.param == "demo" else request.getfixturevalue("smollm2")
    return make(folder, "--messages", folder / "chat.json", "--model", model, "--steps", 3, "--layer", 1)


def drawn(page, name):
    """The map as the chart has it, with 0 where nothing is drawn."""
    return page.evaluate(f"document.getElementById('{name}').data[0].z.map(row => Array.from(row))")


def test_the_page_shows_the_numbers(chat, open_page):
    html, data = chat
    page = open_page(html)
    tokens, steps, layers = data["prompt"]["tokens"], data["decode"]["steps"], data["maps"]["layers"]
    assert 40 <= len(tokens) <= SHOWN
    assert page.locator("#strip button").count() == len(tokens) + len(steps)
    assert page.locator("#strip button.made").count() == len(steps)
    control = [token for token in [*tokens, *steps] if token["bytes"] == 0]
    assert page.locator("#strip button.control").count() == len(control) > 2
    shown_texts = page.locator("#strip button").all_text_contents()
    assert [text.replace("␣", " ").replace("⏎", "\n") for text in shown_texts[: len(tokens)]] == [
        token["text"] or token["piece"] for token in tokens
    ]
    page.locator("#strip button").nth(3).click()
    assert f"Position 3: id {tokens[3]['id']}," in page.locator("#token").inner_text()
    assert drawn(page, "lens") == [[say["prob"] for say in row["says"]] for row in layers]
    lines = page.evaluate("document.getElementById('norms').data.map(line => Array.from(line.y))")
    assert lines[0] == [row["stream"][-1] for row in layers]
    assert lines[1] == [None] + [row["attention_added"][-1] for row in layers[1:]]
    assert lines[2] == [None] + [row["mlp_added"][-1] for row in layers[1:]]
    bars = page.evaluate("document.getElementById('cache').data.slice(0, 2).map(bar => Array.from(bar.y))")
    held = [step["after"] * data["decode"]["bytes_per_token"] / 2**20 for step in steps]
    assert [sum(both) for both in zip(*bars, strict=True)] == pytest.approx(held)
    ways = page.evaluate("document.getElementById('ways').data.map(bar => Array.from(bar.x))")
    for way, *shares in zip(reversed(data["sampling"]), *ways, strict=True):
        assert shares[:5] == [token["prob"] for token in way["top"]]
        assert sum(shares) == pytest.approx(1, abs=1e-4)
    for n, (key, place) in enumerate(data["where"].items(), 1):  # eight stages, each with its place in the code
        text = page.locator(f"#{key}").inner_text()
        assert text.startswith(f"{n}. ") and place in text
    assert not page.locator("#left-out").inner_text()


def test_the_page_names_what_it_shows(chat, open_page):
    """Labels, hovers and sentences, each from the numbers they stand beside."""
    html, data = chat
    page = open_page(html)
    tokens, steps, rows, inside = (
        data["prompt"]["tokens"],
        data["decode"]["steps"],
        data["maps"]["layers"],
        data["one_layer"],
    )

    def of(name, path):
        return page.evaluate(f"document.getElementById('{name}').{path}")

    def plain(text):
        for mark, meant in (
            ("\u2068", ""),
            ("\u2069", ""),
            ("␣", " "),
            ("⏎", "\n"),
            ("&lt;", "<"),
            ("&gt;", ">"),
            ("&amp;", "&"),
        ):
            text = text.replace(mark, meant)
        return text

    names = [f"{token['text'] or token['piece']} {token['position']}" for token in tokens]
    for chart, axes in (("attention", ("xaxis", "yaxis")), ("lens", ("xaxis",))):
        for axis in axes:
            assert [plain(text) for text in of(chart, f"layout.{axis}.ticktext")] == names
        assert of(chart, "layout.yaxis.range[0]") > of(chart, "layout.yaxis.range[1]")  # the first on top
    hover = of("attention", "data[0].text")
    weight = data["maps"]["attention"][1][0][-1][3]
    assert plain(hover[-1][3]) == f"{names[-1]} looks at {names[3]}: {100 * weight:.1f} %"
    bar = of("attention", "data[0].colorbar")
    assert [value**2 for value in bar["tickvals"]] == pytest.approx(
        [float(text[:-2]) / 100 for text in bar["ticktext"]]
    )
    assert of("lens", "layout.yaxis.ticktext") == ["embedding", *map(str, range(len(rows) - 1))]
    layers = of("norms", "layout.xaxis.tickvals")
    assert of("norms", "layout.xaxis.ticktext") == ["E" if n == 0 else n - 1 for n in layers]
    for row, texts, hovers in zip(rows, of("lens", "data[0].text"), of("lens", "data[0].hovertext"), strict=True):
        for name, say, text, more in zip(names, row["says"], texts, hovers, strict=True):
            if say["token"].isprintable() and len(say["token"]) <= 12:
                assert plain(text) == say["token"]
            assert plain(more).startswith(f"after {name}, ") and plain(more).endswith(f" {100 * say['prob']:.1f} %")
    said = [row["says"][-1]["token_id"] for row in rows]
    since = max((n + 1 for n, token in enumerate(said) if token != said[-1]), default=0)
    sentence = page.locator("#next").inner_text()
    assert sentence.startswith(f"Position {len(tokens) - 1}, ") and sentence.endswith(f"from layer {since - 1} on.")
    assert f"{100 * rows[-1]['says'][-1]['prob']:.1f} %" in sentence
    assert f"{inside['query_heads']} query heads share {inside['kv_heads']} key/value heads" in page.inner_text(
        "#groups"
    )
    held = data["decode"]["bytes_per_token"], data["decode"]["bytes_per_token_if_every_head_had_its_own"]
    assert all(f"{count / 1024:.1f} KiB" in page.inner_text("#growth") for count in held)
    assert page.locator("#map-head option").all_inner_texts() == [
        f"{look['head']} (keys and values {look['kv_head']})" for look in inside["looks"]
    ]
    assert of("cache", "data[2].y") == pytest.approx([step["after"] * held[1] / 2**20 for step in steps])
    assert [int(text) for text in of("cache", "data[1].text")] == [step["after"] for step in steps]
    assert plain(of("cache", "layout.xaxis.ticktext[1]")) == steps[0]["token"]
    ways = [f"{way['way']} ({way['candidates']:,})" for way in reversed(data["sampling"])]
    assert of("ways", "data[0].y") == ways
    legend = [plain(name) for name in of("ways", "data.map(bar => bar.name)")]
    assert legend == [*(f"“{token['token']}”" for token in data["logits"]["top"]), "all others"]
    page.locator("#strip button.made").first.click()
    assert page.inner_text("#token").startswith(f"Position {len(tokens)}, made: id {steps[0]['token_id']},")
    about = f"{data['dtype']} on {data['device']}: a prompt of {len(tokens)} tokens, {len(steps)} made"
    assert about in page.inner_text("#about")
    for stage in stages(data):
        assert page.locator(f"#{stage['key']} pre").text_content() == stage["text"]


def test_the_selectors_change_the_picture(chat, open_page):
    html, data = chat
    page = open_page(html)
    attention = data["maps"]["attention"]
    n = len(data["maps"]["positions"])
    seen = []
    for layer, head in ((1, 0), (0, 0), (len(attention) - 1, 2)):
        page.select_option("#map-layer", str(layer)) if seen else None  # the first is what the command was asked for
        page.select_option("#map-head", str(head))
        z = drawn(page, "attention")
        assert [len(row) for row in z] == list(range(1, n + 1))
        for row, weights in zip(z, attention[layer][head], strict=True):
            assert [cell**2 for cell in row] == pytest.approx(weights)
        best = max(range(n), key=attention[layer][head][-1].__getitem__)
        assert f" {best} (" in page.locator("#looks").inner_text().split(",")[0]
        seen.append(z)
    assert seen[0] != seen[1] != seen[2]
    before = page.evaluate("Array.from(document.getElementById('norms').data[0].y)")
    page.select_option("#norm-position", "0")
    after = page.evaluate("Array.from(document.getElementById('norms').data[0].y)")
    assert after == [row["stream"][0] for row in data["maps"]["layers"]] != before


def test_phone_and_dark(chat, open_page):
    """Nothing is wider than a phone but what scrolls by itself; colours follow the system, also when it changes."""
    page = open_page(chat[0], width=390, scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for name in ("norms", "cache", "ways"):
        assert page.evaluate(f"document.getElementById('{name}').getBoundingClientRect().right") <= 390
    assert page.locator("#lens").evaluate("node => node.parentElement.scrollWidth") > 390

    ink = page.locator("#ways .xtick text").first
    expect(ink).to_have_css("fill", "rgb(228, 231, 235)")
    expect(page.locator("body")).to_have_css("background-color", "rgb(20, 23, 28)")
    page.emulate_media(color_scheme="light")
    expect(ink).to_have_css("fill", "rgb(28, 30, 33)")
    expect(page.locator("body")).to_have_css("background-color", "rgb(255, 255, 255)")


@pytest.mark.parametrize(("family", "length"), [("qwen2", 5), ("qwen3", 500)])
def test_short_and_long(family, length, tmp_path, open_page):
    model = save_tiny(tmp_path / "m", family, vocab_size=320, max_position_embeddings=1000)
    save_tokenizer(model)
    html, data = make(tmp_path, "a" * length, "--raw", "--model", model, "--steps", 2)
    page = open_page(html)
    positions = data["maps"]["positions"]
    assert page.locator("#strip button").count() == len(data["prompt"]["tokens"]) + len(data["decode"]["steps"])
    assert len(drawn(page, "attention")) == len(positions) == min(len(data["prompt"]["tokens"]), SHOWN)
    left_out = page.locator("#left-out").inner_text()
    if len(data["prompt"]["tokens"]) <= SHOWN:
        assert left_out == ""
    else:
        total = len(data["prompt"]["tokens"])
        assert f"of {total} positions" in left_out and "show 64, the first 16 and the last 48" in left_out
        assert positions == [*range(16), *range(total - 48, total)]


def test_text_stays_text(tmp_path, open_page):
    """A prompt can say whatever it likes to a browser."""
    text = "</script><script>document.title='caught'</script><b>&amp;<!--"
    html, data = make(tmp_path, text, "--raw", "--steps", 1)
    page = open_page(html)
    assert page.title() == "One inference, taken apart"
    pieces = page.locator("#strip button").all_text_contents()[: len(data["prompt"]["tokens"])]
    assert "".join(pieces) == text
    names = page.evaluate("document.getElementById('lens').layout.xaxis.ticktext")
    assert "&lt;" in names[0] and not any("<" in name for name in names)


def test_which_positions_are_shown():
    assert shown(64, 448) == list(range(64))
    assert shown(65, 448) == [*range(16), *range(17, 65)]
    many = shown(100_000, 64 * 64)
    assert len(many) == 31 and many[:7] == list(range(7)) and many[-1] == 99_999
    assert len(many) ** 2 / 2 * 64 * 64 <= 2_000_000


@pytest.mark.parametrize("source", ["demo", "smollm2"])
def test_the_maps_are_the_models_own(source, request):
    """Against a forward watched op by op, and a softmax and a lens of the test's own."""
    folder = DEMO if source == "demo" else request.getfixturevalue("smollm2")
    model, tokenizer = load(folder, "cpu", "float32", exact=True)
    ids = stream(model, tokenizer, CHAT, SamplingParams()).result.prompt_ids
    ids *= 1 + (source == "demo")  # more than are shown
    seen = {}
    with torch.inference_mode(), observe(model, lambda op, at, x: seen.__setitem__((op, at), x[0].clone())):
        model(torch.tensor([ids]))
    data = maps(model, tokenizer, ids)
    at = data["positions"]
    T, L = len(ids), model.config.num_hidden_layers
    assert at == shown(T, L * model.config.num_attention_heads)
    assert (len(at) < T) == (source == "demo")
    assert [row["layer"] for row in data["layers"]] == [None, *range(L)]
    for row in data["layers"]:
        n = row["layer"]
        stream_here = seen["embedding", None] if n is None else seen["residual_2", n]
        size = stream_here.pow(2).mean(-1).sqrt()
        assert row["stream"] == pytest.approx(size[at].tolist(), rel=1e-5)
        if n is not None:
            for name, op in (("attention_added", "o"), ("mlp_added", "down")):
                assert row[name] == pytest.approx(seen[op, n].pow(2).mean(-1).sqrt()[at].tolist(), rel=1e-5)
        stream_here = stream_here[at]
        normed = stream_here * (stream_here.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps).rsqrt()
        probs = (normed * model.model.norm.weight @ model.lm_head.weight.T).softmax(-1)
        ids_said = torch.tensor([say["token_id"] for say in row["says"]])
        best = probs.max(-1).values
        assert torch.allclose(probs.gather(1, ids_said[:, None])[:, 0], best, rtol=1e-3)  # a tie may go either way
        assert torch.allclose(torch.tensor([say["prob"] for say in row["says"]]), best, rtol=1e-3, atol=2e-6)
        assert [say["token"] for say in row["says"]] == [tokenizer.label(int(i)) for i in ids_said]
    assert [say["token_id"] for say in data["layers"][-1]["says"]] == seen["logits", None].argmax(-1)[at].tolist()
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    H, K = model.config.num_attention_heads, model.config.num_key_value_heads
    for n, heads in enumerate(data["attention"]):
        scores = (
            seen["q_rope", n] @ seen["k_rope", n].repeat_interleave(H // K, 0).mT / math.sqrt(model.config.head_dim)
        )
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)[:, at][:, :, at]
        for theirs, rows in zip(weights, heads, strict=True):
            assert [len(row) for row in rows] == list(range(1, len(at) + 1))
            ours = torch.tensor([row + [0.0] * (len(at) - len(row)) for row in rows])
            assert (ours - theirs).abs().max() <= 6e-5
