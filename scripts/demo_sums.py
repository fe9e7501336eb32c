"""Calculations for the demo checkpoint: the numbers, the held-back list, how they are asked, and how they are worked out."""

import random
import re
from collections.abc import Iterator
from typing import NamedTuple

SIGNS = {"add": "+", "sub": "-", "mul": "×"}
HELD_BACK_SEED = "held back"  # its own, so that no setting of the training can move the list


class Problem(NamedTuple):
    kind: str  # "add" | "sub" | "mul"
    a: int
    b: int

    @property
    def text(self) -> str:
        return f"{self.a} {SIGNS[self.kind]} {self.b}"

    @property
    def result(self) -> int:
        return {"add": self.a + self.b, "sub": self.a - self.b, "mul": self.a * self.b}[self.kind]

    @property
    def key(self) -> tuple[str, int, int]:
        """The same for both orders of the operands."""
        return self.kind, min(self.a, self.b), max(self.a, self.b)


def held_back(count: int = 1000) -> dict[str, list[Problem]]:
    """The problems that training never sees, in either order of operands: `count` of each kind."""
    rng = random.Random(HELD_BACK_SEED)
    lists = {}
    for kind in SIGNS:
        low, high = (10, 99) if kind == "mul" else (0, 999)
        first = [Problem("add", 347, 586)] if kind == "add" else []  # the first thing that people will ask
        found = {problem.key: problem for problem in first}
        while len(found) < count:
            problem = Problem(kind, rng.randint(low, high), rng.randint(low, high))
            if max(problem.a, problem.b) >= 20:  # smaller ones occur as steps of others
                found.setdefault(problem.key, problem)
        lists[kind] = list(found.values())
    return lists


HELD_BACK = held_back()
HELD_BACK_KEYS = frozenset(problem.key for problems in HELD_BACK.values() for problem in problems)

OPERATORS = {"+": "add", "plus": "add", "加": "add", "加上": "add"}
OPERATORS |= {"-": "sub", "−": "sub", "minus": "sub", "减": "sub", "减去": "sub"}
OPERATORS |= dict.fromkeys(("×", "*", "x", "X", "times", "乘", "乘以"), "mul")
SIGN_OR_WORD = "|".join(map(re.escape, sorted(OPERATORS, key=len, reverse=True)))
# The second number may be the first one of the next calculation; parts of decimal numbers are none.
CALCULATION = re.compile(rf"(?<![\d.])(\d+) ?({SIGN_OR_WORD}) ?(?=(\d+)(?!\.?\d))")


def problems_in(text: str) -> Iterator[Problem]:
    """Every calculation that a text writes out, in the question, the thinking or the answer, zeros in front or not."""
    for a, operator, b in CALCULATION.findall(text):
        yield Problem(OPERATORS[operator], int(a), int(b))


def draw_problem(rng: random.Random) -> Problem:
    """A problem of any kind that is not held back; hard and long ones more often."""
    while True:
        kind = rng.choices(list(SIGNS), (4, 5, 6))[0]
        if kind == "mul":
            a, b = (rng.randint(10, 99) if rng.random() < 0.9 else rng.randint(0, 9) for _ in "ab")
        else:
            a, b = (rng.randint(0, 10 ** rng.choices((1, 2, 3), (1, 2, 7))[0] - 1) for _ in "ab")
        if kind == "sub" and rng.random() < 0.3:  # numbers that differ late are hard to compare
            b = min(999, max(0, a + rng.choice((-100, -10, -1, 0, 1, 10, 100)) * rng.randint(0, 9)))
        problem = Problem(kind, a, b)
        if problem.key not in HELD_BACK_KEYS:
            return problem


# How it is asked: {e} is the calculation with its sign or word, {a} and {b} the numbers.
WORDS = {
    "en": {"add": ("plus",), "sub": ("minus",), "mul": ("times", "multiplied by")},
    "zh": {"add": ("加", "加上"), "sub": ("减", "减去"), "mul": ("乘", "乘以")},
}
KEYS = {"add": ("+",), "sub": ("-", "-", "−"), "mul": ("×", "×", "*", "x")}
FRAMES = {
    "en": (
        "What is {e}?", "What is {e}?", "What is {e}?", "What's {e}?", "How much is {e}?", "Compute {e}.",
        "Calculate {e}", "Can you tell me what {e} is?", "Please work out {e}.", "Solve {e}", "{e} equals?",
        "What does {e} equal?", "What is the result of {e}?", "I need to know {e}.", "Tell me {e}",
        "Please calculate {e} for me.", "And {e}?", "What do you get for {e}?", "Evaluate {e}.",
        "Could you compute {e}, please?", "Hi! What is {e}?", "Find {e}.",
    ),
    "zh": (
        "{e}等于多少？", "{e}等于多少？", "{e}等于几？", "{e}是多少？", "计算{e}", "请计算{e}。", "请问{e}等于多少？",
        "算一下{e}", "帮我算{e}", "{e}得多少？", "{e}的结果是什么？", "你知道{e}是多少吗？", "请告诉我{e}。", "求{e}",
        "那么{e}呢？", "你好，{e}等于多少？",
    ),
    "bare": ("{e}", "{e}", "{e} =", "{e}=", "{e} = ?", "{e}=?", "{e}?"),
}  # fmt: skip
PHRASES = {
    ("en", "add"): ("What is the sum of {a} and {b}?", "Add {a} and {b}.", "Add {b} to {a}."),
    ("en", "sub"): ("Subtract {b} from {a}.", "What is the difference {a} minus {b}?", "Take {b} away from {a}."),
    ("en", "mul"): ("What is the product of {a} and {b}?", "Multiply {a} by {b}.", "Multiply {a} and {b}"),
    ("zh", "add"): ("{a}与{b}的和是多少？", "{a}和{b}相加等于多少？"),
    ("zh", "sub"): ("{a}与{b}的差是多少？", "从{a}里减去{b}等于多少？"),
    ("zh", "mul"): ("{a}与{b}的积是多少？", "{a}和{b}相乘等于多少？"),
}


def ask(rng: random.Random, problem: Problem, language: str) -> str:
    """One way to put the question."""
    kind, a, b = problem
    if rng.random() < 0.16:
        return loosen(rng, rng.choice(PHRASES[language, kind]).format(a=a, b=b))
    bare = rng.random() < 0.2
    # A bare calculation in signs has no language of its own; it is answered in English.
    if rng.random() < 0.7 and not (bare and language == "zh"):
        gap = rng.choice((" ", " ", ""))
        e = f"{a}{gap}{rng.choice(KEYS[kind])}{gap}{b}"
    else:
        gap = " " if language == "en" else rng.choice(("", "", " "))
        e = f"{a}{gap}{rng.choice(WORDS[language][kind])}{gap}{b}"
    return loosen(rng, rng.choice(FRAMES["bare" if bare else language]).format(e=e))


def loosen(rng: random.Random, text: str) -> str:
    """As people type: small letters, no mark at the end, another mark."""
    chance = rng.random()
    if chance < 0.12:
        text = text.lower()
    if chance < 0.2:
        text = text.rstrip(".?。？")
    elif chance < 0.24:
        text = text.replace("？", "?").replace("。", ".")
    return text


# How it is worked out. Every digit of every step depends on few digits before it, and numbers are padded with zeros so
# that a step always looks the same: that is what lets a small model learn the method instead of the results.
PLACES = {"en": ("ones", "tens", "hundreds", "thousands"), "zh": ("个位", "十位", "百位", "千位")}
CARRY, BORROW = {"en": " carry", "zh": "进位"}, {"en": " borrow", "zh": "借位"}
SWAP = {"en": "smaller, so -({}):", "zh": "较小，所以-({})："}


def work_out(problem: Problem, language: str) -> str:
    """The thinking part: written arithmetic, digit by digit."""
    kind, a, b = problem
    if kind == "mul":
        return "\n".join(multiply(a, b, language))
    width = max(len(str(a)), len(str(b)))
    lines = [f"{a:0{width}} {SIGNS[kind]} {b:0{width}}"]
    if kind == "add":
        return "\n".join(lines + add(a, b, width, language))
    lines.append(compare(a, b, width))
    if a < b:
        a, b = b, a
        lines[-1] += " " + SWAP[language].format(f"{a:0{width}} - {b:0{width}}")
    return "\n".join(lines + subtract(a, b, width, language))


def digits(number: int, width: int) -> list[int]:
    """From the ones up."""
    return [number // 10**place % 10 for place in range(width)]


def add(a: int, b: int, width: int, language: str) -> list[str]:
    """One line per place: `tens 4+8+1=13 carry`, where the 1 was carried from the ones."""
    lines, carry = [], 0
    for place, (x, y) in enumerate(zip(digits(a, width), digits(b, width), strict=True)):
        total = x + y + carry
        lines.append(f"{PLACES[language][place]} {x}+{y}{'+1' * carry}={total}")
        carry = total // 10
        lines[-1] += CARRY[language] * carry
    return lines


def compare(a: int, b: int, width: int) -> str:
    """Digits from the front until two differ: `3=3 4<8`."""
    steps = []
    for x, y in zip(reversed(digits(a, width)), reversed(digits(b, width)), strict=True):
        steps.append(f"{x}{'<' if x < y else '>' if x > y else '='}{y}")
        if x != y:
            break
    return " ".join(steps)


def subtract(a: int, b: int, width: int, language: str) -> list[str]:
    """a ≥ b. A digit that is too small borrows a ten from the next place, which then gives 1 back."""
    lines, borrow = [], 0
    for place, (x, y) in enumerate(zip(digits(a, width), digits(b, width), strict=True)):
        ten = 10 * (x < y + borrow)
        lines.append(f"{PLACES[language][place]} {x + ten}-{y}{'-1' * borrow}={x + ten - y - borrow}")
        borrow = ten // 10
        lines[-1] += BORROW[language] * borrow
    return lines


def multiply(a: int, b: int, language: str) -> list[str]:
    """Two partial products, one for each digit of b (the tens' one with its zero), and their sum."""
    lines, (low, high) = [f"{a:02} × {b:02}"], digits(a, 2)
    for y, shift in zip(digits(b, 2), (1, 10), strict=True):
        carry, rest = divmod(low * y, 10)
        lines.append(f"{low}×{y}={carry}{rest} {high}×{y}+{carry}={high * y + carry:02}: {a * y * shift:04}")
    return lines + add(a * (b % 10), a * (b // 10) * 10, 4, language)
