"""Oracles: answers written by hand, and a slow search over every pair of braces."""

import itertools
import time

import pytest

from trace_jax.reward.extract import extract_answer, last_box


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("  kwof\n", "kwof"),
        ("", ""),
        (r"so \boxed{70}", "70"),
        (r"\boxed{12} wait \boxed{70}", "70"),  # math-verify would read a set of both
        (r"\boxed{12} wait \boxed{70", "12"),  # cut off: the last one that is balanced
        (r"\fbox{8}", "8"),
        (r"\boxed {8}", "8"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{ \fbox{ \boxed{5} } }", "5"),
        (r"\boxed{\boxed{5} m}", r"\boxed{5} m"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a \} b}", r"a \} b"),
        (r"} \boxed{3} {", "3"),
        (r"\boxed{}", ""),
        ("<answer>4</answer> or <answer> 5 </answer>", "5"),
        ("<answer>4</answer> <answer>5", "4"),
        ("</answer><answer>", "</answer><answer>"),
        (r"<answer>\boxed{6}</answer>", "6"),
        (r"<answer>6</answer> \boxed{7}", "7"),
        ("<think>1</think> 2", "2"),
        ("1</think>2</think>3", "3"),  # the template opened the thought
        (r"<think>\boxed{1}</think> 2", "2"),
        (r"<think>so \boxed{1}", ""),  # never finished thinking: no answer
        ("2 <think>", ""),
        ("2^3", "2^3"),
    ],
)
def test_extract_answer_finds(response, answer):
    assert extract_answer(response) == answer


def test_extract_answer_follows_the_order_it_is_given():
    text = r"\boxed{1} <answer>2</answer>"
    assert extract_answer(text, methods=("tag", "boxed")) == "2"
    assert extract_answer("no box", methods=("boxed",)) == ""
    with pytest.raises(ValueError, match=r"\['box'\], need names out of"):
        extract_answer(text, methods=("box",))


def slow_last_box(text):
    """Every substring that starts a box and has balanced braces; the one that ends last, and of
    those the longest; then opened while it is a box itself."""
    found = []
    for start, end in itertools.combinations(range(len(text)), 2):
        if text.startswith(r"\boxed{", start) and text[end] == "}":
            content = text[start + 7 : end]
            depths = list(itertools.accumulate({"{": 1, "}": -1}.get(c, 0) for c in content))
            if not depths or (min(depths) >= 0 and depths[-1] == 0):
                found.append((end, -start, content))
    if not found:
        return None
    content = max(found)[2]
    while content.startswith(r"\boxed{") and slow_last_box(content) == slow_last_box(content + " "):
        inner = content[7:-1]
        depths = list(itertools.accumulate({"{": 1, "}": -1}.get(c, 0) for c in inner))
        if content[-1] != "}" or (depths and (min(depths) < 0 or depths[-1] != 0)):
            break
        content = inner
    return content


def test_last_box_agrees_with_a_search_over_all_pairs_of_braces():
    for pieces in itertools.product(("", r"\boxed{", "{", "}", "a"), repeat=5):
        text = "".join(pieces)
        assert last_box(text) == slow_last_box(text), text


@pytest.mark.parametrize(
    "unit", [r"\boxed{", r"\boxed{}", "{", "<answer>", "<think>", r"\boxed   "]
)
def test_extract_answer_is_linear_on_hostile_responses(unit):
    start = time.process_time()  # not wall time: others may use the machine
    extract_answer(unit * 20_000)
    extract_answer(unit * 20_000 + "x" + "}" * 20_000)
    assert time.process_time() - start < 30.0  # a bound on hostile input: quadratic takes minutes
