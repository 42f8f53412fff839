"""config.data -> PromptSets: training prompts and held-out prompts that share no question."""

import dataclasses
import hashlib
import logging
from collections.abc import Sequence

from trace_jax import config as cfg
from trace_jax.checks import message, require
from trace_jax.data import items as items_lib
from trace_jax.data import jsonl, tasks
from trace_jax.data.items import Item
from trace_jax.data.tokenizer import Tokenizer
from trace_jax.types import Prompt

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSets:
    """What a run trains on and what it is measured on, and what was left out or cut."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    dropped: int  # prompts left out because they were too long
    truncated: int  # prompts cut on the left because they were too long
    repeated: int = 0  # lines of the user's files whose question appears before or is held out


def build_prompts(data_cfg: cfg.Data, tokenizer: Tokenizer, seed: int) -> PromptSets:
    """Reads or generates the items, splits them and tokenises them; same result for same seed.

    No question is in both sets, even in other case or spacing. A reasoning-gym task gives exactly
    `train_size` and `eval_size` items. The user's JSONL gives at most that many, chosen by a hash
    of seed and question, whatever the order of the lines; a repeated question counts once.

    Raises:  ValueError or FileNotFoundError before anything else starts: see `tasks`, `jsonl`;
             also a prompt longer than `max_prompt_tokens` under overlong="refuse", a set that is
             empty, or an item without an answer under reward="exact" or "number".
    """
    if data_cfg.path is None:
        train, held_out, repeated = *_gym_split(data_cfg, seed), 0
    else:
        train, held_out, repeated = _jsonl_split(data_cfg, seed)
    _require_judgeable((*train, *held_out), data_cfg.reward)
    train_prompts, dropped, truncated = _tokenise(train, data_cfg, tokenizer)
    held_out_prompts, held_dropped, held_truncated = _tokenise(held_out, data_cfg, tokenizer)
    for name, kept in (("training", train_prompts), ("held-out", held_out_prompts)):
        fix = "raise data.max_prompt_tokens or train_size / eval_size"
        require(len(kept) > 0, "config.data", f"no {name} prompt left", "at least one", fix)
    sets = PromptSets(
        train=train_prompts,
        held_out=held_out_prompts,
        dropped=dropped + held_dropped,
        truncated=truncated + held_truncated,
        repeated=repeated,
    )
    if sets.dropped or sets.truncated or sets.repeated:
        _log.warning(
            "prompts longer than %d tokens: %d dropped, %d cut; repeated questions left out: %d",
            data_cfg.max_prompt_tokens,
            sets.dropped,
            sets.truncated,
            sets.repeated,
        )
    return sets


def _gym_split(data_cfg: cfg.Data, seed: int) -> tuple[Sequence[Item], Sequence[Item]]:
    assert data_cfg.task is not None
    count = data_cfg.eval_size + data_cfg.train_size
    items = tasks.gym_items(data_cfg.task, data_cfg.task_args, count=count, seed=seed)
    return items[data_cfg.eval_size :], items[: data_cfg.eval_size]


def _jsonl_split(data_cfg: cfg.Data, seed: int) -> tuple[Sequence[Item], Sequence[Item], int]:
    assert data_cfg.path is not None
    answered = data_cfg.reward in ("exact", "number")
    lines = jsonl.read_jsonl(data_cfg.path, answer_required=answered)
    items = items_lib.distinct(lines)
    if data_cfg.eval_path is not None:
        eval_lines = jsonl.read_jsonl(
            data_cfg.eval_path, answer_required=answered, label="held_out/"
        )
        evals = items_lib.distinct(eval_lines)
        pool = items_lib.without(items, evals)  # all of them, also those beyond eval_size
        held_out = _sample(evals, data_cfg.eval_size, seed)
        return _sample(pool, data_cfg.train_size, seed), held_out, len(lines) - len(pool)
    require(
        len(items) > data_cfg.eval_size,
        "config.data",
        f"{len(items)} distinct questions in {data_cfg.path}",
        f"more than eval_size={data_cfg.eval_size}, which are held out",
        "--set data.eval_size=N, or give data.eval_path",
    )
    held_out = _sample(items, data_cfg.eval_size, seed)
    train = _sample(items_lib.without(items, held_out), data_cfg.train_size, seed)
    return train, held_out, len(lines) - len(items)


def _sample(items: Sequence[Item], count: int, seed: int) -> tuple[Item, ...]:
    """`count` of the items by a hash of seed and question, in their own order."""
    ranked = sorted(items, key=lambda item: _rank(seed, item))
    chosen = {item.uid for item in ranked[:count]}
    return tuple(item for item in items if item.uid in chosen)


def _rank(seed: int, item: Item) -> bytes:
    return hashlib.sha256(f"{seed}/{items_lib.text_key(item.text)}".encode()).digest()


def _require_judgeable(items: Sequence[Item], reward: str) -> None:
    if reward in ("exact", "number"):
        for item in items:
            fix = "--set data.reward=task lets reasoning-gym judge it"
            where = "config.data.reward"
            need = "an answer to compare with"
            require(item.answer is not None, where, f"{reward}, but {item.uid} has none", need, fix)


def _tokenise(
    items: Sequence[Item], data_cfg: cfg.Data, tokenizer: Tokenizer
) -> tuple[tuple[Prompt, ...], int, int]:
    """The prompts, how many were dropped and how many cut."""
    limit = data_cfg.max_prompt_tokens
    prompts, dropped, truncated = [], 0, 0
    if data_cfg.overlong == "truncate":
        prefix = len(tokenizer.answer_prefix(thinking=data_cfg.thinking))
        where, need = "config.data.max_prompt_tokens", f"> {prefix} to cut prompts"
        fix = "the template ends a prompt with that many tokens, which make the model answer"
        require(limit > prefix, where, limit, need, fix)
    for item in items:
        ids = tokenizer.prompt_ids(item.text, data_cfg.system_prompt, thinking=data_cfg.thinking)
        if len(ids) > limit and data_cfg.overlong == "refuse":
            fix = "--set data.max_prompt_tokens=N, or data.overlong=drop or truncate"
            raise ValueError(message(item.uid, f"{len(ids)} tokens", f"at most {limit}", fix))
        if len(ids) > limit and data_cfg.overlong == "drop":
            dropped += 1
            continue
        if len(ids) > limit:
            ids = ids[-limit:]  # the end holds the question mark and the generation prompt
            truncated += 1
        prompts.append(
            Prompt(
                uid=item.uid,
                text=item.text,
                tokens=tuple(ids),
                answer=item.answer,
                task=item.task,
                extra=item.extra,
            )
        )
    return tuple(prompts), dropped, truncated
