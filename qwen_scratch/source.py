"""What a reference to a checkpoint means: a folder, or nothing, the bundled demo → a folder on this machine."""

from pathlib import Path
from typing import NamedTuple

from qwen_scratch.errors import InputError


class Source(NamedTuple):
    """Where a checkpoint lies."""

    ref: str  # as it was asked for, or the bundled demo's folder
    folder: Path


def find(ref: str | Path | None = None) -> Source:
    """Where a checkpoint lies.

    Args:
        ref: a folder; None: the bundled demo.

    Raises:
        InputError: no folder is named, and this installation lacks the demo.
    """
    if ref is None:
        ref = bundled_demo()
    return Source(str(ref), Path(ref))


def bundled_demo() -> Path:
    """The small checkpoint that comes with this package: inside an installed one, beside it in a clone."""
    here = Path(__file__).parent
    for folder in (here / "weights" / "qwen3-demo", here.parent / "weights" / "qwen3-demo"):
        if folder.is_dir():
            return folder
    raise InputError(
        "no model given, and this installation lacks the bundled demo; name a checkpoint folder (with --model; the README "
        "tells where to get one)"
    )
