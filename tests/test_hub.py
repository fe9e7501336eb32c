"""Checkpoints from the hub: real processes against a real server, in every state that a hub, a cache or a network can be in."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import hub as loopback
import pytest
from builders import edit_json, save_scripted, save_tiny
from safetensors.torch import load_file, save_file

REPO = "someone/qwen3-tiny"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A scripted checkpoint in two shards that answers "ab", with files beside it that nobody should ask for."""
    folder = save_scripted(tmp_path_factory.mktemp("hub") / "files", ["Ċ", "a", "b", "<|im_end|>"])
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {f"model-0000{n + 1}-of-00002.safetensors": names[n::2] for n in range(2)}
    for file, half in halves.items():
        save_file({name: tensors[name] for name in half}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, half in halves.items() for name in half}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for junk in ("pytorch_model.bin", "consolidated.safetensors", "README.md", "model.gguf"):
        (folder / junk).write_bytes(b"junk")
    return folder


SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture
def hub(checkpoint):
    with loopback.running() as server:
        server.repos[REPO] = checkpoint
        yield server


@pytest.fixture
def environment(hub, tmp_path):
    """What a user's shell would have: this hub, and a cache of its own."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))
    }
    return kept | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}


def command(*options, module="generate"):
    return [sys.executable, "-m", f"qwen_scratch.{module}", *map(str, options)]


@pytest.fixture
def ask(environment, tmp_path):
    def run(*options, model=REPO, module="generate", limit=None, **changes):
        options = ["hi", "--model", model, *options] if module == "generate" else [model, *options]
        done = subprocess.run(
            command(*options, module=module),
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment | changes,
            timeout=120,
            preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))) if limit else None,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run


def failed(done, *words, code=2):
    lines = [line for line in done.stderr.splitlines() if ": error: " in line or ": failed: " in line]
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert len(lines) == 1, done.stderr
    assert done.stderr.endswith(lines[0] + "\n")
    for word in words:
        assert str(word) in lines[0], lines[0]


def answered(done):
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ab\n"


def test_by_id_and_revision_then_offline(hub, ask):
    done = ask("--revision", "v1", "--json")
    out = json.loads(done.stdout)
    assert (out["generated_text"], out["model"], out["revision"]) == ("ab", REPO, hub.commit(REPO))
    needed = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert hub.files_asked() == needed | {"model.safetensors.index.json", *SHARDS}
    asked = len(hub.asked)
    offline = ask("--revision", "v1", HF_HUB_OFFLINE="1")
    answered(offline)
    assert f"{REPO} (hub, commit {hub.commit(REPO)[:8]}): qwen3" in offline.stderr
    answered(ask("--revision", hub.commit(REPO), HF_HUB_OFFLINE="1"))
    assert len(hub.asked) == asked
    failed(ask(HF_HUB_OFFLINE="1"), REPO, "HF_HUB_OFFLINE")  # main was never asked for


def test_a_hub_that_cannot_be_reached(hub, ask):
    failed(ask(HF_ENDPOINT="http://127.0.0.1:9"), "cannot be reached", REPO, code=1)
    answered(ask())
    answered(ask(HF_ENDPOINT="http://127.0.0.1:9"))  # all is in the cache


def test_what_the_hub_does_not_have(hub, ask):
    failed(ask(model="someone/nothing"), "no folder someone/nothing here", "hub has none", "HF_TOKEN")
    failed(ask("--revision", "v7"), REPO, "no revision 'v7'")
    failed(ask(model="so--me/bad..name"), "so--me/bad..name", "hub id")
    assert hub.files_asked() == set()


def test_gated(hub, ask):
    hub.gated[REPO] = "hf_secret"
    failed(ask(), REPO, "gated", "HF_TOKEN")
    failed(ask(HF_TOKEN="hf_other"), REPO, "gated", "HF_TOKEN")
    answered(ask(HF_TOKEN="hf_secret"))


def test_a_hub_that_says_no(hub, ask):
    """A stale token, and what is the hub's own fault."""
    hub.answers = 401
    failed(ask(HF_TOKEN="hf_stale"), "refuses the token", "HF_TOKEN")
    hub.answers = 403
    failed(ask(), "the hub answered 403", REPO, code=1)
    failed(ask(HF_TOKEN="hf_é"), "HF_TOKEN holds characters")
    failed(ask(HF_HUB_DOWNLOAD_TIMEOUT="abc"), "environment variables", "abc")


def test_an_index_cannot_ask_for_more(hub, ask, checkpoint, tmp_path):
    hub.repos[REPO] = folder = shutil.copytree(checkpoint, tmp_path / "files")
    for name in ("pytorch_model.bin", "*"):
        edit_json(folder / "model.safetensors.index.json", weight_map={"model.norm.weight": name})
        failed(ask(), "none of its folder's .safetensors", name)
        shutil.rmtree(tmp_path / "home")
    assert not hub.files_asked() & {"pytorch_model.bin", "README.md", "model.gguf"}


def test_check_refuses_what_a_run_would_refuse(ask, checkpoint, tmp_path):
    def spoiled(name, file, text):
        folder = shutil.copytree(checkpoint, tmp_path / name)
        (folder / file).write_text(text)
        return ask(model=f"./{name}", module="check")

    failed(spoiled("a", "tokenizer.json", "{"), "tokenizer.json")
    failed(spoiled("b", "generation_config.json", '{"temperature": "hot"}'), "temperature")
    failed(spoiled("c", "generation_config.json", '{"eos_token_id": "x"}'), "eos_token_id")
    failed(spoiled("d", "chat_template.jinja", "{% if %}"), "does not compile")
    done = spoiled("e", "chat_template.jinja", "")
    assert done.returncode == 0
    assert "no chat template" in done.stdout


def test_a_shard_that_the_hub_lacks(hub, ask, checkpoint, tmp_path):
    hub.repos[REPO] = folder = shutil.copytree(checkpoint, tmp_path / "files")
    (folder / SHARDS[1]).unlink()
    failed(ask(), SHARDS[1], "1 of 2 shards")
    failed(ask(module="check"), f"lacks {SHARDS[1]}")
    (folder / SHARDS[1]).write_text("version https://git-lfs.github.com/spec/v1")
    failed(ask(module="check"), REPO, "git-lfs")


def test_a_dropped_connection_is_resumed(hub, environment, tmp_path):
    """What has come by then is not asked for again. (It is written in pieces of 10 MB.)"""
    hub.repos[REPO] = save_tiny(tmp_path / "files", "qwen3", hidden_size=768, intermediate_size=3072, vocab_size=4000)
    size = (hub.repos[REPO] / "model.safetensors").stat().st_size
    hub.drop_once["model.safetensors"] = size - 5_000_000
    probe = f"import qwen_scratch; print(qwen_scratch.load_model({REPO!r}).config.num_parameters)"
    done = subprocess.run([sys.executable, "-c", probe], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 20e6
    wanted = [w for method, path, w in hub.asked if path.endswith("model.safetensors") and method == "GET"]
    assert len(wanted) == 2
    assert int(wanted[1].removeprefix("bytes=").removesuffix("-")) >= 10_000_000


def test_a_full_disk(hub, ask):
    """No file may grow beyond 100 kB, which for the program is what a full disk is: writing fails."""
    failed(ask(limit=100_000), code=1)
    answered(ask())


@pytest.mark.parametrize("sent", [0, 5000])
def test_interrupt_while_downloading(hub, ask, environment, tmp_path, sent):
    hub.stall[SHARDS[0]] = sent
    process = subprocess.Popen(
        command("hi", "--model", REPO),
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    while SHARDS[0] not in hub.files_asked():
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in errors
    hub.stall.clear()
    answered(ask())


def test_a_model_that_cannot_run_costs_no_weights(hub, ask, checkpoint, tmp_path):
    hub.repos[REPO] = folder = shutil.copytree(checkpoint, tmp_path / "files")
    edit_json(folder / "config.json", model_type="qwen3_moe")
    failed(ask(), "qwen3_moe", "mixture of experts")
    assert not hub.files_asked() & set(SHARDS)


def test_pickles_are_not_downloaded(hub, ask, checkpoint, tmp_path):
    hub.repos[REPO] = folder = shutil.copytree(checkpoint, tmp_path / "files")
    for name in [*SHARDS, "model.safetensors.index.json", "model.gguf", "consolidated.safetensors"]:
        (folder / name).unlink()
    for module in ("generate", "check"):
        failed(ask(module=module), REPO, "pytorch_model.bin", "pickles")
    assert "pytorch_model.bin" not in hub.files_asked()
    (folder / "config.json").unlink()
    (folder / "pytorch_model.bin").rename(folder / "model-q4.gguf")
    hub.repos["someone/gguf"] = folder
    failed(ask(model="someone/gguf"), "no config.json", "model-q4.gguf", "llama.cpp")


def test_a_folder_of_that_name_wins(hub, ask, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / REPO)
    done = ask()
    answered(done)
    assert f"{REPO} (folder): qwen3" in done.stderr
    failed(ask("--revision", "v1"), "folder", "no revisions")
    assert hub.asked == []


@pytest.mark.parametrize("path", ["./someone/else", "/someone/else", "someone/else/more", "~/x", "x"])
def test_paths_are_not_sent_to_the_hub(hub, ask, path):
    failed(ask(model=path), "not there")
    assert hub.asked == []


def test_a_cache_made_by_others(hub, ask, checkpoint, tmp_path):
    """Blobs, links and a ref, as the hub's own tools leave them; then a link whose blob is gone."""
    home = tmp_path / "home" / "hub" / f"models--{REPO.replace('/', '--')}"
    snapshot = home / "snapshots" / hub.commit(REPO)
    for folder in (snapshot, home / "blobs", home / "refs"):
        folder.mkdir(parents=True)
    (home / "refs" / "main").write_text(hub.commit(REPO))
    for file in checkpoint.iterdir():
        blob = shutil.copy(file, home / "blobs" / loopback.etag(file))
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    answered(ask(HF_HUB_OFFLINE="1"))
    (home / "blobs" / loopback.etag(checkpoint / SHARDS[1])).unlink()
    failed(ask(HF_HUB_OFFLINE="1"), SHARDS[1])
    assert hub.asked == []


def test_check_reads_no_weights(hub, ask):
    done = ask("--json", module="check")
    out = json.loads(done.stdout)
    assert out["parameters"] == sum(t.numel() for shard in SHARDS for t in load_file(hub.repos[REPO] / shard).values())
    assert (out["files"], out["revision"]) == (2, hub.commit(REPO))
    for method, path, wanted in hub.asked:
        if path.endswith(".safetensors") and method == "GET":
            assert wanted is not None
    assert "would load" in ask(module="check").stdout
    failed(ask(module="check", HF_HUB_OFFLINE="1"), "HF_HUB_OFFLINE")  # the weights' headers are not in the cache
    answered(ask())
    asked = len(hub.asked)
    assert "would load" in ask(module="check", HF_HUB_OFFLINE="1").stdout  # from the cache alone
    assert len(hub.asked) == asked


def test_progress_is_shown_unless_quiet(hub, ask):
    done = ask("--quiet")
    answered(done)
    assert done.stderr == ""


def test_from_python(hub, environment, tmp_path):
    """The contract's order: ref, device, dtype, revision."""
    probe = f"import qwen_scratch; model, tokenizer = qwen_scratch.load({REPO!r}, 'cpu', 'float32', 'v1'); print(model.dtype)"
    done = subprocess.run([sys.executable, "-c", probe], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "torch.float32\n"


def test_unknown_weights_contradict_the_config_on_the_hub(hub, ask, tmp_path):
    hub.repos[REPO] = save_tiny(tmp_path / "files", "qwen3")
    edit_json(tmp_path / "files" / "config.json", intermediate_size=81)
    failed(ask(module="check"), "wrong shape")
