"""A walk (walk.py) with its maps (maps.py) as a page: one file that needs nothing else, not even a network."""

import json
from importlib.resources import files
from typing import Any

from qwen_scratch.transcript import stages


def page(numbers: dict[str, Any]) -> str:
    """The HTML; its script and styles are inside, and all it shows comes from the numbers that --json writes."""
    from plotly.offline import get_plotlyjs

    data = json.dumps({"numbers": numbers, "stages": stages(numbers)}, ensure_ascii=False, allow_nan=False)
    html = files("qwen_scratch").joinpath("page.html").read_text(encoding="utf-8")
    before, between, after = html.replace("/*PLOTLY*/", "\0").replace("/*DATA*/", "\0").split("\0")
    # In a script element a "<" of a token could end the script.
    return before + get_plotlyjs() + between + data.replace("<", "\\u003c") + after
