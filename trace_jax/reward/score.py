"""What a response is worth. A scorer maps a prompt and the response text to a number.

    "exact"            1 if the extracted answer equals the gold answer but for white space, else 0
    "number"           1 if the last number of the extracted answer equals the gold number, else 0
    "task"             1 if reasoning-gym's own score of the extracted answer is exactly 1, else 0
    "module:function"  yours: fn(prompt: Prompt, response_text: str) -> float, any finite number

reasoning-gym gives partial credit for answers that contain the gold one, which a policy learns to
exploit; hence exactly 1. A response cut off by the length limit is judged by its text like any
other: it counts only if the answer was already complete. A scorer that raises has failed; that is
never a reward of 0 (see `pool`).
"""

import functools
import importlib
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from trace_jax.checks import message, require
from trace_jax.reward.extract import extract_answer
from trace_jax.types import Prompt

Scorer = Callable[[Prompt, str], float]

_WHERE = "config.data.reward"
_NEED = '"exact", "number", "task" or "module:function"'
# A minus after a digit or word is an operator; commas group thousands.
_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?")

INLINE = ("exact", "number")  # linear in the length of the response, and they need a gold answer


def exact(prompt: Prompt, response_text: str) -> float:
    """1.0 if the extracted answer equals the gold answer; runs of white space are one space."""
    if prompt.answer is None:
        raise ValueError(message(prompt.uid, "no answer", "a gold answer to compare with"))
    return float(_words(extract_answer(response_text)) == _words(prompt.answer))


def number(prompt: Prompt, response_text: str) -> float:
    """1.0 if the last number in the extracted answer equals the gold one: "2 * 8 = 16." is 16."""
    gold = last_number(prompt.answer or "")
    if gold is None:
        raise ValueError(message(prompt.uid, f"answer {prompt.answer!r}", "a number"))
    return float(last_number(extract_answer(response_text)) == gold)


def last_number(text: str) -> Decimal | None:
    """The last decimal number in `text`, without its thousands separators; None without one."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def task_score(prompt: Prompt, response_text: str) -> float:
    """1.0 if the prompt's reasoning-gym task gives the extracted answer its full score."""
    dataset = _dataset(prompt.task, tuple(sorted(prompt.extra["task_args"].items())))
    score = dataset.score_answer(extract_answer(response_text), prompt.extra["entry"])
    return float(score == 1.0)


def load_scorer(spec: str) -> Scorer:
    """The scorer that `config.data.reward` names.

    Raises: ValueError for a malformed name, a module that does not import (with the reason), a
            function that is not there (with the choices), or something that cannot be called.
    """
    check_spec(spec)
    if spec in INLINE:
        return {"exact": exact, "number": number}[spec]
    if spec == "task":
        import reasoning_gym  # noqa: F401  # its import takes seconds: not within a deadline

        return task_score
    module_name, _, name = spec.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # user code: whatever it raises, say that it was the import
        got = f"{spec!r}, whose import failed ({type(error).__name__}: {error})"
        fix = "run from the folder that holds the module, or install it"
        raise ValueError(message(_WHERE, got, _NEED, fix)) from error
    choices = sorted(n for n in vars(module) if callable(vars(module)[n]) and n[0] != "_")
    function: Any = getattr(module, name, None)
    require(callable(function), _WHERE, repr(spec), f"a function of {module_name}: {choices}")
    return function


def check_spec(spec: str) -> None:
    """Refuses a reward name that has no legal form; imports nothing."""
    module, colon, function = spec.partition(":")
    legal = bool(colon) and function.isidentifier()
    legal = legal and all(part.isidentifier() for part in module.split("."))
    require(spec in (*INLINE, "task") or legal, _WHERE, repr(spec), _NEED)


def _words(text: str) -> str:
    return " ".join(text.split())


@functools.lru_cache(maxsize=64)
def _dataset(task: str, args: tuple[tuple[str, Any], ...]) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, seed=0, size=1, **dict(args))
