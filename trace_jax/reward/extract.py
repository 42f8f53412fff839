"""Finds the answer in a response. Linear in its length: responses are not trusted to be short.

First the thinking is cut off: only what follows the last `</think>` counts, and an opened thought
that never closes leaves no answer at all. Then the first of these that finds something decides:

    boxed   the last balanced `\\boxed{...}` or `\\fbox{...}`; a box that only holds a box is opened
    tag     the last `<answer>...</answer>`
    text    the whole text

White space around the result goes. `config.data.reward` "exact", "number" and "task" use all three;
a reward function of your own may call `extract_answer(text, methods=("boxed",))`.
"""

import re
from collections.abc import Sequence

from trace_jax.checks import require

METHODS = ("boxed", "tag", "text")

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)  # \{ and \} are no braces of TeX


def extract_answer(response: str, methods: Sequence[str] = METHODS) -> str:
    """The answer in `response`; "" if there is none.

    Args:    methods: names out of METHODS, in order of preference.
    """
    unknown = set(methods) - set(METHODS)
    require(not unknown, "extract_answer: methods", sorted(unknown), f"names out of {METHODS}")
    text = after_thinking(response)
    finders = {"boxed": last_box, "tag": last_tag, "text": str}
    for method in methods:
        found = finders[method](text)
        if found is not None:
            return found.strip()
    return ""


def after_thinking(response: str) -> str:
    """What follows the last `</think>`; "" if a thought was opened after it and not closed."""
    _, _, rest = response.rpartition("</think>")
    return "" if "<think>" in rest else rest


def last_box(text: str) -> str | None:
    """The content of the last balanced box, or None. Boxes inside a box belong to the outer one."""
    open_braces: list[tuple[int, bool]] = []  # where the content starts; whether it is a box
    box_ends: dict[int, int] = {}  # of every balanced box: start of its content -> end
    last: tuple[int, int] | None = None
    for token in _BOX.finditer(text):
        kind = token.group()
        if kind.endswith("{") and kind != r"\{":
            open_braces.append((token.end(), len(kind) > 1))
        elif kind == "}" and open_braces:
            start, is_box = open_braces.pop()
            if is_box:
                box_ends[start] = token.start()
                last = (start, token.start())  # an outer box closes later, so it wins
    return None if last is None else text[slice(*_innermost(text, last, box_ends))]


def _innermost(text: str, span: tuple[int, int], box_ends: dict[int, int]) -> tuple[int, int]:
    """Opens boxes as long as the content is one box and nothing else."""
    while True:
        start, end = span
        inner = _BOX.match(text, _skip_space(text, start, end))
        if inner is None or inner.end() not in box_ends:
            return span
        inner_end = box_ends[inner.end()]
        if _skip_space(text, inner_end + 1, end) != end:
            return span
        span = (inner.end(), inner_end)


def _skip_space(text: str, start: int, end: int) -> int:
    while start < end and text[start].isspace():
        start += 1
    return start


def last_tag(text: str) -> str | None:
    """What stands in the last `<answer>...</answer>`, or None."""
    close = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(close, 0))
    return None if start < 0 else text[start + len("<answer>") : close]
