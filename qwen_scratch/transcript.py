"""A walk (walk.py) for people: as text for a terminal, stage by stage, and as a page that also draws its maps (maps.py)."""

import json
import math
import re
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

from qwen_scratch.anatomy import readable

MANY = 40  # tokens; of more, the middle is left out


def transcript(walk: dict[str, Any]) -> str:
    lines: list[str] = []
    for number, stage in enumerate(stages(walk), 1):
        body = (f"   {line}" for line in stage["text"].split("\n"))
        lines += [f"{number}. {stage['name']}   [{stage['place']}]", *body, ""]
    return "\n".join(lines).rstrip()


def page(walk: dict[str, Any]) -> str:
    """The page: one file that needs nothing else, not even a network, and shows what --json writes, `maps` included."""
    from plotly.offline import get_plotlyjs

    data = as_json({"numbers": walk, "stages": stages(walk)})
    html = files("qwen_scratch").joinpath("page.html").read_text(encoding="utf-8")
    before, between, after = re.split(r"/\*(?:PLOTLY|DATA)\*/", html)
    # In a script element a "<" of a token could end the script.
    return before + get_plotlyjs() + between + data.replace("<", "\\u003c") + after


def as_json(data: Any) -> str:
    """What is not finite becomes null: JSON knows no infinity."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [finite(inner) for inner in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(data), ensure_ascii=False, allow_nan=False)


def stages(walk: dict[str, Any]) -> list[dict[str, str]]:
    """Each stage's key in the walk, its name, its place in the code and its numbers as text."""
    tell: dict[str, tuple[str, Callable[[dict[str, Any]], Iterator[str]]]] = {
        "prompt": ("The prompt becomes tokens", prompt),
        "embedding": ("Each token becomes a vector", embedding),
        "layers": ("The layers add to it", layers),
        "one_layer": (f"Inside layer {walk['one_layer']['layer']}", one_layer),
        "logits": ("The last position becomes a prediction", logits),
        "decode": ("Tokens are made one by one, and the cache grows", decode),
        "sampling": ("Choosing a token", sampling),
        "checks": ("Does it hold?", checks),
    }
    return [
        {"key": key, "name": name, "place": walk["where"][key], "text": "\n".join(stage(walk))}
        for key, (name, stage) in tell.items()
    ]


def numbers(values: list[float]) -> str:
    return "[" + " ".join(f"{value:8.4f}" for value in values) + " ...]"


def shape(sizes: list[Any]) -> str:
    return "[" + ", ".join(map(str, sizes)) + "]"


def prompt(walk: dict[str, Any]) -> Iterator[str]:
    text, tokens = walk["prompt"]["text"], walk["prompt"]["tokens"]
    if text is not None:
        yield "What the model reads:"
        yield from (f"  | {line}" for line in text.splitlines())
    yield f"{len(tokens)} tokens. A token is a run of UTF-8 bytes. Its stored piece shows each byte as one printable character"
    yield "(Ġ is a space, Ċ a line break), so whatever takes two to four bytes looks garbled there; and where a token is only"
    yield "a part of a character, its text is \ufffd. Control tokens are no text; a chat template writes them."
    yield f"{'position':>8} {'id':>8}  {'piece':24} text"
    for token in shortened(tokens):
        if token is None:
            yield f"{'...':>8}"
        else:
            text = repr(token["text"]) if token["bytes"] else "(control token)"
            yield f"{token['position']:8} {token['id']:8}  {token['piece']:24} {text}"


def shortened(tokens: list[Any]) -> list[Any]:
    return tokens if len(tokens) <= MANY * 5 // 4 else [*tokens[: MANY // 2], None, *tokens[-MANY // 2 :]]


def embedding(walk: dict[str, Any]) -> Iterator[str]:
    data = walk["embedding"]
    yield f"Each id picks its row of a matrix {shape(data['matrix'])}: {shape(data['shape'])} = [batch, tokens, hidden size]."
    yield "The same token gives the same vector wherever it stands; position comes in when queries and keys are turned."
    for row in data["positions"]:
        yield f"position {row['position']:5}: {numbers(row['first'])}  L2 norm {row['norm']:.4f}"


def layers(walk: dict[str, Any]) -> Iterator[str]:
    data = walk["layers"]
    yield f"The residual stream {shape(data[0]['shape'])} has a vector for each position; attention and MLP of each layer add"
    yield "theirs to it. Here that of the last position. Sizes are root mean squares (RMS). Layers count from 0."
    yield f"{'':10} {'stream':>10}   first values{'':26} attention added   MLP added"
    start = walk["embedding"]["positions"][-1]
    yield f"{'embedding':>10} {start['rms']:10.4f}   {numbers(start['first'][:3])}"
    for row in data:
        added = f"{row['attention_added']:15.4f} {row['mlp_added']:11.4f}"
        yield f"{row['layer']:10} {row['rms']:10.4f}   {numbers(row['first'][:3]):38} {added}"
    norm = walk["logits"]["final_norm"]
    yield f"{'final norm':>10} {norm['rms']:10.4f}   {numbers(norm['first'][:3])}   this is what the head reads"


def one_layer(walk: dict[str, Any]) -> Iterator[str]:
    data = walk["one_layer"]
    H, K, hd = data["query_heads"], data["kv_heads"], data["head_dim"]
    yield "Products with weights [out, in]:"
    for row in data["projections"]:
        bias = " and a bias" if row["bias"] else ""
        yield f"{row['name']:18} weight {shape(row['weight']):16}{bias:11}: {shape(row['in'])} → {shape(row['out'])}"
    yield f"q is {H * hd} = {H} query heads x {hd} numbers; k and v are {K * hd} = {K} key/value heads x {hd}."
    group = data["queries_per_kv_head"]
    yield f"Grouped-query attention: each key/value head serves {group} query heads; only those {K} are cached, not {H}."
    names = {"projected": "as projected", "normed": "after its norm", "turned": "after RoPE"}
    for row in data["first_head"]:
        for stage in [stage for stage in names if stage in row]:
            values = f"{numbers(row[stage]['first'])}  L2 norm {row[stage]['norm']:.4f}"
            yield f"{row['kind']} head 0, last position, {names[stage]:15}: {values}"
    pair = data["first_head"][0]["pair"]
    (i, j), (a, b), (c, d) = pair["of"], pair["before"], pair["after"]
    yield f"RoPE turns number i together with number i + {j}, by an angle that grows with the position: numbers {i} and {j} of q"
    yield f"go from ({a:.4f}, {b:.4f}) to ({c:.4f}, {d:.4f}). Up to rounding, lengths stay."
    yield f"Scores q·kᵀ/√{hd}: {shape(data['scores'])} = [batch, query heads, from, to]. What lies later is masked: a position"
    yield "looks at itself and at what came before. Softmax makes weights of the scores. Where the last one's heads look most:"
    for row in data["looks"]:
        at = ", ".join(f"{look['weight']:6.1%} {look['token']!r} at {look['position']}" for look in row["at"])
        yield f"  head {row['head']:3} (keys and values {row['kv_head']}): {at}"
    yield f"Each head sums the values by its weights; all heads side by side are {shape(data['mix_shape'])}, what o_proj reads."
    yield f"v head 0, last position : {numbers(data['value']['first'])}"
    yield f"its mix, query head 0   : {numbers(data['mix']['first'])}"
    yield "The MLP, last position:"
    for name, text in (("gate", "gate projection"), ("gate_up", "SiLU(gate) · up"), ("down", "down projection")):
        yield f"  {text:16}: {numbers(data[name]['first'])}  RMS {data[name]['rms']:.4f}"


def logits(walk: dict[str, Any]) -> Iterator[str]:
    data = walk["logits"]
    T, V = data["shape"]
    last = walk["prompt"]["tokens"][-1]
    yield f"Norm and head: [1, {T}, {V}], a score (logit) for every token of the vocabulary at every position. Position {T - 1},"
    yield f"the last one, {last['text'] or last['piece']!r}, predicts the next token: logits from {data['smallest']:.3f} to "
    yield f"{data['largest']:.3f}, of which softmax makes probabilities:"
    yield from candidates(data["top"])


def candidates(top: list[dict[str, Any]]) -> Iterator[str]:
    for row in top:
        yield f"  {row['prob']:8.3%}  logit {row['logit']:9.4f}  id {row['token_id']:6}  {row['token']!r}"


def decode(walk: dict[str, Any]) -> Iterator[str]:
    data = walk["decode"]
    yield "The prompt's own forward fills the cache and gives the first token. From then on each forward takes the token that"
    yield "was made last (here always the likeliest) through all layers, appends its key and value in each, and reads those of"
    yield "the earlier ones."
    yield f"{'goes in':>16} {'input':>9} {'positions cached':>17}   {'K and V each, per layer':24} {'time':>9}   likeliest next"
    for row in data["steps"]:
        grown = f"{row['before']} → {row['after']}"
        yield (
            f"{row['fed']:>16} {shape(row['input']):>9} {grown:>17}   {shape(row['cache']):24} {row['seconds'] * 1000:6.1f} ms   "
            f"{row['token']!r} ({row['prob']:.1%})"
        )
    yield "(K and V: [batch, key/value heads, positions, head size]. The last token made is not in the cache yet. A first"
    yield "call of its shape takes longer, because the libraries set themselves up.)"
    if data["ended"]:
        yield "The last one is a stop id: the answer ends here."
    yield f"Cache per token: {data['formula']} = {readable(data['bytes_per_token'])};"
    full, alone = data["bytes_at_full_context"], data["bytes_per_token_if_every_head_had_its_own"]
    yield f"at the full context of {data['context_length']:,} tokens {readable(full)}. With keys and values for every query head"
    yield f"it would be {readable(alone)} per token."


def sampling(walk: dict[str, Any]) -> Iterator[str]:
    yield "What each way would leave of the prediction after the prompt. Temperature 1 is the prediction itself; below 1 the"
    yield "likely get likelier, above 1 less so, and none goes. Filters (here at temperature 1) remove tokens, and what stays is"
    yield "scaled up to 100 %: top-k keeps the k likeliest (and ties with the last of them), top-p the fewest likeliest that"
    yield "reach p together, so mostly more than p, min-p those at least that share as likely as the likeliest. Greedy keeps one."
    yield f"{'':16} {'candidates':>10} {'their share':>12}   and then"
    for row in walk["sampling"]:
        first = ", ".join(f"{token['prob']:.1%} {token['token']!r}" for token in row["top"] if token["prob"] > 0)
        yield f"{row['way']:16} {row['candidates']:10,} {row['probability_kept']:12.2%}   {first}"


def checks(walk: dict[str, Any]) -> Iterator[str]:
    data = walk["checks"]
    made = len(walk["decode"]["steps"])
    equal = {True: "equal", False: "NOT equal"}
    times = f"{data['without_cache_s']:.2f} s instead of {data['with_cache_s']:.2f} s (one run each)"
    yield f"The {made} token ids without a cache, all positions anew for each: {equal[data['equal_without_cache']]}, {times}."
    if not data["equal_without_cache"]:
        yield "(Other shapes sum in another order, so in half precision two tokens that are nearly as likely can change places.)"
    yield f"The package's own loop, qwen_scratch.complete: {equal[data['equal_to_complete']]}."
    if "equal_to_reference" in data:
        yield f"transformers' generate: {equal[data['equal_to_reference']]}."
    else:
        yield "transformers is not installed, so it was not asked."
