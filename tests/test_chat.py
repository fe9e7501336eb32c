"""The chat command: in a real (pseudo-)terminal with somebody typing, and as a process that reads lines from a pipe."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from builders import TEMPLATE, save_scripted, save_tiny, save_tokenizer

import qwen_scratch
from qwen_scratch.chat import Chat

if os.name != "posix":
    pytest.skip("needs a pseudo-terminal", allow_module_level=True)
import pexpect

COMMAND = [sys.executable, "-m", "qwen_scratch.chat"]
ANSWER = ["<think>", "c", "</think>", "a", "ð", "Ł", "ĺ", "Ģ", "b", "<|im_end|>"]
# With thinking off the prompt ends in ~, which begins the endless circle.
SWITCHED = TEMPLATE.replace("<think>\\n\\n</think>\\n\\n", "~")


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """Thinks "c" and answers "a😀b"; with thinking off it says xyz~xyz~... without an end."""
    folder = tmp_path_factory.mktemp("chat") / "script"
    return save_scripted(folder, ["Ċ", *ANSWER], SWITCHED, circle="~xyz", max_position_embeddings=100_000)


class Terminal:
    """The command in a pseudo-terminal, the conversation that it should have, and the ids that its cache should hold."""

    def __init__(self, folder, *options):
        self.tokenizer = qwen_scratch.Tokenizer(folder)
        self.messages, self.system, self.fed = [], [], []
        self.process = pexpect.spawn(
            sys.executable,
            [*COMMAND[1:], "--model", str(folder), *map(str, options)],
            encoding="utf-8",
            timeout=60,
            env=os.environ | {"TERM": "xterm", "PYTHONIOENCODING": "utf-8"},
            dimensions=(40, 400),
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # even if the suite itself ignores Ctrl-C
        )
        self.process.delaybeforesend = 0.3  # a busy machine shows its prompt before it is ready to read
        self.greeting = self.until_prompt()

    def until_prompt(self):
        """What the program prints until it asks for a line."""
        self.process.expect(r"\n(\x1b\[\?2004h)?> ")
        return self.process.before.replace("\r\n", "\n") + "\n"

    def type(self, line):
        """Enter a line; what the program prints for it."""
        self.process.sendline(line)
        self.process.expect_exact(line)  # its echo
        return self.until_prompt()

    def expect_counts(self, said, thinking=None):
        """The line below an answer tells how much of its prompt is new; returns how much is not."""
        prompt = self.tokenizer.encode(self.tokenizer.render(self.system + self.messages, thinking))
        same = [a == b for a, b in zip(self.fed, prompt[:-1], strict=False)]
        reused = [*same, False].index(False)
        counts = f"{len(prompt)} prompt tokens" + (f" ({reused} reused)" if reused else "")
        assert f"[{counts}, first token after" in said, (counts, said)
        self.fed = prompt
        return reused

    def ask(self, text, command=None):
        """A question (or a command that has one answered), and its scripted answer."""
        said = self.type(command or text)
        if command is None:
            self.messages.append({"role": "user", "content": text})
        assert "\x1b[2mc\x1b[0m\na😀b\n" in said, said  # thinking dimmed, then the answer
        assert "10 new tokens at" in said
        assert "stopped by eos]" in said
        reused = self.expect_counts(said)
        self.fed += [self.tokenizer.token_id(piece) for piece in ANSWER[:-1]]
        self.messages.append({"role": "assistant", "content": "a😀b", "reasoning_content": "c"})
        return reused

    def leave(self):
        self.process.expect(pexpect.EOF)
        self.process.close()
        assert self.process.exitstatus == 0


def test_five_turns_in_a_terminal(script, tmp_path):
    terminal = Terminal(script, "--max-new-tokens", 90_000)
    assert str(script) in terminal.greeting
    assert "/help" in terminal.greeting
    assert terminal.ask("hi 漢字") == 0
    assert terminal.ask("the cat") > 0

    assert "thinking off" in terminal.type("/nothink")
    terminal.process.sendline("go on")
    terminal.process.expect_exact("xyz~xyz~xyz")
    terminal.process.sendintr()  # Ctrl-C ends the answer, not the program
    said = terminal.until_prompt()
    assert "stopped by interrupted]" in said
    terminal.messages.append({"role": "user", "content": "go on"})
    assert terminal.expect_counts(said, thinking=False) > 0
    saved = tmp_path / "saved.json"
    assert f"6 messages saved to {saved}" in terminal.type(f"/save {saved}")
    *before, answer = json.loads(saved.read_text(encoding="utf-8"))
    assert before == terminal.messages
    assert re.fullmatch("(xyz~){2}[xyz~]+", answer["content"])  # what was said is kept
    terminal.messages.append(answer)

    assert "thinking on" in terminal.type("/think")
    assert terminal.ask("the mat") > 0
    assert "system turn set" in terminal.type("/system Be brief.")
    terminal.system = [{"role": "system", "content": "Be brief."}]
    assert terminal.ask("the dog") <= 1  # nothing but the first <|im_start|> is as it was
    terminal.messages.pop()
    assert terminal.ask("", command="/retry") == len(terminal.tokenizer.encode(terminal.tokenizer.render(
        terminal.system + terminal.messages[:-1]))) - 1  # fmt: skip
    assert f"11 messages saved to {saved}" in terminal.type(f"/save {saved}")  # its own file may be written again
    assert json.loads(saved.read_text(encoding="utf-8")) == terminal.system + terminal.messages
    terminal.process.sendline("/quit")
    terminal.leave()


def test_commands_in_a_terminal(script, tmp_path):
    saved = tmp_path / "saved.json"
    saved.write_text('[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]')
    terminal = Terminal(script, "--system", "Be long.")
    assert "nothing has been asked" in terminal.type("/retry")
    assert "2 messages loaded" in (said := terminal.type(f"/load {saved}"))
    assert "/retry answers it" in said
    terminal.system, terminal.messages = json.loads(saved.read_text())[:1], json.loads(saved.read_text())[1:]
    terminal.ask("", command="/retry")
    terminal.messages.append({"role": "user", "content": "/nothing"})
    said = terminal.type("//nothing")  # a second / sends a line that begins with one
    terminal.expect_counts(said)
    for line, answer in (
        (f"/save {script / 'config.json'}", "exists; save under another name"),
        (f"/save {tmp_path / 'no' / 'where.json'}", "error: "),
        (f"/load {script / 'tokenizer.json'}", "list of messages"),
        (f"/load {tmp_path / 'nowhere.json'}", "cannot be read"),
        ("/load", "say which file"),
        ("/think", "thinking on"),
        ("/foo bar", "there is no command /foo"),
        ("/help", "/retry"),
        ("/system", "the template's own"),
        ("/reset", "forgotten"),
        ("/retry", "nothing has been asked"),
        (f"/save {tmp_path / 'empty.json'}", "nothing has been said"),
    ):
        said = terminal.type(line)
        assert answer in said, (line, said)
        assert "Traceback" not in said
    assert not list(tmp_path.glob("*.part"))
    terminal.process.send("half a line")
    terminal.process.sendintr()
    assert "Ctrl-D leaves" in terminal.until_prompt()
    terminal.process.send("\x1b[200~two\nlines\x1b[201~\n")  # as a terminal sends what was pasted
    said = terminal.until_prompt()
    terminal.system, terminal.fed, terminal.messages = [], [], [{"role": "user", "content": "two\nlines"}]
    assert f"[{len(terminal.tokenizer.encode(terminal.tokenizer.render(terminal.messages)))} prompt tokens" in said
    terminal.process.sendeof()
    terminal.leave()


def test_a_question_without_an_answer_is_taken_back(script, capsys):
    """Broken off, or failed, before the first token: the question would only be in the way."""
    model, tokenizer = qwen_scratch.load(script, device="cpu")
    conversation = qwen_scratch.Conversation(model, tokenizer)
    chat = Chat(conversation, quiet=False, hide_thinking=False)
    chat.somebody_is_there = True
    chat.take("hi")
    before = conversation.messages
    for error in (KeyboardInterrupt, RuntimeError):

        def fail(*_, error=error):
            raise error("broken off")

        hook = model.lm_head.register_forward_pre_hook(fail)
        with contextlib.suppress(RuntimeError):
            chat.take("ho")
        with contextlib.suppress(RuntimeError):
            chat.take("/retry")
        hook.remove()
        assert conversation.messages == before
        assert capsys.readouterr().err.count("taken back") == (2 if error is KeyboardInterrupt else 0)
    chat.take("ho")
    assert len(conversation.messages) == 4


def test_answers_into_a_file(script, tmp_path):
    """Somebody types, but stdout is a file: it gets the answers alone."""
    out = tmp_path / "out.txt"
    command = f'"{sys.executable}" -m qwen_scratch.chat --model "{script}" > "{out}"'
    process = pexpect.spawn("bash", ["-c", command], encoding="utf-8", timeout=60)
    for line in ("hi", "/quit"):
        process.expect("> ")
        process.sendline(line)
    process.expect(pexpect.EOF)
    assert out.read_text(encoding="utf-8") == "a😀b\n"


def test_interrupt_where_nobody_watches(script, tmp_path):
    """Ctrl-C ends a run from a pipe, and what was said so far is kept."""
    process = subprocess.Popen(
        [*COMMAND, "--model", script, "--no-thinking", "--max-new-tokens", "90000"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )  # fmt: skip
    process.stdin.write(b"hi\nho\n")
    process.stdin.flush()
    first = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (first + rest).decode().startswith("xyz~xyz~")
    assert (first + rest).count(b"\n") == 1
    assert b"Traceback" not in errors


def run(folder, text, *options):
    command = [*COMMAND, "--model", folder, *map(str, options)]
    done = subprocess.run(command, input=text, capture_output=True, check=False, timeout=120)
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_lines_from_a_pipe(script, tmp_path):
    code, out, errors = run(script, b"hi\n\n  \nthe cat\n")
    assert (code, out) == (0, "a😀b\na😀b\n")
    assert errors.count("c\n") == 2
    assert "reused" in errors.splitlines()[-1]
    assert run(script, b"hi\n", "--quiet") == (0, "a😀b\n", "")
    assert "\nc\n" not in run(script, b"hi\n", "--hide-thinking")[2]
    assert run(script, b"hi\n/quit now\nhi\n", "--quiet")[:2] == (0, "a😀b\n")
    assert run(script, b"\xef\xbb\xbf/think\n")[1:2] == ("",)  # a byte-order mark is nobody's text
    assert run(script, b"", "--quiet") == (0, "", "")


def test_errors_end_a_run_that_nobody_watches(script, tmp_path):
    for text, words in (
        (b"/foo\nhi\n", "/foo"),
        (b"a \xff b\n", "Unicode"),
        (b"/load nowhere\n", "nowhere"),
        (b"/save a\0b\n", "file"),
    ):
        code, out, errors = run(script, text, "--quiet")
        assert (code, out) == (2, "")
        assert len(errors.splitlines()) == 1
        assert words in errors
    assert run(script, b"hi\n", "--max-context", 0)[0] == 2
    assert run(script, b"hi\n", "--temperature", -1)[0] == 2
    save_tokenizer(save_tiny(tmp_path / "m", "qwen2", vocab_size=320), template=None)
    code, _, errors = run(tmp_path / "m", b"hi\n")
    assert code == 2
    assert "no chat template" in errors


def test_outgrown_context_is_said(script):
    code, out, errors = run(script, b"hi\n" * 12, "--max-context", 100, "--max-new-tokens", 12)
    assert (code, out) == (0, "a😀b\n" * 12)
    assert "outgrown the context of 100 tokens" in errors


def test_closed_input(script):
    done = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -m qwen_scratch.chat --model "{script}" <&-'],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "standard input is closed" in done.stderr
