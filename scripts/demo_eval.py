"""How often the demo checkpoint is right, on what its training never held."""

import random
from typing import Any

from demo_data import answer_to
from demo_sums import HELD_BACK, ask
from demo_talk import REPLIES
from tqdm import tqdm

from qwen_scratch import SamplingParams, complete_batch
from qwen_scratch.model import Qwen
from qwen_scratch.text import Tokenizer

# Written by hand, not from the frames of the training data.
STRANGE = {
    "en": (
        "Who wrote Hamlet?", "Can dogs eat chocolate?", "What's the tallest building in Dubai?",
        "Sort this list in Rust please", "My back hurts, what should I take?", "How do airplanes stay up?",
        "Say 'good night' in Italian", "Give me a pasta recipe.", "Is it going to snow tomorrow?",
        "SELECT * FROM users;", "Explain quantum entanglement to a child.", "Why do cats purr?",
        "What is the speed of light?", "Which team won the World Cup?", "Compose a limerick.",
        "Do you have feelings?", "Which laptop should I get?", "Proofread my letter.",
        "When did the dinosaurs die out?", "What's your favourite colour?",
    ),
    "zh": (
        "李白是哪个朝代的诗人？", "世界上最高的山叫什么？", "用Java写一个排序算法", "我头疼怎么办？",
        "飞机为什么能飞？", "明天会下雪吗？", "怎么做红烧肉？", "把“晚安”翻译成日语", "猫为什么会打呼噜？",
        "光速是多少？", "谁赢了世界杯？", "帮我改改这封信", "恐龙什么时候灭绝的？", "你最喜欢什么颜色？",
        "该买哪台笔记本？", "给我推荐一部动画片", "股票会涨吗？", "长城有多长？", "什么牌子的手机好？", "孔子是谁？",
    ),
}  # fmt: skip


def evaluate(model: Qwen, tokenizer: Tokenizer, problems: int = 1000, batch: int = 250) -> dict[str, Any]:
    """Right answers, greedy, the whole answer compared.

    Returns:
        `{"add": {"thinking": {"en": [right, asked], "zh": ...}, "direct": ...}, ..., "strange": {"en": [refused, asked]}}`.
    """
    report: dict[str, Any] = {}
    for kind, held in HELD_BACK.items():
        rng = random.Random(f"questions about {kind}")
        asked = [
            (problem, language := ("en", "zh")[n % 2], ask(rng, problem, language)) for n, problem in enumerate(held)
        ]
        report[kind] = {}
        for mode in ("thinking", "direct"):
            counts = {"en": [0, 0], "zh": [0, 0]}
            answers = ask_all(
                model, tokenizer, [q for *_, q in asked[:problems]], mode == "thinking", batch, f"{kind} {mode}"
            )
            for (problem, language, _), answer in zip(asked, answers, strict=False):
                counts[language][0] += answer == answer_to(problem)
                counts[language][1] += 1
            report[kind][mode] = counts
    report["strange"] = {}
    for language, questions in STRANGE.items():
        answers = ask_all(model, tokenizer, list(questions), True, batch, "strange questions")
        report["strange"][language] = [sum(a == REPLIES["other"][language][1] for a in answers), len(questions)]
    return report


def ask_all(
    model: Qwen, tokenizer: Tokenizer, questions: list[str], thinking: bool, batch: int, title: str
) -> list[str]:
    params = SamplingParams(temperature=0, max_new_tokens=256)
    answers = []
    for start in tqdm(range(0, len(questions), batch), desc=title, leave=False, disable=None):
        results = complete_batch(model, tokenizer, questions[start : start + batch], params, thinking=thinking)
        answers += [result.text for result in results]
    return answers


NAMES = {
    "add": "addition, up to three digits",
    "sub": "subtraction, up to three digits",
    "mul": "multiplication, two digits",
}


def table(report: dict[str, Any]) -> str:
    """As Markdown."""
    lines = [
        "| held back | with thinking | English | Chinese | without | English | Chinese |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, name in NAMES.items():
        cells = []
        for mode in ("thinking", "direct"):
            english, chinese = report[kind][mode]["en"], report[kind][mode]["zh"]
            cells += [
                percent([e + c for e, c in zip(english, chinese, strict=True)]),
                percent(english),
                percent(chinese),
            ]
        lines.append(
            f"| {sum(report[kind]['thinking'][c][1] for c in ('en', 'zh')):,} × {name} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def percent(count: list[int]) -> str:
    return f"{count[0] / max(count[1], 1):.1%}"
