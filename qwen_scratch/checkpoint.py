"""A checkpoint folder → its config, and its weights straight onto the device.

Only JSON and safetensors are read, never a pickle. Before the first tensor is read, the headers of all
shards are held against the model's parameters; a checkpoint that does not fit is refused whole.
"""

import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from qwen_scratch.config import DTYPES, QwenConfig
from qwen_scratch.errors import InputError
from qwen_scratch.files import (
    INDEX,
    existing_folder,
    present,
    read_config,
    read_index,
    read_json,
    shard_files,
    shortlist,
)
from qwen_scratch.foreign import file_looks
from qwen_scratch.model import Qwen

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Header = dict[str, tuple[list[int], str]]  # what a safetensors file holds: key → shape and dtype


class Stored(NamedTuple):
    """One tensor as a shard's header describes it."""

    file: Path
    key: str  # its name in the file
    shape: list[int]
    dtype: str  # safetensors' name: "BF16", "F32", ...


@dataclass(frozen=True)
class Checkpoint:
    """What a folder holds, as far as small files and shard headers tell."""

    folder: Path
    config: QwenConfig
    generation_config: dict[str, Any]
    tensors: dict[str, list[Stored]]  # parameter name → every place that claims to hold it

    @property
    def dtype(self) -> torch.dtype:
        """What config.json says, or else what the embedding is stored in."""
        if self.config.dtype is not None:
            return self.config.dtype
        stored = self.tensors.get("model.embed_tokens.weight")
        dtype = FLOATS.get(stored[0].dtype, torch.float32) if stored else torch.float32
        return dtype if dtype in DTYPES.values() else torch.float32

    @property
    def widest(self) -> torch.dtype:
        """What the matrices are stored in, at most."""
        dtypes = {
            FLOATS.get(place.dtype) for places in self.tensors.values() for place in places if len(place.shape) > 1
        }
        return max(filter(None, dtypes), key=lambda dtype: dtype.itemsize, default=torch.float32)


def open_checkpoint(folder: str | Path, headers: dict[Path, Header] | None = None) -> Checkpoint:
    """Read a checkpoint folder's small files and its shards' headers; no weights yet.

    Args:
        headers: what the shards hold, where they are not in the folder themselves.

    Raises:
        InputError: no such folder, no or bad config.json, an unsupported model, a missing or broken shard.
    """
    folder = existing_folder(folder)
    config = read_config(folder)  # first: refuses other models before their files
    generation = folder / "generation_config.json"
    generation_config = read_json(generation) if present(generation) else {}
    if headers is None:
        headers = {file: read_header(file) for file in shard_files(folder)}
    if (folder / "adapter_config.json").exists():
        warnings.warn(f"{folder} also holds an adapter, which is ignored: these are the base weights", stacklevel=2)
    return Checkpoint(folder, config, generation_config, take_stock(folder, headers))


def read_header(file: Path) -> Header:
    try:
        with safe_open(file, framework="pt") as shard:
            parts = {key: shard.get_slice(key) for key in shard.keys()}  # noqa: SIM118 (not a dict)
            return {key: (part.get_shape(), part.get_dtype()) for key, part in parts.items()}
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size
        raise InputError(
            f"{file} ({size:,} bytes) is not a whole safetensors file but {file_looks(file)} ({error})"
        ) from None


def take_stock(folder: Path, headers: dict[Path, Header]) -> dict[str, list[Stored]]:
    """Every tensor in these files, by the name of the parameter that it is for, held against the index where there is one."""
    index = read_index(folder) or {}
    lacking = [f"{key} ({name})" for key, name in index.items() if key not in headers[folder / name]]
    if lacking:
        raise InputError(
            f"{folder / INDEX} and the shards are of different checkpoints: {len(lacking)} tensors are not in the file that "
            f"it names for them: {shortlist(lacking)}"
        )
    tensors = defaultdict(list)
    for file, header in headers.items():
        for key, (shape, dtype) in header.items():
            if not key.endswith("rotary_emb.inv_freq"):  # in old files; these follow from the config
                tensors[parameter_name(key)].append(Stored(file, key, shape, dtype))
    return tensors


def parameter_name(key: str) -> str:
    """Files of the bare backbone leave out `model.`; all others name our parameters as they are."""
    return f"model.{key}" if key.startswith(("embed_tokens.", "layers.", "norm.")) else key


def load_weights(
    model: Qwen,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype | None,
    progress: bool = False,
    to_be_copied: bool = False,
) -> None:
    """Fill a model that was built on the meta device, tensor by tensor, each exactly once; dtype None: as they are stored.

    On the CPU a tensor that is stored in the wanted dtype is used memory-mapped: its pages are read when a
    product first touches them, and nothing is copied. Elsewhere, and when casting, the peak is the model
    plus one tensor. `to_be_copied` says that the caller will copy the tensors and let go of them one by one.

    Raises:
        InputError: names, shapes or dtypes in the files do not fit the model; all of them are listed.
    """
    names_of: dict[Tensor, list[str]] = defaultdict(list)  # a tied head has two names for one parameter
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of[parameter].append(name)
    unfilled = {names[0]: names for names in names_of.values()}
    refuse_misfits(checkpoint, model)

    bar = tqdm(total=len(unfilled), desc="loading", unit="tensor", leave=False, delay=1, disable=not progress)
    for name, tensor in read_tensors(checkpoint.tensors, device, dtype, to_be_copied):
        for alias in unfilled.pop(name):
            owner, _, attribute = alias.rpartition(".")
            setattr(
                model.get_submodule(owner),
                attribute,
                nn.Parameter(tensor.to(dtype or tensor.dtype), requires_grad=False),
            )
        bar.update()
    bar.close()
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    if unfilled:
        raise RuntimeError(f"not loaded: {shortlist(unfilled)}")


def read_tensors(
    tensors: dict[str, list[Stored]], device: torch.device, dtype: torch.dtype | None = None, to_be_copied: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Walk the shards and put each tensor on its device, in the dtype it is stored in.

    A mapping keeps every page that was touched in memory until the last tensor cut from it is gone. Tensors that are
    used as they lie there share one; one that is about to be copied (to another device, or to `dtype`) gets its own,
    or the whole file would stay in memory beside the copies.
    """
    opened: Path | None = None
    shard: Any = None
    for name, (place, *_) in tensors.items():
        copied = to_be_copied or device.type != "cpu" or dtype not in (None, FLOATS[place.dtype])
        if opened != place.file or copied:
            opened, shard = place.file, safe_open(place.file, framework="pt", device=str(device))
        yield name, shard.get_tensor(place.key)


class Rows:
    """A matrix in a file, read some rows at a time, by slices.

    Every few megabytes the file is mapped anew, so that the pages which have been read can go again.
    """

    FRESH = 2**25  # bytes

    def __init__(self, place: Stored) -> None:
        self.place, self.shape = place, torch.Size(place.shape)
        self.shard: Any = None
        self.read = 0

    def __getitem__(self, part: slice) -> Tensor:
        if self.shard is None:
            self.shard = safe_open(self.place.file, framework="pt")
        rows: Tensor = self.shard.get_tensor(self.place.key)[part]
        self.read += rows.nbytes
        if self.read > self.FRESH:
            self.shard, self.read = None, 0
        return rows


def head_rows(checkpoint: Checkpoint) -> Rows:
    """The head's weight [V, D], also where it is the embedding."""
    name = "model.embed_tokens.weight" if checkpoint.config.tie_word_embeddings else "lm_head.weight"
    return Rows(checkpoint.tensors[name][0])


def settle_head(checkpoint: Checkpoint) -> Checkpoint:
    """What to do where config.json ties the head to the embedding and yet the files have a head of its own.

    Some tools store a tied head a second time: an equal copy is left out. One that differs was trained, so it is used, and the
    head is not tied, as in the reference.
    """
    if not has_second_head(checkpoint):
        return checkpoint
    head, embedding = (checkpoint.tensors[name] for name in ("lm_head.weight", "model.embed_tokens.weight"))
    (_, a), (_, b) = read_tensors({"embedding": embedding, "head": head}, torch.device("cpu"))
    if torch.equal(a.float(), b.float()):
        others = {name: places for name, places in checkpoint.tensors.items() if name != "lm_head.weight"}
        return replace(checkpoint, tensors=others)
    warnings.warn(
        f"{checkpoint.folder}: config.json ties the head to the embedding, but the files hold a head that differs; "
        "both are used as they are stored, so the head is not tied",
        stacklevel=2,
    )
    return replace(checkpoint, config=replace(checkpoint.config, tie_word_embeddings=False))


def has_second_head(checkpoint: Checkpoint) -> bool:
    """Whether a head is stored beside the embedding that it is tied to. One of another form is left to the ledger."""
    head, embedding = (checkpoint.tensors.get(name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
    if not checkpoint.config.tie_word_embeddings or not head or not embedding or len(head + embedding) > 2:
        return False
    return {head[0].dtype, embedding[0].dtype} <= FLOATS.keys() and head[0].shape == embedding[0].shape


def refuse_misfits(checkpoint: Checkpoint, model: Qwen) -> None:
    """Hold what the files have against what the model needs, and report all that is wrong at once.

    Raises:
        InputError: names, shapes or dtypes that do not fit.
    """
    folder, tensors = checkpoint.folder, checkpoint.tensors
    wanted = {
        name: list(parameter.shape) for name, parameter in model.named_parameters()
    }  # a tied head is not among them
    packed = [
        name for name in tensors if re.search(r"(qweight|qzeros|g_idx|scales?|scale_inv|absmax|quant_map)$", name)
    ]
    if packed:
        raise InputError(
            f"the weights in {folder} are quantised ({len(packed)} tensors such as {packed[0]}); take the unquantised checkpoint"
        )
    missing = [name for name in wanted if name not in tensors]
    if missing == ["lm_head.weight"]:
        raise InputError(
            f"{folder} has no lm_head.weight although config.json does not tie the head to the embedding; "
            "this looks like an embedding or backbone checkpoint, which cannot generate text"
        )
    unexpected = [name for name in tensors if name not in wanted]
    duplicate = [name for name, places in tensors.items() if len(places) > 1]
    misshapen = [
        f"{name} {places[0].shape} instead of {wanted[name]}"
        for name, places in tensors.items()
        if name in wanted and places[0].shape != wanted[name]
    ]
    not_float = [f"{name} {places[0].dtype}" for name, places in tensors.items() if places[0].dtype not in FLOATS]
    found = {
        "missing": missing,
        "unexpected": unexpected,
        "stored twice": duplicate,
        "of the wrong shape": misshapen,
        "of a quantised or other type without a place here": not_float,
    }
    report = "; ".join(f"{len(names)} {kind}: {shortlist(names)}" for kind, names in found.items() if names)
    if report:
        raise InputError(f"the weights in {folder} do not fit its config.json. {report}")
