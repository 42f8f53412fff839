"""Oracle: layers counted by hand."""

import pytest

from trace_jax import layer_choice

SITES = ("expert_in", "k", "v")


def had(first, stop):
    """Every layer has every site."""
    return dict.fromkeys(SITES, tuple(range(first, stop)))


@pytest.mark.parametrize(
    ("text", "first", "stop", "want"),
    [
        ("all", 0, 3, (0, 1, 2)),
        ("all", 2, 6, (2, 3, 4, 5)),
        ("latter_half", 0, 40, tuple(range(20, 40))),
        ("latter_half", 0, 5, (2, 3, 4)),
        ("latter_half", 0, 1, (0,)),
        ("latter_half", 2, 6, (4, 5)),
        ("last:1", 0, 4, (3,)),
        ("last:4", 0, 4, (0, 1, 2, 3)),
        ("last:10", 0, 40, tuple(range(30, 40))),
        ("0,3,5", 0, 6, (0, 3, 5)),
        ("5,0,3", 0, 6, (0, 3, 5)),
        ("2", 0, 3, (2,)),
    ],
)
def test_one_choice_is_for_every_site(text, first, stop, want):
    assert layer_choice.choose(text, had(first, stop), first, stop) == dict.fromkeys(SITES, want)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("expert_in=all", {"expert_in": (0, 1, 2, 3)}),
        ("expert_in=0,2 kv=last:1", {"expert_in": (0, 2), "k": (3,), "v": (3,)}),
        ("v=1 expert_in=latter_half", {"expert_in": (2, 3), "v": (1,)}),
    ],
)
def test_each_site_may_have_its_own_layers(text, want):
    got = layer_choice.choose(text, had(0, 4), 0, 4)
    assert got == want and list(got) == [site for site in SITES if site in want]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "half",
        "last:",
        "last:1,2",
        "0,,1",
        "0,",
        "0 1",
        "-1",
        "1.5",
        "2,2",
        "all:1",
        "k=",
        "=all",
        "k=1 v",
        "k=1 k=2",
        "k=half",
        "k==1",
    ],
)
def test_what_is_no_choice_is_refused_with_the_forms(text):
    with pytest.raises(ValueError, match=r"config\.quant\.guide_layers: got .*last:N"):
        layer_choice.parse(text)


@pytest.mark.parametrize(
    ("text", "need"),
    [
        ("last:0", r"got last:0, need last:N with N in 1\.\.4"),
        ("last:5", r"got last:5, need last:N with N in 1\.\.4"),
        ("0,4", r"got 0,4, need quantised layers, 0\.\.3"),
        ("k=4", r"got k=4, need quantised layers, 0\.\.3"),
        ("expert_hidden=0", r"got site expert_hidden, need some of \['expert_in', 'k', 'v'\]"),
        ("kv=0 k=1", r"need k named once"),
    ],
)
def test_layers_and_sites_that_are_not_there_are_refused(text, need):
    with pytest.raises(ValueError, match=need):
        layer_choice.choose(text, had(0, 4), 0, 4)


HYBRID = {"expert_in": (1, 2, 3, 4, 5, 6, 7), "k": (3, 7), "v": (3, 7)}


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("all", HYBRID),
        ("latter_half", {"expert_in": (4, 5, 6, 7), "k": (7,), "v": (7,)}),
        ("last:5", {"expert_in": (3, 4, 5, 6, 7), "k": (3, 7), "v": (3, 7)}),
        ("1,3", {"expert_in": (1, 3), "k": (3,), "v": (3,)}),
        ("expert_in=2 kv=3", {"expert_in": (2,), "k": (3,), "v": (3,)}),
    ],
)
def test_a_site_gets_those_of_the_chosen_layers_that_have_it(text, want):
    assert layer_choice.choose(text, HYBRID, 1, 8) == want


@pytest.mark.parametrize(
    ("text", "need"),
    [
        ("kv=2,3", r"layers \[2\] without kv, need layers that have kv: \[3, 7\]"),
        ("kv=last:0", r"got kv=last:0, need last:N with N in 1\.\.7"),
    ],
)
def test_a_layer_without_the_site_that_was_named_for_it_is_refused(text, need):
    with pytest.raises(ValueError, match=need):
        layer_choice.choose(text, HYBRID, 1, 8)


def test_a_choice_without_any_site_is_refused():
    lone = {"k": (3,), "v": (3,)}
    with pytest.raises(ValueError, match=r"layers \[2\] without any of k, v, need"):
        layer_choice.choose("2,3", lone, 1, 8)
    with pytest.raises(ValueError, match="no layer with kv, need"):
        layer_choice.choose("kv=latter_half", lone, 1, 8)
