"""The generate command, as a process of its own, on real checkpoints that say known things."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import jsonschema
import pytest
from builders import edit_json, save_scripted, save_tiny, save_tokenizer
from conftest import RESULT_SCHEMA

COMMAND = [sys.executable, "-m", "qwen_scratch.generate"]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """Thinks "c", then answers: a, an emoji in four tokens, b, and the stop id."""
    emoji = ["ð", "Ł", "ĺ", "Ģ"]  # the bytes of U+1F600
    words = ["Ċ", "<think>", "c", "</think>", "a", *emoji, "b", "<|im_end|>"]
    return save_scripted(tmp_path_factory.mktemp("cli") / "script", words)


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """Goes round a, b, c, a, ... without an end."""
    return save_scripted(
        tmp_path_factory.mktemp("cli") / "endless", ["a", "b", "c"], loop=True, max_position_embeddings=100_000
    )


@contextmanager
def started(*options, **pipes):
    """The command as a running process that takes Ctrl-C, even where the suite itself runs in the background."""

    def listen_to_interrupts():
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen([*COMMAND, *map(str, options)], preexec_fn=listen_to_interrupts, **pipes)  # noqa: PLW1509
    try:
        with process:
            yield process
            process.wait(60)
    finally:
        process.kill()


def failed(done, *words, code=2):
    """One or two lines on stderr that say it; nothing on stdout."""
    text = done.stderr.decode()
    assert done.returncode == code, text
    assert done.stdout == b""
    assert 1 <= len(text.strip().splitlines()) <= 2, text
    for word in words:
        assert str(word) in text, text


def test_answer_on_stdout_all_else_on_stderr(script, generate):
    done = generate("hi", "--model", script)
    assert done.returncode == 0
    assert done.stdout.decode() == "a😀b\n"
    lines = done.stderr.decode().splitlines()
    assert str(script) in lines[0] and "qwen3" in lines[0] and "float32 on cpu" in lines[0] and "KV cache" in lines[0]
    assert "temperature 0" in lines[1]
    assert lines[2] == "c"
    assert "tokens/s, stopped by eos" in lines[3]
    assert len(lines) == 4
    quiet = generate("hi", "--model", script, "--quiet")
    assert (quiet.stdout.decode(), quiet.stderr) == ("a😀b\n", b"")


def test_json(script, generate):
    done = generate("hi 漢", "--model", script, "--json", "--quiet")
    out = json.loads(done.stdout)
    assert done.stdout.count(b"\n") == 1
    assert out["prompt"] == "hi 漢"
    assert out["rendered_prompt"] == "<|im_start|>user\nhi 漢<|im_end|>\n<|im_start|>assistant\n"
    assert out["prompt_tokens"] == len(out["input_ids"])
    assert out["generated_tokens"] == len(out["generated_token_ids"]) == 10
    assert out["generated_text"] == "a😀b"
    assert out["thinking_text"] == "c"
    assert out["stop_reason"] == "eos"
    assert out["eos_token_ids"] == [out["generated_token_ids"][-1]]
    assert out["first_token_top"][0]["token_id"] == out["generated_token_ids"][0]
    assert 0 < sum(entry["prob"] for entry in out["first_token_top"]) <= 1
    assert out["sampling"]["temperature"] == 0
    assert (out["device"], out["dtype"], out["model"], out["tool_calls"]) == ("cpu", "float32", str(script), [])
    for key in ("load_s", "ttft_s", "decode_tokens_per_s", "kv_cache_mib", "peak_memory_mib"):
        assert out[key] > 0
    assert "revision" in out


def test_quantised_weights(script, generate):
    done = generate("hi", "--model", script, "--quantize", "int8", "--json")
    out = json.loads(done.stdout)
    assert (out["quantize"], out["generated_text"], out["dtype"]) == ("int8", "a😀b", "float32")
    assert "MiB in int8" in done.stderr.decode()
    assert json.loads(generate("hi", "--model", script, "--json", "--quiet").stdout)["quantize"] is None


def test_the_schema_of_the_json_can_fail(script, generate):
    """Every key is required where it is always there, and none goes by unknown."""
    options = ["hi", "--model", script, "--json", "--quiet", "--logprobs", 1, "--top-p", 0.9]
    out = json.loads(generate(*options).stdout)
    jsonschema.validate(out, RESULT_SCHEMA)
    optional = {"logprobs"}
    spoiled = [{key: value for key, value in out.items() if key != gone} for gone in out if gone not in optional]
    spoiled += [out | {"other": 1}, *(out | {key: object()} for key in out)]
    spoiled += [out | {"stop_reason": None}, out | {"sampling": out["sampling"] | {"top_q": 1}}]
    for bad in spoiled:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, RESULT_SCHEMA)


def test_a_seed_repeats_a_run(tiny, generate):
    options = ["hi", "--model", tiny, "--temperature", 1.5, "--max-new-tokens", 12, "--json", "--quiet"]
    first = json.loads(generate(*options).stdout)
    again = json.loads(generate(*options, "--seed", first["sampling"]["seed"]).stdout)
    assert again["generated_token_ids"] == first["generated_token_ids"]


@pytest.mark.parametrize("way", ["argument", "-", "--prompt-file", "--messages"])
def test_ways_to_give_a_prompt(script, generate, tmp_path, way):
    text = "two\nlines 漢字"
    options, stdin = {
        "argument": ([text], b""),
        "-": (["-"], f"{text}\n".encode()),
        "--prompt-file": (["--prompt-file", tmp_path / "p.txt"], b""),
        "--messages": (["--messages", tmp_path / "m.json"], b""),
    }[way]
    (tmp_path / "p.txt").write_text(text + "\n", encoding="utf-8")
    (tmp_path / "m.json").write_text(json.dumps([{"role": "user", "content": text}]), encoding="utf-8")
    out = json.loads(generate(*options, "--model", script, "--json", "--quiet", stdin=stdin).stdout)
    assert out["rendered_prompt"] == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def test_template_options(script, generate):
    def rendered(*options):
        return json.loads(generate("hi", *options, "--model", script, "--json", "--quiet").stdout)["rendered_prompt"]

    plain = rendered()
    assert rendered("--thinking") == plain
    assert rendered("--no-thinking") == plain + "<think>\n\n</think>\n\n"
    assert rendered("--system", "Be brief.") == "<|im_start|>system\nBe brief.<|im_end|>\n" + plain
    assert rendered("--system", "") == "<|im_start|>system\n<|im_end|>\n" + plain
    assert rendered("--raw") == "hi"


def test_raw_text_is_taken_as_it_is(script, generate):
    out = json.loads(generate("-", "--raw", "--model", script, "--json", "--quiet", stdin=b"x\n").stdout)
    assert out["rendered_prompt"] == "x\n"
    assert generate(" ", "--raw", "--model", script, "--max-new-tokens", 2).returncode == 0


def test_empty_prompts(script, generate):
    failed(generate("", "--raw", "--model", script), "empty")
    assert generate("", "--model", script).returncode == 0  # the template's own tokens are a prompt


def test_without_a_chat_template(tmp_path, generate):
    folder = save_scripted(tmp_path / "model", ["a", "b", "c"], template=None)
    failed(generate("a", "--model", folder), "chat_template.jinja", "tokenizer_config.json", "--raw")
    assert generate("a", "--raw", "--model", folder, "--max-new-tokens", 2, "--quiet").stdout == b"bc\n"


def test_context_limits(tmp_path, generate):
    folder = save_tiny(tmp_path / "model", "qwen2", vocab_size=320, max_position_embeddings=64)
    save_tokenizer(folder)
    failed(generate("1" * 70, "--raw", "--model", folder), "70 > 64")
    done = generate("1" * 60, "--raw", "--model", folder, "--max-new-tokens", 32768, "--json")
    assert json.loads(done.stdout)["generated_tokens"] == 4
    assert json.loads(done.stdout)["prompt_tokens"] == 60
    assert "at most 4 new tokens instead of 32768" in done.stderr.decode()
    failed(generate("1" * 20, "--raw", "--model", folder, "--max-context", 16), "20 > 16")
    failed(generate("1", "--raw", "--model", folder, "--max-context", 65), "1 to 64")
    done = generate("2" * 30 + "1" * 48, "--raw", "--model", folder, "--truncate", "--json")
    out = json.loads(done.stdout)
    assert out["prompt_tokens"] == 48
    assert len(set(out["input_ids"])) == 1  # the end is what stays
    assert out["generated_tokens"] == 16
    assert "78 tokens, too many for a context of 64: its first 30 are cut" in done.stderr.decode()
    done = generate("1" * 20, "--raw", "--model", folder, "--truncate", "--json", "--max-new-tokens", 2)
    assert json.loads(done.stdout)["prompt_tokens"] == 20


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], ["prompt", "--messages"]),
        (["hi", "--prompt-file", "x"], ["one prompt only"]),
        (["--prompt-file", "nowhere.txt"], ["nowhere.txt"]),
        (["--prompt-file", "latin.txt"], ["latin.txt", "UTF-8"]),
        (["--messages", "bad.json"], ["bad.json", "JSON"]),
        (["--messages", "object.json"], ["object.json", "list of messages"]),
        (["--messages", "number.json"], ["number.json", "not JSON"]),
        (["--messages", "roles.json"], ["message 0", "role"]),
        (["hi", "--model", "nowhere"], ["nowhere", "not there"]),
        (["hi", "--device", "tpu"], ["tpu"]),
        (["hi", "--device", "cuda:99"], ["cuda:99"]),
        (["hi", "--dtype", "float8"], ["float8", "bfloat16"]),
        (["hi", "--quantize", "int3"], ["int3", "int8, int4, int4-128"]),
        (["hi", "--quantize", "int8", "--exact"], ["exact", "quantize"]),
        (["hi", "--threads", "0"], ["--threads"]),
        (["hi", "--threads", "100000"], ["--threads", "1024"]),
        (["hi", "--threads", "9" * 30], ["--threads"]),
        (["hi", "--threads", "abc"], ["--threads", "abc"]),
        (["hi", "--no-such-option"], ["--no-such-option"]),
        (["hi", "--max-new", "5"], ["--max-new"]),  # no guessing from half a name
        (["hi", "--thinking", "--no-thinking"], ["--no-thinking", "--thinking"]),
        (["hi", "--system", os.fsdecode(b"\xff")], ["Unicode"]),
        (["hi", "--messages", "x\ny"], ["one prompt only"]),
        (["--prompt-file", "x\ny"], ["x y", "cannot be read"]),
        (["hi", "--temperature", "-1"], ["temperature"]),
        (["hi", "--temperature", "nan"], ["temperature"]),
        (["hi", "--top-p", "2"], ["top_p"]),
        (["hi", "--top-k", "-1"], ["top_k"]),
        (["hi", "--max-new-tokens", "0"], ["max_new_tokens"]),
        (["hi", "--seed", "-3"], ["seed"]),
        (["hi", "--greedy", "--top-k", "5"], ["--greedy", "--top-k"]),
        (["hi", "--raw", "--system", "x"], ["template", "raw"]),
        (["hi", "--raw", "--no-thinking"], ["template", "raw"]),
    ],
    ids=" ".join,
)
def test_wrong_input(script, generate, tmp_path, options, words):
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "bad.json").write_text("[{")
    (tmp_path / "number.json").write_text(f'[{{"role": "user", "content": {"1" * 5000}}}]')
    (tmp_path / "object.json").write_text('{"messages": "hi"}')
    (tmp_path / "roles.json").write_text('[{"content": "hi"}]')
    options = options if "--model" in options else [*options, "--model", script]
    failed(generate(*options), *words)


def test_wrong_checkpoints(script, generate, tmp_path):
    def spoiled(name, **changes):
        folder = shutil.copytree(script, tmp_path / name)
        edit_json(folder / "config.json", **changes)
        return generate("hi", "--model", folder)

    failed(spoiled("moe", model_type="qwen3_moe"), "qwen3_moe", "qwen2 and qwen3")
    failed(spoiled("lacks", num_hidden_layers=None), "num_hidden_layers")
    failed(spoiled("shape", intermediate_size=81), "wrong shape")
    (tmp_path / "empty").mkdir()
    failed(generate("hi", "--model", tmp_path / "empty"), "config.json")
    folder = shutil.copytree(script, tmp_path / "garbage")
    (folder / "tokenizer.json").write_text("{}")
    failed(generate("hi", "--model", folder), "tokenizer.json")


def test_help_does_not_wait_for_torch():
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, check=True)
    assert "Exit codes" in done.stdout
    probe = "import sys, qwen_scratch.generate; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout == "False\n"


def test_closed_streams(script):
    """Started with stdin, stdout or stderr closed, as some daemons do."""
    command = f'"{sys.executable}" -m qwen_scratch.generate'
    for line, code, out in (
        (f"{command} hi --model '{script}' --quiet 2>&-", 0, "a😀b\n"),
        (f"{command} hi --model '{script}' 2>&-", 0, "a😀b\n"),
        (f"{command} hi --model '{script}' --quiet >&-", 0, ""),
        (f"{command} - --model '{script}' <&-", 2, ""),
    ):
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (code, out), done.stderr
        assert "Traceback" not in done.stderr


def test_threads_are_set_only_when_asked(script, generate):
    probe = (
        "import torch; n = torch.get_num_threads(); import qwen_scratch.completion; assert torch.get_num_threads() == n"
    )
    subprocess.run([sys.executable, "-c", probe], check=True)
    assert generate("hi", "--model", script, "--threads", 1).returncode == 0


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_consoles_that_cannot_show_everything(script, generate, encoding):
    done = generate("hi", "--model", script, "--quiet", env={"PYTHONIOENCODING": encoding})
    assert done.returncode == 0
    assert done.stdout == b"a?b\n"


def test_json_on_a_console_that_cannot_show_everything(script, generate):
    done = generate("naïve 漢字", "--model", script, "--json", "--quiet", env={"PYTHONIOENCODING": "ascii"})
    out = json.loads(done.stdout)
    assert (out["prompt"], out["generated_text"]) == ("naïve 漢字", "a😀b")


def test_reader_that_closes_the_pipe(endless):
    options = ["a", "--raw", "--model", endless, "--max-new-tokens", 50000]
    with started(*options, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(1) in b"abc"
        process.stdout.close()
        errors = process.stderr.read().decode()
        assert process.wait(60) == 0
    assert "Traceback" not in errors and "Exception" not in errors


@pytest.mark.parametrize("json_wanted", [False, True])
def test_interrupt_while_streaming(endless, json_wanted):
    options = ["a", "--raw", "--model", endless, "--max-new-tokens", 90000, *(["--json"] if json_wanted else [])]
    with started(*options, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        if json_wanted:
            for line in process.stderr:  # the loop begins behind this line
                if line.startswith(b"sampling"):
                    break
            time.sleep(1)
            first = b""
        else:
            first = process.stdout.read(3)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert b"stopped by interrupted" in errors
    if json_wanted:
        out = json.loads(rest)
        assert out["stop_reason"] == "interrupted"
        assert out["generated_text"] and set(out["generated_text"]) <= set("abc")
    else:
        assert first == b"bca"
        assert rest.endswith(b"\n") and set(rest[:-1].decode()) <= set("abc")


@pytest.mark.parametrize("delay", [0.3, 0.7, 1.1, 1.5, 1.9])
def test_interrupt_while_starting(endless, delay):
    """While importing, loading or already running: never a traceback."""
    options = ["a", "--raw", "--model", endless, "--max-new-tokens", "90000"]
    with started(*options, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert b"Traceback" not in errors, errors.decode()
    assert process.returncode == 130


def test_failure_of_the_run_is_one_line(script, generate, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(script, tmp_path / "nan")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    done = generate("hi", "--model", folder, "--quiet")
    assert done.returncode == 1
    assert done.stderr.decode().startswith("generate: failed: the model produced non-finite logits")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_thinking_is_dimmed_on_a_terminal(script):
    import pty

    main, other = pty.openpty()
    with started("hi", "--model", script, stdout=subprocess.PIPE, stderr=other) as process:
        assert process.stdout.read().decode() == "a😀b\n"
    os.close(other)
    assert b"\x1b[2mc\x1b[0m" in os.read(main, 10_000)
    os.close(main)


def test_stop_strings(script, generate):
    """A stop text may span tokens; nothing of it is shown, and the ids tell all that was made."""
    for stop, text, tokens in (
        ("😀", "a", 8),
        ("a😀b", "", 9),
        ("b", "a😀", 9),
        ("zzz", "a😀b", 10),
        ("c", "a😀b", 10),
    ):
        out = json.loads(generate("hi", "--model", script, "--stop", stop, "--json", "--quiet").stdout)
        assert (out["generated_text"], out["thinking_text"]) == (text, "c")
        assert len(out["generated_token_ids"]) == tokens
        assert out["stop_reason"] == ("eos" if tokens == 10 else "stop")
    done = generate("hi", "--model", script, "--stop", "q", "--stop", "😀", "--quiet")
    assert done.stdout.decode() == "a\n"
    failed(generate("hi", "--model", script, "--stop", ""), "stop")


def test_hidden_thinking(script, generate):
    done = generate("hi", "--model", script, "--hide-thinking")
    assert done.stdout.decode() == "a😀b\n"
    assert "c" not in done.stderr.decode().splitlines()


def test_thinking_that_the_limit_ends(script, generate):
    done = generate("hi", "--model", script, "--max-new-tokens", 2)
    assert done.stdout == b"\n"
    *_, thought, last = done.stderr.decode().splitlines()
    assert thought == "c"
    assert last.endswith("stopped by length while still thinking: raise --max-new-tokens")
    out = json.loads(generate("hi", "--model", script, "--max-new-tokens", 2, "--json", "--quiet").stdout)
    assert (out["thinking_text"], out["generated_text"], out["stop_reason"]) == ("c", "", "length")


def test_tools_reach_the_template(tmp_path, generate):
    template = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}|{{ messages[0].content }}"
    folder = save_scripted(tmp_path / "model", ["Ċ", "a", "b"], template=template)
    tools = tmp_path / "tools.json"
    tools.write_text('[{"name": "é"}]', encoding="utf-8")
    options = ["hi", "--model", folder, "--json", "--quiet", "--max-new-tokens", 2]
    assert json.loads(generate(*options, "--tools", tools).stdout)["rendered_prompt"] == '{"name": "é"}|hi'
    assert json.loads(generate(*options).stdout)["rendered_prompt"] == "|hi"
    failed(generate("hi", "--raw", "--model", folder, "--tools", tools), "template", "raw")
    for bad in ("{}", "[]", "[1]", "[{"):
        tools.write_text(bad)
        failed(generate(*options, "--tools", tools), "tools.json")


def test_literal_specials(script, generate):
    """Text that spells control tokens: those tokens by default, as in the reference; with the option just text."""
    text = "a<|im_end|>\n<|im_start|>system\nb"
    options = [text, "--model", script, "--json", "--quiet", "--max-new-tokens", 2]
    matched, literal = (json.loads(generate(*options, *more).stdout) for more in ([], ["--literal-specials"]))
    assert matched["rendered_prompt"] == literal["rendered_prompt"]
    end = matched["eos_token_ids"][0]
    assert (matched["input_ids"].count(end), literal["input_ids"].count(end)) == (2, 1)
    raw = json.loads(generate(*options, "--literal-specials", "--raw").stdout)
    assert (raw["input_ids"].count(end), raw["rendered_prompt"]) == (0, text)


def test_content_as_parts(script, generate, tmp_path):
    file = tmp_path / "m.json"
    options = ["--messages", file, "--model", script, "--json", "--quiet"]
    file.write_text('[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]')
    out = json.loads(generate(*options).stdout)
    assert out["rendered_prompt"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    file.write_text('[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]')
    failed(generate(*options), "message 0", "user", "image_url", "text only")
    file.write_text('[{"role": "user"}]')
    failed(generate(*options), "message 0", "user", "content")


def test_logprobs_in_the_json(script, generate):
    out = json.loads(generate("hi", "--model", script, "--logprobs", 2, "--json", "--quiet").stdout)
    assert [entry["token_id"] for entry in out["logprobs"]] == out["generated_token_ids"]
    assert out["logprobs"][-1]["text"] == "<|im_end|>"
    for entry in out["logprobs"]:
        assert entry["logprob"] <= 0
        assert len(entry["top"]) == 2
        assert entry["top"][0] == {key: entry[key] for key in ("token_id", "text", "logprob")}  # greedy
    assert "logprobs" not in json.loads(generate("hi", "--model", script, "--json", "--quiet").stdout)
    failed(generate("hi", "--model", script, "--logprobs", 2), "--logprobs", "--json")
