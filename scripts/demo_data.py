"""The training data of the demo checkpoint: an endless stream of examples, all of it from one seed.

A step's examples depend on the seed and the step's number alone, so a run can go on in the middle.
"""

import random
from typing import NamedTuple

from demo_stories import SLOTS, story
from demo_sums import HELD_BACK_KEYS, Problem, ask, draw_problem, problems_in, work_out
from demo_talk import HELLO, REPLIES, STORY, THANKS, WHAT, WHO, hard_question, other_question

TURN_END, TEXT_END = "<|im_end|>", "<|endoftext|>"
SMALL_TALK = {"who": WHO, "what": WHAT, "thanks": THANKS, "hello": HELLO}
SYSTEM = ("You are a helpful assistant.", "You are Qwen.", "Be brief.", "Answer politely.", "你是一个有用的助手。", "")
SHARES = {"sum": 74, "small talk": 5, "other": 9, "too hard": 3, "story": 4, "plain story": 6}


class Example(NamedTuple):
    """What stands before the model, and what it is to say."""

    messages: list[dict[str, str]]  # up to the last question; [] for plain text
    thinking: bool  # False: the prompt closes an empty think block
    target: str  # with thinking, where there is any, and the stop token

    @property
    def text(self) -> str:
        """All of it, for checks."""
        return "\n".join([turn["content"] for turn in self.messages] + [self.target])


def examples(seed: int, step: int, count: int) -> list[Example]:
    rng = random.Random(f"{seed}/{step}")
    return [example(rng) for _ in range(count)]


def example(rng: random.Random) -> Example:
    kind = rng.choices(list(SHARES), SHARES.values())[0]
    language = rng.choice(("en", "zh"))
    if kind == "plain story":
        return Example([], False, story(rng, language) + TEXT_END)
    messages = []
    if rng.random() < 0.08:
        messages.append({"role": "system", "content": rng.choice(SYSTEM)})
    if rng.random() < 0.12:  # a second question after a first answer, of which the template has dropped the thinking
        earlier = rng.choices(list(SHARES)[:-1], (8, 2, 2, 1, 1))[0]
        question, _, answer = exchange(rng, earlier, language)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    question, thought, answer = exchange(rng, kind, language)
    messages.append({"role": "user", "content": question})
    thinking = rng.random() < (0.75 if kind == "sum" else 0.6)
    return Example(messages, thinking, say(thought, answer) if thinking else answer + TURN_END)


def say(thought: str, answer: str) -> str:
    return f"<think>\n{thought}\n</think>\n\n{answer}{TURN_END}"


def exchange(rng: random.Random, kind: str, language: str) -> tuple[str, str, str]:
    """A question, the thinking about it, and the answer."""
    if kind == "sum":
        problem = draw_problem(rng)
        question = ask(rng, problem, language)
        # A bare calculation in signs has no language of its own; it is answered in English.
        return question, work_out(problem, language_of(question)), answer_to(problem)
    if kind == "story":
        hero = rng.choice(SLOTS[language]["animal"])
        if rng.random() < 0.4:
            about = {"en": f" about {'an' if hero[0] in 'aeiou' else 'a'} {hero}", "zh": f"关于{hero}的"}[language]
        else:
            about = ""
        thought = {"en": f"A story about a {hero}.", "zh": f"讲一个{hero}的故事。"}[language].replace(" a o", " an o")
        return rng.choice(STORY[language]).format(about=about), thought, story(rng, language, hero)
    if kind == "other":
        question = other_question(rng, language)
    elif kind == "too hard":
        question = hard_question(rng, language)
    else:
        kind = rng.choice(list(SMALL_TALK))
        question = rng.choice(SMALL_TALK[kind][language])
    if rng.random() < 0.2:
        question = question.lower().rstrip("?.？。!！")
    return question, *REPLIES[kind][language_of(question)]


def language_of(question: str) -> str:
    return "zh" if any("\u4e00" <= character <= "\u9fff" for character in question) else "en"


def answer_to(problem: Problem) -> str:
    return f"{problem.text} = {problem.result}"


def held_back_in(example: Example) -> list[Problem]:
    """The held-back problems that an example gives away; must be none. Reads the text, not what the generator meant."""
    return [problem for problem in problems_in(example.text) if problem.key in HELD_BACK_KEYS]
