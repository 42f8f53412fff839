"""What counts as alive, on small programs compiled for this CPU."""

import jax
import jax.numpy as jnp
import pytest

from trace_jax.aot.child import module_text
from trace_jax.aot.hlo import Graph
from trace_jax.aot.survival import survival

SITE = ("layers[0:1]", "k")
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def texts(function):
    """(as written, as this CPU's compiler leaves it)."""
    x = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    lowered = jax.jit(function).lower(x)
    (module,) = lowered.compile().runtime_executable().hlo_modules()
    return module_text(lowered.compiler_ir("hlo").get_hlo_module()), module_text(module)


def rounded(x, midpoints=MIDPOINTS):
    """Codes of |x| / step and the step, by comparisons."""
    step = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    code = sum((jnp.abs(x) > jnp.float32(m) * step).astype(jnp.int32) for m in midpoints)
    return code, step


def program(value, metric=lambda x: 0.0):
    """A program with one site whose value is `value(x)`, used by a matmul."""

    def run(x):
        with jax.named_scope(SITE[0]), jax.named_scope(f"quantize[{SITE[1]}]"):
            y = value(x)
            with jax.named_scope("metric"):
                count = metric(x)
        return jnp.einsum("mk,nk->mn", y, y), count

    return run


def tagged(x):
    """What a compiler would leave: a value that is not rounded."""
    with jax.named_scope("value"):
        return jnp.sin(x) * jnp.max(jnp.abs(x), axis=-1, keepdims=True)


def handed_on(code, step):
    with jax.named_scope("value"):
        return code.astype(jnp.float32) * step


def quantised(x, midpoints=MIDPOINTS):
    return handed_on(*rounded(x, midpoints))


def test_every_comparison_behind_the_value_counts_and_survives_on_a_cpu():
    (found,) = survival(*texts(program(quantised)), [SITE])
    assert found.kept and found.verdict == "kept"
    assert found.written == {f"x > {m:g}": 1 for m in MIDPOINTS}


def test_a_comparison_that_lives_on_for_a_metric_alone_is_not_alive():
    written, _ = texts(program(quantised))
    _, optimised = texts(program(tagged, metric=lambda x: jnp.sum(rounded(x)[0])))
    assert "compare" in optimised
    (found,) = survival(written, optimised, [SITE])
    assert found.verdict == "DELETED"
    assert found.missing == found.written


def test_one_lost_threshold_is_named():
    written, _ = texts(program(quantised))
    _, optimised = texts(program(lambda x: quantised(x, MIDPOINTS[:3] + MIDPOINTS[4:])))
    (found,) = survival(written, optimised, [SITE])
    assert found.verdict == "PARTLY DELETED"
    assert found.missing == {"x > 1.75": 1}


def test_every_copy_of_the_value_has_to_be_quantised():
    def half(x):
        return jnp.concatenate([quantised(x), tagged(x)])

    written, _ = texts(program(quantised))
    _, optimised = texts(program(half))
    (found,) = survival(written, optimised, [SITE])
    assert found.copies == 2 and found.verdict == "DELETED"


def test_a_site_without_a_scope_is_not_kept():
    (found,) = survival(*texts(program(quantised)), [("layers[0:1]", "v")])
    assert not found.kept and found.verdict == "NOT MARKED"


@pytest.mark.parametrize(
    ("narrow", "what"),
    [
        (lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32), "to f8e4m3fn"),
        (lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), "to bf16"),
        (lambda x: jax.lax.reduce_precision(x, 4, 3), "to 4 exponent and 3 mantissa bits"),
        (jnp.round, "round-nearest-even"),
    ],
)
def test_other_ways_to_round_count(narrow, what):
    written, optimised = texts(program(lambda x: tagged(narrow(x))))
    (found,) = survival(written, optimised, [SITE])
    assert found.kept and found.written == {what: 1}
    _, deleted = texts(program(tagged))
    (found,) = survival(written, deleted, [SITE])
    assert found.verdict == "DELETED"


def test_comparisons_with_a_literal_decide_no_rounding():
    def signed(x):
        code, step = rounded(x)
        return handed_on(jnp.where(x < 0, -code, code), step)

    (found,) = survival(*texts(program(signed)), [SITE])
    assert found.written == {f"x > {m:g}": 1 for m in MIDPOINTS}


def test_work_that_is_the_same_in_every_turn_may_leave_the_loop():
    text = """
%body (p: (s32[], f32[4], f32[4])) -> (s32[], f32[4], f32[4]) {
  %p = (s32[], f32[4]{0}, f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %fixed = f32[4]{0} get-tuple-element(%p), index=1
  %state = f32[4]{0} get-tuple-element(%p), index=2
  %next = f32[4]{0} add(%state, %fixed)
  ROOT %t = (s32[], f32[4]{0}, f32[4]{0}) tuple(%i, %fixed, %next)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %zero = s32[] constant(0)
  %sin = f32[4]{0} sine(%x)
  %init = (s32[], f32[4]{0}, /*index=2*/f32[4]{0}) tuple(%zero, %sin, %x)
  %w = (s32[], f32[4]{0}, f32[4]{0}) while(%init), condition=%c, body=%body
  ROOT %out = f32[4]{0} get-tuple-element(%w), index=2
}
"""
    graph = Graph(text)
    (node,) = graph.places(graph.computations["body"]["next"])
    behind = {n.instruction.name for n in graph.behind(node)}
    assert "sin" in behind  # handed through
    assert {n.instruction.name for n in graph.sources(node)} == {"state", "fixed"}
    (state,) = [n for n in graph.sources(node) if n.instruction.name == "state"]
    assert graph.sources(state) == []  # changes from turn to turn
