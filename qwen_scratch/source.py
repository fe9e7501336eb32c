"""What a reference to a checkpoint means: a folder, a hub id, or nothing, the bundled demo → a folder on this machine."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from qwen_scratch.checkpoint import Header
from qwen_scratch.errors import InputError
from qwen_scratch.files import INDEX, WEIGHTS, read_config, read_index, shortlist
from qwen_scratch.foreign import folder_looks

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SMALL_FILES = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    INDEX,
]  # fmt: skip


class Source(NamedTuple):
    """Where a checkpoint lies."""

    ref: str  # as it was asked for, or the bundled demo's folder
    folder: Path
    revision: str | None = None  # the commit, where it comes from the hub

    def __str__(self) -> str:
        if self.revision is not None:
            return f"{self.ref} (hub, commit {self.revision[:8]})"
        return f"{self.ref} (folder)" if HUB_ID.fullmatch(self.ref) else self.ref


def find(ref: str | Path | None = None, revision: str | None = None, weights: bool = True) -> Source:
    """Where a checkpoint lies, after a download where it comes from the hub.

    Args:
        ref: a folder (as a Path always); an id like "Qwen/Qwen3-0.6B", which is looked for on the hub unless there is such
            a folder; None: the bundled demo. HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are honoured.
        revision: a branch, tag or commit on the hub.
        weights: False leaves the weights on the hub.

    Raises:
        InputError: the hub has no such checkpoint or does not give it out, or a folder is asked for a revision.
        RuntimeError, OSError: the hub cannot be reached, or the disk is full.
    """
    if ref is None:
        ref = bundled_demo()
    elif isinstance(ref, str) and HUB_ID.fullmatch(ref) and not os.path.lexists(ref):
        return download(ref, revision) if weights else small_files(ref, revision)
    if revision is not None:
        raise InputError(f"{ref} is taken as a folder, and a folder has no revisions; leave the revision out")
    return Source(str(ref), Path(ref))


def bundled_demo() -> Path:
    """The small checkpoint that comes with this package: inside an installed one, beside it in a clone."""
    here = Path(__file__).parent
    for folder in (here / "weights" / "qwen3-demo", here.parent / "weights" / "qwen3-demo"):
        if folder.is_dir():
            return folder
    raise InputError(
        "no model given, and this installation lacks the bundled demo (weights/qwen3-demo of the repository); "
        "name a checkpoint with --model"
    )


def download(repo_id: str, revision: str | None = None) -> Source:
    """A checkpoint from the hub or its cache: the small files first, so that a model which cannot run costs no weights."""
    source = small_files(repo_id, revision)
    fetch(repo_id, source.revision, weight_files(source.folder))
    if not (source.folder / INDEX).exists() and not (source.folder / WEIGHTS).exists():
        refuse(source, f"has neither {WEIGHTS} nor {INDEX}")
    return source


def small_files(repo_id: str, revision: str | None = None) -> Source:
    """The same without the weights."""
    source = fetch(repo_id, revision, SMALL_FILES)
    if not (source.folder / "config.json").exists():
        refuse(source, "has no config.json")
    read_config(source.folder)
    return source


def refuse(source: Source, reason: str) -> NoReturn:
    """Say what a repository has instead of what is needed."""
    with hub_errors(source.ref, source.revision) as hub:
        names = hub.HfApi().list_repo_files(source.ref, revision=source.revision)
    looks = folder_looks(source.folder, names) or f"it holds {shortlist(sorted(names)) or 'nothing'}"
    raise InputError(f"{source.ref} {reason}; {looks}")


def remote_headers(source: Source) -> dict[Path, Header] | None:
    """What the weight files of a checkpoint on the hub hold, by reading their headers alone; None: they are all here."""
    files = [source.folder / name for name in weight_files(source.folder)]
    if source.revision is None or all(file.exists() for file in files):
        return None
    headers = {}
    with hub_errors(source.ref, source.revision) as hub:
        for file in files:
            try:
                found = hub.HfApi().parse_safetensors_file_metadata(source.ref, file.name, revision=source.revision)
            except hub.errors.EntryNotFoundError:
                refuse(source, f"lacks {file.name}")
            headers[file] = {key: (list(tensor.shape), str(tensor.dtype)) for key, tensor in found.tensors.items()}
    return headers


def weight_files(folder: Path) -> list[str]:
    """The names of the weight files that a folder's small files call for, whether they are there yet or not."""
    return sorted(set((read_index(folder) or {"": WEIGHTS}).values()))


def fetch(repo_id: str, revision: str | None, files: list[str]) -> Source:
    """Have these files of a repository in the cache, as many of them as it has."""
    with hub_errors(repo_id, revision) as hub:
        folder = Path(hub.snapshot_download(repo_id, revision=revision, allow_patterns=files))
    return Source(repo_id, folder, folder.name)


def hub_library() -> Any:
    """Imported when it is first needed; it reads its environment variables then."""
    try:
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ValueError as error:
        raise InputError(f"one of the HF_... environment variables cannot be read: {error}") from None
    return huggingface_hub


@contextmanager
def hub_errors(repo_id: str, revision: str | None) -> Iterator[Any]:
    """The hub's library, and what can go wrong with it in one line each."""
    hub = hub_library()
    errors = hub.errors
    try:
        yield hub
    except errors.GatedRepoError:
        raise InputError(
            f"{repo_id} is gated: ask for access on its page, then set HF_TOKEN or run `hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise InputError(f"{repo_id} has no revision {revision!r}") from None
    except errors.RepositoryNotFoundError:
        raise InputError(
            f"there is no folder {repo_id} here, and the hub has none of that name, or it is private and needs HF_TOKEN"
        ) from None
    except errors.HFValidationError as error:
        raise InputError(f"{repo_id} cannot be a hub id: {error}") from None
    except errors.SafetensorsParsingError as error:
        raise InputError(
            f"a weight file of {repo_id} is not in safetensors but perhaps a git-lfs pointer, or empty: {error}"
        ) from None
    except UnicodeEncodeError:
        raise InputError("HF_TOKEN holds characters that no token has") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        answer = getattr(error.__cause__, "response", None)
        if answer is not None:
            refuse_answer(repo_id, answer.status_code, error)
        if hub.constants.HF_HUB_OFFLINE:
            raise InputError(
                f"{repo_id} is neither a folder here nor wholly in the hub cache, and HF_HUB_OFFLINE forbids a download"
            ) from None
        raise RuntimeError(
            f"the hub cannot be reached, and {repo_id} is neither a folder here nor wholly in the hub cache: "
            f"{error.__cause__ or error}"
        ) from None
    except errors.HfHubHTTPError as error:
        refuse_answer(repo_id, error.response.status_code, error)
    except (InputError, OSError, RuntimeError, MemoryError):
        raise
    except Exception as error:  # the HTTP library has exceptions of its own
        raise RuntimeError(f"{repo_id} could not be read from the hub: {type(error).__name__}: {error}") from None


def refuse_answer(repo_id: str, status: int, error: Exception) -> NoReturn:
    """The hub was reached, and said no."""
    if status == 401:
        raise InputError(
            f"the hub refuses the token that was sent for {repo_id}: renew or unset HF_TOKEN (or `hf auth logout`)"
        ) from None
    raise RuntimeError(f"the hub answered {status} for {repo_id}; try again later: {error}") from None
