"""Items before they are tokenised, and the split that keeps the held-out ones apart."""

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """A question and its answer, from whatever source."""

    uid: str
    text: str
    answer: str | None
    task: str
    extra: dict[str, Any]


def text_key(text: str) -> str:
    """What makes two questions the same: the text but for case and white space."""
    return " ".join(text.split()).casefold()


def distinct(items: Sequence[Item]) -> tuple[Item, ...]:
    """The first item of each `text_key`, in order."""
    first: dict[str, Item] = {}
    for item in items:
        first.setdefault(text_key(item.text), item)
    return tuple(first.values())


def without(items: Sequence[Item], others: Sequence[Item]) -> tuple[Item, ...]:
    """`items` whose question is none of those in `others`."""
    taken = {text_key(other.text) for other in others}
    return tuple(item for item in items if text_key(item.text) not in taken)
