"""The measuring scripts run and say what they promise; how quick anything is, is not for a test to judge."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from builders import save_tiny

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "weights" / "qwen3-demo"


def run(script, *options):
    command = [sys.executable, ROOT / "scripts" / script, *map(str, options)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_bench(tmp_path):
    """Thread counts and all figures of every side, and a readable table before the one line of JSON."""
    model = save_tiny(tmp_path / "m", "qwen3")
    options = [
        "--model",
        model,
        "--against",
        "transformers",
        "--exact",
        "--quantize",
        "int8,int4",
        "--dtype",
        "float32",
    ]
    sizes = ["--prompt-tokens", "4,9", "--new-tokens", 4, "--runs", 1, "--threads", 1, "--batch", 2]
    *table, line = run("bench.py", *options, *sizes).splitlines()
    result = json.loads(line)
    assert "1 threads" in result["title"] and result["bandwidth_gb_per_s"] > 0
    sides = ["transformers", "exact", "fast", "int8", "int4"]
    assert [key for key in result if key not in ("title", "bandwidth_gb_per_s")] == sides
    for side in sides:
        summary = result[side]
        assert summary["threads"] == 1
        assert 0 < summary["load_s"] < summary["load_and_first_token_s"] < summary["process_to_first_token_s"]
        assert summary["weights_mib"] > 0 and summary["peak_with_longest_prompt_mib"] >= summary["peak_mib"] > 0
        assert set(summary["cases"]) == {"4", "9"}
        for case in summary["cases"].values():
            assert set(case) == {"prefill_s", "decode_tokens_per_s", "gb_per_s", "share_of_limit"}
    assert result["int8"]["weights_mib"] < 0.5 * result["fast"]["weights_mib"]
    assert result["fast"]["weights_mib"] == pytest.approx(result["exact"]["weights_mib"], rel=0.01)
    assert table[1].split() == sides
    assert any(row.startswith("  decode_tokens_per_s") and row.count("x") == 4 for row in table)


def test_quality(tmp_path):
    """On the demo, whose weights were trained: fewer bits, less like the exact path."""
    text = tmp_path / "text.txt"
    text.write_text("347 + 586\nones 7+6=13 carry\ntens 4+8+1=13 carry\nhundreds 3+5+1=9\n347 + 586 = 933\n" * 5)
    options = ["--tokens", 200, "--window", 90, "--dtype", "float32"]
    result = json.loads(run("quality.py", "--model", DEMO, "--text", text, *options).splitlines()[-1])
    assert list(result) == ["exact", "fast", "int8", "int4", "int4-128"]
    divergence = [side["mean_kl"] for side in result.values()]
    assert divergence[0] == 0 and divergence[1] < 1e-6 < divergence[2] < divergence[3] < divergence[4]
    assert {side["predicted_tokens"] for side in result.values()} == {200 - 3}  # three windows, each without its first
    assert result["exact"]["top1"] == 1 and result["fast"]["top1"] == 1
    assert 1 < result["exact"]["perplexity"] < 50
