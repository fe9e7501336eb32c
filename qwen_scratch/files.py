"""The small files of a checkpoint folder, and which large ones belong to it."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

from qwen_scratch.config import ARCHITECTURES, QwenConfig
from qwen_scratch.errors import InputError
from qwen_scratch.foreign import file_looks, folder_looks, model_looks

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def existing_folder(path: str | Path) -> Path:
    try:
        folder = Path(path).expanduser()
        found = "a folder" if folder.is_dir() else "a file, not a folder" if folder.exists() else "not there"
    except (OSError, RuntimeError) as error:  # no such user, a name that is too long
        raise InputError(f"{path} cannot be a checkpoint folder: {error}") from None
    if found != "a folder":
        raise InputError(f"{folder} is {found}; give the folder that holds config.json and the .safetensors files")
    return folder


def present(file: Path) -> bool:
    """Whether there is such a file; a link that leads nowhere is a cache with a hole in it, and not the same as no file."""
    if file.is_symlink() and not file.exists():
        raise InputError(f"{file} is a link to a file that is gone; download the checkpoint again")
    return file.is_file()


def read_json(file: Path, once: bool = False) -> dict[str, Any]:
    """A JSON file that must hold an object; with `once` no key may stand in it twice."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if once and len(result) < len(items):
            keys = [key for key, _ in items]
            twice = sorted({key for key in keys if keys.count(key) > 1})
            raise ValueError(f"{shortlist(twice)} stands there twice")
        return result

    try:
        data = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=pairs)
    except (OSError, ValueError, RecursionError) as error:
        text = f"{error.strerror}" if isinstance(error, OSError) else f"{error}; it is {file_looks(file)}"
        raise InputError(f"{file} cannot be read as JSON: {text}") from None
    if not isinstance(data, dict):
        raise InputError(f"{file} must hold a JSON object, not a {type(data).__name__}")
    return data


def read_config(folder: Path) -> QwenConfig:
    """config.json, refused where it is not of a model that runs here."""
    if not present(folder / "config.json"):
        looks = folder_looks(folder, names_in(folder)) or "give the folder that holds it and the .safetensors files"
        raise InputError(f"{folder} has no config.json; {looks}")
    data = read_json(folder / "config.json")
    try:
        return QwenConfig.from_dict(data)
    except InputError as error:
        kind = None if data.get("model_type") in list(ARCHITECTURES) else model_looks(data)
        raise InputError(f"{folder}: {error}" + (f". It is {kind}" if kind else "")) from None
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise InputError(f"{folder}: config.json has a value of the wrong kind: {error}") from None


def read_index(folder: Path) -> dict[str, str] | None:
    """Which shard holds which tensor; None where there is no index."""
    file = folder / INDEX
    if not present(file):
        return None
    index = read_json(file, once=True).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise InputError(f"{file} has no weight_map")
    # Plain names only: a path could leave the folder, and on the hub a pattern would fetch more than is meant.
    wrong = sorted({str(name) for name in index.values() if not re.fullmatch(r"[\w.-]{1,200}\.safetensors", str(name))})
    if wrong:
        raise InputError(f"{file} names weight files that are none of its folder's .safetensors: {shortlist(wrong)}")
    return index


def shard_files(folder: Path) -> list[Path]:
    """The weight files: those the index names, or else the single model.safetensors. Never a blind glob."""
    index = read_index(folder)
    if index is None:
        if present(folder / WEIGHTS):
            return [folder / WEIGHTS]
        names = names_in(folder)
        found = sorted(name for name in names if name.endswith(".safetensors"))
        looks = (
            f"found only {shortlist(found)}" if found else folder_looks(folder, names) or "found no weight files at all"
        )
        raise InputError(f"{folder} has neither {WEIGHTS} nor {INDEX}; {looks}")
    names = sorted(set(index.values()))
    if (folder / WEIGHTS).exists() and WEIGHTS not in names:
        warnings.warn(f"{folder} has both {INDEX} and {WEIGHTS}; the files that the index names are used", stacklevel=2)
    missing = [name for name in names if not (folder / name).is_file() or (folder / name).stat().st_size == 0]
    if missing:
        raise InputError(
            f"{folder} lacks {len(missing)} of {len(names)} shards: {shortlist(missing)}; "
            "they are missing or empty, as after an interrupted download"
        )
    return [folder / name for name in names]


def names_in(folder: Path) -> list[str]:
    try:
        return [file.name for file in folder.iterdir()]
    except OSError as error:
        raise InputError(f"{folder} cannot be read: {error.strerror}") from None


def shortlist(names: Any, most: int = 6) -> str:
    """`a, b, c and 17 more`: a readable part of a list that may be long."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
