"""Items from reasoning-gym: any of its tasks by name, with checked arguments and no repeats."""

import dataclasses
import difflib
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from trace_jax.checks import message, require
from trace_jax.data.items import Item, text_key

# Short questions for models of a million parameters, built from an item's metadata. The argument
# `short_prompt` chooses (`("short_prompt", False)` for reasoning-gym's own sentence).
SHORT_PROMPTS: dict[str, str] = {
    "spell_backward": "reverse {word}",
    "chain_sum": "{expression} =",
    "products": "{expression} =",
    "gcd": "gcd {numbers}",
    "lcm": "lcm {numbers}",
    "count_bits": "bits of {binary}",
}
SHORT_BY_DEFAULT = ("spell_backward",)

_RESERVED = {"seed": "config.seed", "size": "config.data.train_size and eval_size"}
_MAX_CHUNKS = 64  # rounds of generation before a task counts as exhausted
_CHUNK = 10_000  # word_ladder refuses a size above 20,000

TaskArgs = Sequence[tuple[str, int | float | str | bool]]


def gym_items(task: str, args: TaskArgs, *, count: int, seed: int) -> tuple[Item, ...]:
    """`count` distinct questions of a reasoning-gym task; the same for the same arguments.

    reasoning-gym draws item i with seed+i, so that runs with seeds 0 and 1 would see almost the
    same items, and it may repeat itself (spell_backward draws words with replacement). Here the
    seed is hashed, repeats are skipped (`text_key`), and generation goes on until enough differ.

    Args:    args: keywords of the task's own config, and `short_prompt` (see SHORT_PROMPTS).
    Raises:  ValueError for an unknown task or argument (lists the choices), a value the task
             refuses, or a task that has fewer distinct questions (says how many there are).
    """
    kwargs, template = check_args(task, args)
    items: dict[str, Item] = {}
    drawn = 0
    for chunk in range(_MAX_CHUNKS):
        before = len(items)
        size = min(_CHUNK, max(count, 100))
        dataset = _dataset(task, kwargs, seed=_hashed_seed(seed, chunk), size=size)
        for index in range(size):
            item = _item(task, kwargs, dataset[index], template)
            items.setdefault(text_key(item.text), item)
            drawn += 1
            if len(items) == count:
                return tuple(items.values())
        if len(items) == before:
            break
    raise ValueError(
        message(
            "config.data",
            f"{count} questions (train_size + eval_size) of {task}",
            f"at most {len(items)}: no more distinct ones in {drawn} draws",
            "a smaller data.train_size, or task_args with more variety",
        )
    )


def check_args(task: str, args: TaskArgs) -> tuple[dict[str, Any], str | None]:
    """The keywords for the task's config and the short template, or an error that helps."""
    import reasoning_gym.factory as factory  # 2 s to import: only runs that use it pay

    where = "config.data.task"
    if task not in factory.DATASETS:
        close = difflib.get_close_matches(task, factory.DATASETS, n=5)
        need = f"one of {close or sorted(factory.DATASETS)}"
        raise ValueError(message(where, repr(task), need, "see reasoning-gym's gallery of tasks"))
    kwargs = dict(args)
    short = kwargs.pop("short_prompt", task in SHORT_BY_DEFAULT)
    require(
        not short or task in SHORT_PROMPTS,
        "config.data.task_args",
        f"short_prompt for {task}",
        f"one of {sorted(SHORT_PROMPTS)}",
    )
    known = {field.name for field in dataclasses.fields(factory.DATASETS[task][1])}
    for name in kwargs:
        fix = f"use {_RESERVED[name]}" if name in _RESERVED else None
        choices = sorted({*known, "short_prompt"} - set(_RESERVED))
        allowed = name in known and name not in _RESERVED
        require(allowed, "config.data.task_args", repr(name), f"one of {choices}", fix)
    _dataset(task, kwargs, seed=0, size=1)
    return kwargs, SHORT_PROMPTS[task] if short else None


def _dataset(task: str, kwargs: Mapping[str, Any], *, seed: int, size: int) -> Any:
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **kwargs)
    except (AssertionError, TypeError, ValueError, KeyError) as error:  # how its configs refuse
        got = f"{dict(kwargs)} for {task}"
        need = f"values the task accepts ({error})"
        raise ValueError(message("config.data.task_args", got, need)) from error


def _item(
    task: str, kwargs: Mapping[str, Any], entry: Mapping[str, Any], short: str | None
) -> Item:
    """The entry travels along: reasoning-gym's own score needs it, and the config of the task."""
    question, answer, metadata = entry["question"], entry["answer"], entry["metadata"]
    text = question if short is None else short.format(**metadata)
    digest = hashlib.sha256(text_key(text).encode()).hexdigest()[:12]
    return Item(
        uid=f"{task}/{digest}",
        text=text,
        answer=None if answer is None else str(answer),
        task=task,
        extra={"entry": dict(entry), "task_args": dict(kwargs)},
    )


def _hashed_seed(seed: int, chunk: int) -> int:
    digest = hashlib.sha256(f"reasoning-gym/{seed}/{chunk}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
