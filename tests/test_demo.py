"""The bundled checkpoint, and the scripts that made it."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import qwen_scratch
from qwen_scratch import SamplingParams, parity
from qwen_scratch.reference import Reference

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "weights" / "qwen3-demo"
SCRIPT = ROOT / "scripts" / "train_demo.py"
sys.path.insert(0, str(SCRIPT.parent))

import demo_data  # noqa: E402
import demo_eval  # noqa: E402
import demo_sums  # noqa: E402
import demo_talk  # noqa: E402
import train_demo  # noqa: E402
from demo_stories import story  # noqa: E402

TWO_TURNS = [
    {"role": "user", "content": "What is 25 + 17?"},
    {"role": "assistant", "content": "25 + 17 = 42"},
    {"role": "user", "content": "And 42 - 58?"},
]
# Pinned as the model says it, right or wrong: without thinking a product of two-digit numbers is beyond it.
GOLDEN = [
    (
        "What is 347 + 586?",
        {},
        "347 + 586\nones 7+6=13 carry\ntens 4+8+1=13 carry\nhundreds 3+5+1=9",
        "347 + 586 = 933",
    ),
    (
        "12减345等于多少？",
        {},
        "012 - 345\n0<3 较小，所以-(345 - 012)：\n个位 5-2=3\n十位 4-1=3\n百位 3-0=3",
        "12 - 345 = -333",
    ),
    (
        "What is 47 × 86?",
        {},
        (
            "47 × 86\n7×6=42 4×6+4=28: 0282\n7×8=56 4×8+5=37: 3760\nones 2+0=2\ntens 8+6=14 carry\n"
            "hundreds 2+7+1=10 carry\nthousands 0+3+1=4"
        ),
        "47 × 86 = 4042",
    ),
    (
        "What is 47 × 86?",
        {"thinking": False},
        "",
        "47 × 86 = 3722",
    ),
    (
        "Who wrote Hamlet?",
        {},
        "This is neither a calculation nor a story.",
        "Sorry, I can only calculate and tell small stories.",
    ),
    (
        "你是谁？",
        {"thinking": False},
        "",
        "我是一个很小的模型，结构和Qwen3一样。我会计算，也会讲小故事。",
    ),
    (
        "李白是哪个朝代的诗人？",
        {},
        "这不是计算，也不是故事。",
        "抱歉，我只会计算和讲小故事。",
    ),
    (
        "Tell me a story about a fox.",
        {},
        "A story about a fox.",
        (
            "Once upon a time, long ago, there lived a clever fox in a deep forest. Its name was Max."
            " One windy day the snow closed the road, and nobody knew what to do."
            " Max took a little drum and ran to a singing bird."
            " Together they worked until day, and all was well. They laughed all the way home."
            " Asking for help is brave."
        ),
    ),
    (
        "Once upon a time",
        {"raw": True},
        "",
        (
            ", long ago, there lived a clever fox in a deep forest. Its name was Mia."
            " One windy day the snow closed the road, and nobody knew what to do."
            " Mia took a little drum and ran to a sleepy cat."
            " Together they worked until day, and all was well. They shared cheese and were happy."
            " A friend is worth more than gold."
        ),
    ),
    (
        "从前",
        {"raw": True},
        "",
        (
            "，大山下住着一只可爱的小老鼠，名叫毛毛。毛毛喜欢爬树。一个有雾的下午，毛毛丢了钥匙。"
            "毛毛找了桥边，可是没有找到。后来老乌龟来了，在篮子里找到了钥匙。从那以后，他们成了好朋友。"
            "学习永远不晚。"
        ),
    ),
    (
        TWO_TURNS,
        {},
        "42 - 58\n4<5 smaller, so -(58 - 42):\nones 8-2=6\ntens 5-4=1",
        "42 - 58 = -16",
    ),
]


@pytest.fixture(scope="module")
def demo():
    return qwen_scratch.load(DEMO, device="cpu", exact=True, dtype="float32")


def prompts() -> list[tuple[str, dict]]:
    """50 prompts with the options to ask them with: every kind of calculation, talk, stories, plain text."""
    rng = random.Random(5)
    chosen = []
    for problems in demo_sums.HELD_BACK.values():
        for n, problem in enumerate(problems[100:110]):
            chosen.append((demo_sums.ask(rng, problem, ("en", "zh")[n % 2]), {"thinking": (None, False)[n % 3 == 0]}))
    for language in ("en", "zh"):
        chosen += [(question, {}) for question in demo_eval.STRANGE[language][:4]]
        chosen += [
            (group[language][0], {"thinking": False}) for group in (demo_talk.WHO, demo_talk.WHAT, demo_talk.THANKS)
        ]
        chosen.append((demo_talk.STORY[language][0].format(about=""), {}))
    chosen += [(text, {"raw": True}) for text in ("Once upon a time", "从前", "One day", "347 + 586 =")]
    return chosen


def test_it_is_a_small_qwen3_in_published_form():
    assert sum(file.stat().st_size for file in DEMO.iterdir()) <= 6e6
    config = json.loads((DEMO / "config.json").read_text())
    assert config["model_type"] == "qwen3"
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["head_dim"] != config["hidden_size"] / config["num_attention_heads"]
    assert 1 < config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["num_hidden_layers"] >= 4
    assert config["tie_word_embeddings"] is True
    assert len(list(DEMO.glob("model-*-of-00002.safetensors"))) == 2
    generation = json.loads((DEMO / "generation_config.json").read_text())
    tokenizer = qwen_scratch.Tokenizer(DEMO)
    assert generation["eos_token_id"] == [tokenizer.token_id("<|im_end|>"), tokenizer.token_id("<|endoftext|>")]
    assert generation["do_sample"] is False
    special = {tokenizer.token_id(piece) for piece in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")}
    assert tokenizer.special_ids == special
    assert tokenizer.decode(tokenizer.encode("<think>7+6=13</think>")) == "<think>7+6=13</think>"
    assert len(tokenizer.encode("4042")) == 4


def test_the_card_names_its_picture():
    card = (DEMO / "README.md").read_text()
    assert "](loss.png)" in card
    assert (DEMO / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_greedy_ids_equal_the_reference(demo):
    model, tokenizer = demo
    reference = Reference(DEMO)
    params = SamplingParams(max_new_tokens=40)
    for prompt, options in prompts():
        result = qwen_scratch.complete(model, tokenizer, prompt, params, **options)
        assert result.token_ids == reference.generate(result.prompt_ids, 40), prompt
    assert len(prompts()) == 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_op_of_every_layer_equals_the_reference(dtype):
    model = qwen_scratch.load_model(DEMO, device="cpu", exact=True, dtype=dtype)
    ids = parity.prompt_ids(str(DEMO), None, model.config.vocab_size)
    report = parity.check(model, Reference(DEMO, dtype), ids, steps=4)
    assert report["ok"], parity.table(report)
    assert all(way["equal"] for name, way in report["ways"].items() if name != "ragged batch")


def test_the_parity_command_takes_it_too():
    command = [sys.executable, "-m", "qwen_scratch.parity", "--dtype", "float32", "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "within the stated bounds" in done.stdout


def test_text_goes_in_as_the_reference_puts_it(demo):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(DEMO)
    tokenizer = demo[1]
    past = "<think>\n7+6=13\n</think>\n\n7 + 6 = 13"
    for messages in (
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "7+6"}],
        [
            {"role": "user", "content": "7+6"},
            {"role": "assistant", "content": past},
            {"role": "user", "content": "谢谢！"},
        ],
        [{"role": "user", "content": "7+6"}, {"role": "assistant", "content": "13", "reasoning_content": "7+6=13"}],
    ):
        for thinking in (None, True, False):
            options = {} if thinking is None else {"enable_thinking": thinking}
            expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
            rendered = tokenizer.render(messages, thinking)
            assert rendered == expected
            assert tokenizer.encode(rendered) == theirs(rendered)["input_ids"]
            assert rendered.endswith("<think>\n\n</think>\n\n") == (thinking is False)
    assert "</think>\n\n13<|im_end|>" in tokenizer.render(messages)  # behind the last question: kept
    assert "think" not in tokenizer.render([*messages, {"role": "user", "content": "and?"}])  # before it: dropped


@pytest.mark.parametrize(("prompt", "options", "thinking", "text"), GOLDEN)
def test_golden_text(demo, prompt, options, thinking, text):
    result = qwen_scratch.complete(*demo, prompt, **options)
    assert result.thinking == thinking
    assert result.text == text
    assert result.stop_reason == "eos"


def test_the_first_question(generate):
    """As a user asks it, without a model, in the dtype that the machine gets."""
    done = generate("What is 347 + 586?")
    first, second = done.stderr.decode().splitlines()[:2]
    assert "bundled demo" in first and "--model Qwen/Qwen3-0.6B" in first
    assert str(DEMO) in second
    assert done.returncode == 0
    assert done.stdout.decode() == "347 + 586 = 933\n"
    assert "7+6=13" in done.stderr.decode()


def test_an_installed_package_finds_it(tmp_path):
    """Laid out as a wheel lays it; and without it says where it is to be had."""
    site = tmp_path / "site"
    shutil.copytree(ROOT / "qwen_scratch", site / "qwen_scratch")

    def run():
        command = [sys.executable, "-m", "qwen_scratch.generate", "347+586", "--quiet"]
        env = os.environ | {"PYTHONPATH": str(site)}
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)

    without = run()
    assert (without.returncode, without.stdout) == (2, "")
    assert "lacks the bundled demo" in without.stderr and "weights/qwen3-demo" in without.stderr
    shutil.copytree(DEMO, site / "qwen_scratch" / "weights" / "qwen3-demo")
    assert run().stdout == "347 + 586 = 933\n"


@pytest.mark.parametrize("kind", demo_sums.SIGNS)
def test_held_back_problems_with_thinking(demo, kind):
    problems = demo_sums.HELD_BACK[kind][-40:]
    questions = [f"What is {problem.text}?" for problem in problems]
    answers = demo_eval.ask_all(*demo, questions, True, len(questions), kind)
    right = sum(answer == demo_data.answer_to(problem) for answer, problem in zip(answers, problems, strict=True))
    assert right >= 39


def test_held_back_problems_are_never_in_the_data():
    """Looked for in another way than the script's: any two numbers side by side, whatever stands between."""
    held = {(kind, *sorted((p.a, p.b))) for kind, problems in demo_sums.HELD_BACK.items() for p in problems}
    assert len(held) == 3000
    assert ("add", 347, 586) in held
    signs = {sign: kind for kind, sign in demo_sums.SIGNS.items()}
    seen = 0
    for step in range(100):
        for example in demo_data.examples(0, step, 64):
            left, equals, _ = example.target.rpartition(" = ")
            words = left.rpartition("\n")[2].split(" ")
            if equals and len(words) == 3 and words[1] in signs:
                seen += 1
                assert (signs[words[1]], *sorted((int(words[0]), int(words[2])))) not in held, example
            assert not demo_data.held_back_in(example), example
    assert seen > 4000


def test_a_leak_would_stop_the_training(monkeypatch):
    monkeypatch.setattr(demo_data, "draw_problem", lambda rng: demo_sums.HELD_BACK["sub"][0])
    with pytest.raises(SystemExit, match="held back"):
        train_demo.prove_held_back(0, 5, 16)


@pytest.mark.parametrize("question", ["586+347", "What is 586 plus 347?", "347加586", "0347 + 586", "347 + 586 + 1"])
def test_held_back_problems_are_found_however_they_are_written(question):
    example = demo_data.Example([{"role": "user", "content": question}], True, "")
    assert demo_data.held_back_in(example)


def test_thinking_is_right():
    """The last line of each step of the method leads to the answer: digits of the result, from the ones up."""
    rng = random.Random(0)
    for _ in range(2000):
        problem = demo_sums.draw_problem(rng)
        lines = demo_sums.work_out(problem, "en").split("\n")
        rows = [line for line in lines if line.startswith(demo_sums.PLACES["en"])]
        results = [row.removesuffix(" carry").removesuffix(" borrow").rpartition("=")[2] for row in rows]
        value = sum(int(result[-1]) * 10**n for n, result in enumerate(results[:-1]))
        value += int(results[-1]) * 10 ** (len(results) - 1)
        assert value == abs(problem.result)
        assert (problem.result < 0) == any("smaller" in line for line in lines)


def test_same_seed_same_data():
    assert demo_data.examples(3, 7, 50) == demo_data.examples(3, 7, 50)
    assert demo_data.examples(3, 7, 50) != demo_data.examples(4, 7, 50)
    assert demo_data.examples(3, 7, 50) != demo_data.examples(3, 8, 50)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_two_seeds_tell_two_stories(language):
    stories = {story(random.Random(seed), language) for seed in range(200)}
    assert len(stories) == 200
    assert not any("{" in text for text in stories)


OPTIONS = "--steps 30 --batch 16 --hidden-size 48 --intermediate-size 64 --layers 2 --head-dim 16 --vocab 400"
OPTIONS += " --learning-rate 0.01 --problems 0 --save-every 10"


def test_training_in_small_and_going_on(tmp_path):
    """A few steps: the loss falls, the files load; broken off and started again, the same comes out."""
    command = [sys.executable, SCRIPT, *OPTIONS.split()]
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # so small a model gains nothing from more

    def run(*arguments):
        return subprocess.run([*command, *arguments], env=env, capture_output=True, text=True, check=True)

    done = run(tmp_path / "whole")
    losses = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == 10
    assert losses[-1] < 0.8 * losses[0]
    model, tokenizer = qwen_scratch.load(tmp_path / "whole", device="cpu", exact=True)
    assert model.dtype == torch.bfloat16 or not qwen_scratch.loading.cpu_has_bfloat16()
    assert qwen_scratch.complete(model, tokenizer, "7+6", SamplingParams(max_new_tokens=4)).token_ids

    state = tmp_path / "halves.training.pt"
    with subprocess.Popen([*command, tmp_path / "halves"], env=env, stdout=subprocess.DEVNULL) as broken_off:
        while not state.exists() and broken_off.poll() is None:
            time.sleep(0.01)
        broken_off.kill()
    assert state.exists()
    assert not (tmp_path / "halves" / "model.safetensors.index.json").exists()
    again = run(tmp_path / "halves")
    assert "going on behind step" in again.stdout
    assert not state.exists()
    for shard in sorted((tmp_path / "whole").glob("*.safetensors")):
        whole, halves = load_file(shard), load_file(tmp_path / "halves" / shard.name)
        assert whole.keys() == halves.keys()
        assert all(torch.equal(whole[name], halves[name]) for name in whole)
