"""Oracles: the answers recomputed from the question, and splits checked by plain set algebra."""

import dataclasses
import json

import pytest

from trace_jax import config as cfg
from trace_jax.data.prompts import build_prompts
from trace_jax.data.tokenizer import byte_tokenizer

WORDS = (("min_word_len", 3), ("max_word_len", 6))


def spell(seed=0, **fields):
    fields = {"train_size": 300, "eval_size": 50, "task_args": WORDS} | fields
    return build_prompts(cfg.Data(**fields), byte_tokenizer(), seed)


def keys(prompts):
    return [" ".join(p.text.lower().split()) for p in prompts]


def write(path, *lines):
    path.write_text("".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines))
    return str(path)


def from_file(path, seed=0, **fields):
    fields = {"train_size": 100, "eval_size": 2, "prompts_per_step": 1} | fields
    return build_prompts(cfg.Data(task=None, path=path, **fields), byte_tokenizer(), seed)


def test_spell_backward_gives_short_prompts_with_right_answers():
    sets = spell()
    assert (len(sets.train), len(sets.held_out)) == (300, 50)
    for prompt in (*sets.train, *sets.held_out):
        verb, word = prompt.text.split(" ")
        assert verb == "reverse" and 3 <= len(word) <= 6
        assert prompt.answer == "".join(reversed(word))
        assert prompt.tokens == (257, *prompt.text.encode(), 257)
        assert prompt.extra["entry"]["metadata"]["word"] == word  # for reasoning-gym's own score


def test_spell_backward_keeps_the_long_question_when_asked():
    sets = spell(task_args=(*WORDS, ("short_prompt", False)), max_prompt_tokens=80)
    assert all(p.text.startswith("Spell this word backward") for p in sets.train)


def test_held_out_prompts_are_disjoint_from_training_and_nothing_repeats():
    sets = spell(train_size=2000)  # enough for reasoning-gym to repeat many words
    assert len(set(keys(sets.train)) | set(keys(sets.held_out))) == 2050
    assert len({p.uid for p in (*sets.train, *sets.held_out)}) == 2050


def test_prompts_are_the_same_for_a_seed_and_others_for_the_next():
    # reasoning-gym draws item i from seed + i: seeds 0 and 1 would share all items but one
    first, again, other = spell(0), spell(0), spell(1)
    assert first == again
    shared = set(keys(first.train)) & set(keys(other.train))
    assert len(shared) < 30
    uid_of = {p.text: p.uid for p in first.train}
    assert all(uid_of[p.text] == p.uid for p in other.train if p.text in uid_of)


def test_task_with_too_few_questions_says_how_many_there_are():
    with pytest.raises(ValueError, match=r"at most [1-9]\d{2,3}: no more distinct"):
        spell(task_args=(("min_word_len", 3), ("max_word_len", 3)), train_size=5000)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"task": "spel_backward"}, r"'spel_backward', need one of \['spell_backward'\]"),
        ({"task": "qqqq"}, "'chain_sum', .*'spell_backward'"),
        ({"task_args": (("word_len", 3),)}, r"'word_len', need one of \['data_file', 'max_word_"),
        ({"task_args": (("seed", 3),)}, "'seed'.*config.seed"),
        ({"task_args": (("min_word_len", -3),)}, "min_word_len must be positive"),
        ({"task_args": (("min_word_len", "x"),)}, "values the task accepts"),
        (
            {"task": "ab", "task_args": (("short_prompt", True),)},
            "short_prompt for ab, need one of",
        ),
        ({"task": "graph_color", "task_args": ()}, "exact, but graph_color/.* has none"),
    ],
)
def test_bad_task_is_refused_with_the_choices(fields, says):
    fields = {"train_size": 2, "eval_size": 1, "prompts_per_step": 1} | fields
    with pytest.raises(ValueError, match=says):
        spell(max_prompt_tokens=5000, **fields)


def test_overlong_prompts_are_refused_dropped_or_cut_and_counted(tmp_path):
    lines = [{"prompt": "x" * n, "answer": "a"} for n in (3, 4, 9, 8, 5)]
    path = write(tmp_path / "d.jsonl", *lines)
    args = {"max_prompt_tokens": 8, "eval_size": 1, "eval_path": path}  # 6 characters and 2 marks
    args["eval_path"] = write(tmp_path / "e.jsonl", {"prompt": "q", "answer": "a"})
    with pytest.raises(ValueError, match=r"d.jsonl:3: got 11 tokens, need at most 8"):
        from_file(path, **args)
    dropped = from_file(path, overlong="drop", **args)
    assert (len(dropped.train), dropped.dropped, dropped.truncated) == (3, 2, 0)
    cut = from_file(path, overlong="truncate", **args)
    assert (len(cut.train), cut.dropped, cut.truncated) == (5, 0, 2)
    assert [len(p.tokens) for p in cut.train] == [5, 6, 8, 8, 7]
    assert cut.train[2].tokens == (*b"xxxxxxx", 257)  # the left goes, the generation prompt stays


def test_jsonl_lines_become_prompts_with_their_extras(tmp_path):
    lines = [{"prompt": f"q{i}", "answer": i, "level": i % 2} for i in range(8)]
    sets = from_file(write(tmp_path / "d.jsonl", *lines[:4], "\n  \n", *lines[4:]), eval_size=3)
    prompts = {p.text: p for p in (*sets.train, *sets.held_out)}
    assert (len(sets.train), len(sets.held_out), len(prompts)) == (5, 3, 8)
    assert prompts["q7"].answer == "7" and prompts["q7"].extra == {"level": 1}
    assert prompts["q3"].uid == "d.jsonl:4" and prompts["q4"].uid == "d.jsonl:7"
    assert from_file(str(tmp_path / "d.jsonl"), eval_size=3) == sets
    splits = {tuple(keys(from_file(str(tmp_path / "d.jsonl"), s).held_out)) for s in range(8)}
    assert len(splits) > 1


def test_jsonl_questions_that_repeat_are_never_in_both_sets(tmp_path):
    lines = [{"prompt": t, "answer": "a"} for i in range(9) for t in (f"Q {i}", f"q  {i} ")]
    for seed in range(5):
        sets = from_file(write(tmp_path / "d.jsonl", *lines), seed, eval_size=4)
        assert not set(keys(sets.train)) & set(keys(sets.held_out))
        assert (len(sets.train), len(sets.held_out), sets.repeated) == (5, 4, 9)


def test_held_out_file_takes_its_questions_out_of_the_training_file(tmp_path):
    (tmp_path / "eval").mkdir()
    path = write(tmp_path / "d.jsonl", *({"prompt": f"q{i}", "answer": "a"} for i in range(6)))
    held = write(tmp_path / "eval/d.jsonl", *({"prompt": f"Q{i}", "answer": "a"} for i in (1, 4)))
    sets = from_file(path, eval_path=held, eval_size=1)
    assert keys(sets.train) == ["q0", "q2", "q3", "q5"]  # also the one beyond eval_size
    assert len(sets.held_out) == 1 and sets.repeated == 2
    assert not {p.uid for p in sets.train} & {p.uid for p in sets.held_out}


GOOD = {"prompt": "q", "answer": "a"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"prompt": "q"}, r"d.jsonl:2: got no 'answer'.*keys of this line are \['prompt'\]"),
        ({"answer": "a"}, "d.jsonl:2: got no 'prompt'"),
        ({"prompt": "q", "answer": None}, "d.jsonl:2: answer: got None"),
        ({"prompt": "q", "answer": "  "}, "d.jsonl:2: answer: got '  '"),
        ({"prompt": "q", "answer": True}, "d.jsonl:2: answer: got True"),
        ({"prompt": ["q"], "answer": "a"}, "d.jsonl:2: prompt"),
        ({"prompt": "\ud800", "answer": "a"}, "d.jsonl:2: prompt.*surrogate"),
        ("[1]\n", "d.jsonl:2: got a JSON list"),
        ("{'prompt': 1}\n", "d.jsonl:2: got invalid JSON"),
        ('{"prompt": "q", "answer": NaN}\n', "d.jsonl:2: got invalid JSON .*NaN"),
    ],
)
def test_bad_jsonl_line_is_named(tmp_path, line, says):
    with pytest.raises(ValueError, match=says):
        from_file(write(tmp_path / "d.jsonl", GOOD, line, GOOD))


def test_missing_empty_or_undecodable_jsonl_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file .*gone.jsonl"):
        from_file(str(tmp_path / "gone.jsonl"))
    with pytest.raises(ValueError, match=r"e.jsonl: got no lines"):
        from_file(write(tmp_path / "e.jsonl", "\n"))
    (tmp_path / "b.jsonl").write_bytes(b'{"prompt": "q", "answer": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match=r"b.jsonl:2: got invalid start byte, need UTF-8"):
        from_file(str(tmp_path / "b.jsonl"))
    with pytest.raises(ValueError, match=r"1 distinct questions .* more than eval_size=2"):
        from_file(write(tmp_path / "s.jsonl", GOOD, GOOD))


def test_prompts_that_are_cut_keep_what_makes_the_model_answer(tmp_path):
    lines = [{"prompt": letter * 30, "answer": "a"} for letter in "xy"]
    path = write(tmp_path / "d.jsonl", *lines)
    args = {"train_size": 1, "eval_size": 1, "prompts_per_step": 1, "overlong": "truncate"}
    tokenizer = dataclasses.replace(
        byte_tokenizer(),
        template="{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}"
        "<|im_start|>answer{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}",
    )
    for thinking, prefix in ((None, [257, *b"answer"]), (False, [257, *b"answer", 259, 260])):
        data = cfg.Data(task=None, path=path, thinking=thinking, **args, max_prompt_tokens=12)
        sets = build_prompts(data, tokenizer, 0)
        assert sets.truncated == 2
        for prompt in (*sets.train, *sets.held_out):
            assert len(prompt.tokens) == 12 and list(prompt.tokens[-len(prefix) :]) == prefix
        short = dataclasses.replace(data, max_prompt_tokens=len(prefix))
        with pytest.raises(ValueError, match=rf"max_prompt_tokens: got {len(prefix)}, need > "):
            build_prompts(short, tokenizer, 0)
