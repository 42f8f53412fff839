"""Paths, rules and what is an error before anything runs. The oracle is a table written by hand."""

import pytest

from trace_jax.qat import Recipe, Rule, Seen, Weight, resolve
from trace_jax.qat.recipe import matches

TILES = "nvfp4:block_shape=16x16"


@pytest.mark.parametrize(
    ("pattern", "path", "yes"),
    [
        ("mlp/gate", "mlp/gate", True),
        ("mlp/gate", "mlp/gate_up_proj", False),  # F15: not a prefix
        ("gate", "mlp/gate", False),  # nor a suffix
        ("mlp/gate", "mlp/gate/kernel", False),  # nor a subtree
        ("mlp/gate*", "mlp/gate_up_proj", True),
        ("mlp/*", "mlp/gate/kernel", False),  # one segment
        ("mlp/*/kernel", "mlp/gate/kernel", True),
        ("**/router", "router", True),  # any number of segments: none too
        ("**/router", "layers/0/mlp/router", True),
        ("**/router", "layers/0/mlp/my_router", False),
        ("layers/*/mlp/**", "layers/0/mlp", True),
        ("layers/*/mlp/**", "layers/0/mlp/up/kernel", True),
        ("layers/*/mlp/**", "layers/0/mlp2/up", False),
        ("layers/**/kernel", "layers/kernel", True),
        ("layers/**/kernel", "layers/0/a/b/kernel", True),
        ("**", "anything/at/all", True),
        ("layers/{0,3}/{up,down}_proj", "layers/3/up_proj", True),
        ("layers/{0,3}/{up,down}_proj", "layers/30/up_proj", False),
        ("{a*,b}/c", "axe/c", True),
        ("layers/1", "layers/11", False),
        ("a.b/c+", "a.b/c+", True),  # letters that regular expressions use are plain here
        ("a.b", "axb", False),
    ],
)
def test_a_pattern_means_the_whole_path(pattern, path, yes):
    assert matches(pattern, path) is yes


def dense(path, shape=(32, 32)):
    return {path: Weight(shape=shape, owner=path.rpartition("/")[0])}


def weights(*paths, shape=(32, 32)):
    return {k: v for path in paths for k, v in dense(path, shape).items()}


def quantised(recipe, *paths, **kwargs):
    return sorted(resolve(recipe, weights(*paths, **kwargs)).audit.weights)


def rule(pattern, **options):
    return Rule(pattern, **({"weights": "nvfp4", "axis": -1} | options))


def test_gate_is_excluded_and_gate_up_proj_is_not():
    """F15: an exclusion that also took the longer name left 56 parameters in BF16, silently."""
    recipe = Recipe(rules=(rule("**/mlp/**"),), exclude=("**/mlp/gate",))
    assert quantised(recipe, "0/mlp/gate/w", "0/mlp/gate_up_proj/w") == ["0/mlp/gate_up_proj/w"]


def test_the_first_rule_that_matches_decides():
    first = rule("a/*", weights="nvfp4:global_rule=one")
    plan = resolve(Recipe(rules=(first, rule("**"))), weights("a/w", "b/w"))
    formats = {row.path: (row.format, row.rule) for row in plan.rows}
    assert formats == {"a/w": ("nvfp4:global_rule=one", "a/*"), "b/w": ("nvfp4", "**")}


@pytest.mark.parametrize("pattern", ["a/w", "a"])
def test_a_rule_names_a_parameter_or_the_module_that_owns_it(pattern):
    assert quantised(Recipe(rules=(rule(pattern),)), "a/w", "a/b/w", "c/w") == ["a/w"]


def test_first_and_last_layers_are_kept():
    paths = [f"layers/{i}/w" for i in range(11)]
    recipe = Recipe(rules=(rule("layers/**"),), layers="layers/*", keep_first=2, keep_last=1)
    assert quantised(recipe, *paths) == sorted(paths[2:10])


def test_layers_may_be_part_of_a_name():
    paths = [f"enc/block_{i}/w" for i in range(3)]
    recipe = Recipe(rules=(rule("enc/**"),), layers="enc/block_*", keep_last=2)
    assert quantised(recipe, *paths) == ["enc/block_0/w"]


def test_stacked_layers_are_read_as_single_ones():
    recipe = Recipe(
        rules=(rule("layers/*/moe/up"),), layers="layers/*", scanned=True, keep_first=1, keep_last=1
    )
    plan = resolve(recipe, weights("layers/moe/up", "layers/moe/down", shape=(4, 8, 32, 16)))
    assert plan.audit.weights == ("layers/1/moe/up", "layers/2/moe/up")
    assert plan.weights["layers/moe/up"].layers == (False, True, True, False)
    assert {row.shape for row in plan.rows} == {(8, 32, 16)}
    single = Recipe(rules=recipe.rules, layers="layers/*", keep_first=1, keep_last=1)
    names = [f"layers/{i}/moe/{n}" for n in ("up", "down") for i in range(4)]
    assert not plan.audit.diff(resolve(single, weights(*names, shape=(8, 32, 16))).audit)


def test_one_layer_of_a_stack_cannot_have_a_format_of_its_own():
    rules = (rule("layers/0/w", weights="nvfp4:global_rule=one"), rule("layers/*/w"))
    recipe = Recipe(rules=rules, layers="layers/*", scanned=True)
    with pytest.raises(ValueError, match="2 different choices, need one format for all layers"):
        resolve(recipe, weights("layers/w", shape=(3, 32, 32)))


def seen(path, what="input", **options):
    module = path.rpartition("/")[0]
    return {path: Seen(module=module, what=what, shape=(2, 32), **options)}


@pytest.mark.parametrize(
    ("pattern", "options", "sites"),
    [
        ("a/**", {"inputs": "nvfp4"}, ("a/input", "a/up/input")),
        ("a/*", {"inputs": "nvfp4"}, ("a/up/input",)),  # H2: not a's own input
        ("a/{*,b}", {"inputs": "nvfp4"}, ("a/up/input",)),
        ("**", {"outputs": "nvfp4"}, ("a/up/output",)),
        ("a/norm", {"inputs": "nvfp4"}, ("a/norm/input",)),
        ("**/n*m", {"inputs": "nvfp4"}, ("a/norm/input",)),
        ("a/k", {"tensors": "nvfp4"}, ("a/k",)),  # a named tensor has a path of its own
        ("a/*", {"tensors": "nvfp4"}, ("a/k",)),
    ],
)
def test_inputs_and_outputs_go_by_their_module_and_stars_mean_owners_of_matrices(
    pattern, options, sites
):
    found = seen("a/input") | seen("a/up/input") | seen("a/k", "tensor")
    found |= seen("a/norm/input", listed=False, matrices=False)
    found |= seen("a/norm/output", "output", listed=False, matrices=False)
    found |= seen("a/up/output", "output", listed=False)
    known = dense("a/w") | dense("a/up/w")
    plan = resolve(Recipe(rules=(Rule(pattern, **options),)), known, found)
    assert plan.audit.sites == sites


def test_an_input_cannot_be_named_apart_from_its_module():
    known, found = dense("a/w"), seen("a/input")
    rule = Rule("a", inputs="nvfp4")
    with pytest.raises(ValueError, match="Rule 'a/input': inputs: got no match"):
        resolve(Recipe(rules=(rule, Rule("a/input", inputs="nvfp4"))), known, found)
    with pytest.raises(ValueError, match="exclude 'a/input': got no match"):
        resolve(Recipe(rules=(rule,), exclude=("a/input",)), known, found)
    root = Recipe(rules=(Rule("**", inputs="nvfp4"),))
    at_root = {"input": Seen(module="", what="input", shape=(2, 32))}
    assert resolve(root, dense("w"), at_root).audit.sites == ("input",)


def test_a_module_that_never_ran_has_a_row_that_says_so():
    paths = [f"l/{i}/{name}/w" for i in range(2) for name in ("a", "b")]
    found = seen("l/0/a/input") | seen("l/1/a/input")
    rule = Rule("l/*/{a,b}", weights="nvfp4", inputs="nvfp4", axis=-1)
    known = weights(*paths) | weights("l/0/vec/b", shape=(32,))
    rows = resolve(Recipe(rules=(rule,), layers="l/*", keep_first=1), known, found).rows
    never = {row.path: (row.format, row.why[:12]) for row in rows if row.shape is None}
    assert never == {"l/1/b/input": (None, "never called")}
    with pytest.raises(ValueError, match=r"'l/0/b': inputs: got no match \(never called with"):
        resolve(Recipe(rules=(Rule("l/0/b", inputs="nvfp4"), rule)), known, found)


@pytest.mark.parametrize(
    ("rules", "exclude", "text"),
    [
        (("a/w",), (), ""),  # the name it goes by
        (("{a,b}/w",), (), ""),
        (("c/w",), ("b",), ""),  # neither
        (("b/w",), (), "b/w: got a rule that does not hold for a/w, need one decision. Fix: rules"),
        (("**",), ("a",), "b/w: got a rule that does not hold for a/w"),
        (("**",), ("b",), "b/w: got excluded by 'b', and a/w quantised, need one decision"),
        (("**",), ("a", "b"), ""),
    ],
)
def test_a_parameter_in_two_places_gets_one_decision(rules, exclude, text):
    known = weights("a/w", "c/w")
    known["b/w"] = Weight(shape=(32, 32), owner="b", same_as="a/w")
    recipe = Recipe(rules=tuple(rule(pattern) for pattern in rules), exclude=exclude)
    if text:
        with pytest.raises(ValueError, match=text):
            resolve(recipe, known)
        return
    plan = resolve(recipe, known)
    assert "b/w" not in plan.weights
    row = next(row for row in plan.rows if row.path == "b/w")
    assert (row.format, row.why) == (None, "same as a/w")


def test_one_thing_or_a_list_stands_for_a_tuple():
    one = Recipe(rules=(Rule("a", inputs="nvfp4", bypass=("r",)),), exclude=("head",))
    assert Recipe(rules=Rule("a", inputs="nvfp4", bypass="r"), exclude="head") == one
    assert Recipe(rules=[Rule("a", inputs="nvfp4", bypass=["r"])], exclude=["head"]) == one
    Rule("a", weights=TILES)  # tiles are for weights
    Rule("a", weights="hif4", scale_bits=4)  # of which nothing is recorded


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"rules": (rule("b"),)},
            r"Rule 'b': weights: got no match, need something to.*misses: ab, emb",
        ),
        ({"rules": (rule("**"), rule("ab/w"))}, "Rule 'ab/w': weights: got no match"),
        ({"rules": (rule("**", inputs="nvfp4"),)}, r"inputs: got no match \(never called"),
        ({"exclude": ("routr",)}, "exclude 'routr': got no match.*near misses: ab/router"),
        ({"layers": "layer/*"}, "layers: got 'layer/\\*', need a pattern of some path"),
        ({"layers": "l/*", "keep_first": 1, "keep_last": 1}, "1 and 1 of 2 layers, need at least"),
        ({"rules": (rule("vec/b"),)}, r"got no match \(a vector\)"),
        ({"rules": (rule("emb/embedding", axis=None),)}, r"got no match \(an embedding; axis=-1"),
        ({"rules": (rule("ab/w", axis=None),)}, r"ab/w: got shape \(32, 32\) .*axis=-2\) names"),
        ({"rules": (rule("ab/w", axis=-3),)}, r"got axis \(-3,\) alone, need out as well"),
        ({"rules": (rule("ab/w", axis=-3, out=-1),)}, "need different axes of rank 2"),
        ({"rules": (rule("ab/**", share_scale=("w", "v")),)}, r"share_scale at ab/\{\}: got \['w'"),
        ({"rules": (rule("ab/w", share_scale=("u", "v")),)}, "share_scale: got no match"),
    ],
)
def test_what_does_not_fit_the_model_is_an_error(options, text):
    names = ("ab/w", "ab/router/w", "l/0/w", "l/1/w", "vec/b", "emb/embedding")
    known = weights(*names) | weights("vec/b", shape=(32,))
    known["emb/embedding"] = Weight(
        shape=(9, 32), owner="emb", only_by_axis="an embedding; axis=-1"
    )
    recipe = Recipe(**({"rules": (rule("ab/**"),)} | options))
    with pytest.raises(ValueError, match=text):
        resolve(recipe, known, {})


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Rule("a"), "got no format, need one of"),
        (lambda: Rule("a", weights="nvfp3"), "format: got 'nvfp3', need one of"),
        (lambda: Rule("", weights="nvfp4"), "need a path pattern"),
        (lambda: Rule("a", weights="nvfp4", axis=1), "axis: got .*, need negative axes"),
        (lambda: Rule("a", inputs="nvfp4", guide="bits"), "guide: got bits, need one of"),
        (lambda: Rule("a", inputs="nvfp4", ste="soft"), "ste: got soft, need one of"),
        (lambda: Rule("a", weights="nvfp4", bypass=("r",)), "need a format for inputs"),
        (lambda: Rule("a", weights="nvfp4", share_scale=("g",)), "need two names or more"),
        (lambda: Rule("a", weights="nvfp4", share_scale="gate"), "need two names or more"),
        (lambda: Rule("a", weights="nvfp4", share_scale=(1, 2)), "need a tuple of str"),
        (lambda: Rule("mlp//x", weights="nvfp4"), "need segments between single slashes"),
        (lambda: Rule("a", inputs=TILES), "inputs: got nvfp4:b.*need blocks in one row: a tile"),
        (lambda: Rule("a", outputs=TILES), "outputs: got .* need blocks in one row"),
        (lambda: Rule("a", tensors=TILES), "tensors: got .* need blocks in one row"),
        (lambda: Rule("a", inputs="hif4", scale_bits=4), "hif4.*need"),
        (lambda: Recipe(rules="mlp"), "rules: got 'mlp', need a tuple of Rule"),
        (lambda: Recipe(rules=rule("a"), exclude="a//b"), "need segments between single slashes"),
        (lambda: Recipe(rules=()), "need at least one qat.Rule"),
        (lambda: Recipe(rules=(rule("a"),), keep_last=1), 'need a pattern. Fix: layers="layers'),
        (lambda: Recipe(rules=(rule("a"),), layers="layers"), "need a pattern with one `\\*`"),
        (lambda: Recipe(rules=(rule("a"),), layers="b_*", scanned=True), "need a pattern ending"),
        (lambda: matches("a//b", "a/b"), "need segments between single slashes"),
        (lambda: matches("a**", "a"), r"need \*\* as a whole segment"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_an_error(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_an_embedding_is_quantised_where_the_rule_names_its_axis():
    known = {"e/embedding": Weight(shape=(9, 32), owner="e", only_by_axis="an embedding")}
    recipe = Recipe(rules=(rule("e", axis=-1),))
    assert resolve(recipe, known).audit.weights == ("e/embedding",)


def stack_of(ids, **changes):
    """A recipe over a stack whose rows belong to some of six layers only."""
    options = {"rules": (rule("layers/*/mlp/w"),), "layers": "layers/*", "scanned": True}
    return Recipe(**options, rows=(("layers/mlp", ids),), **changes)


def test_rows_of_a_stack_of_some_layers_go_by_the_numbers_of_those_layers():
    known = weights("layers/mlp/w", shape=(3, 32, 32)) | weights("layers/norm/w", shape=(6, 32, 32))
    plan = resolve(stack_of((1, 3, 4), keep_first=2, keep_last=1), known)
    rows = {row.path: (row.layer, row.format, row.why) for row in plan.rows}
    assert {path: row for path, row in rows.items() if "mlp" in path} == {
        "layers/1/mlp/w": (1, None, "layer kept as it is"),
        "layers/3/mlp/w": (3, "nvfp4", ""),
        "layers/4/mlp/w": (4, "nvfp4", ""),
    }
    assert plan.weights["layers/mlp/w"].layers == (False, True, True)  # by row
    assert {row.layer for row in plan.rows if "norm" in row.path} == set(range(6))


def test_a_stack_with_another_number_of_rows_is_refused_by_name():
    known = weights("layers/mlp/w", shape=(2, 32, 32))
    with pytest.raises(ValueError, match=r"layers/mlp/w: got 2 rows, need one for each .*1, 3, 4"):
        resolve(stack_of((1, 3, 4)), known)
    for ids, path in (((3, 1), "layers/mlp"), ((1, 3), "other")):
        with pytest.raises(ValueError, match="Recipe: rows"):
            Recipe(rules=(rule("a"),), layers="layers/*", scanned=True, rows=((path, ids),))
