"""What runs at a site, whichever framework carries its records, and the public face of a model.

A forward runs in one mode:
    "probe"    abstractly, once: which sites there are, and their shapes
    "plain"    fake-quantises                     "counted"  likewise, and counts
    "record"   likewise, and hands back records   "guided"   follows records, and counts

Each framework offers a `Store`: named values that live with a module and travel through scan, vmap,
remat and jit as that framework's variables do. A module that runs more than once in a forward has
numbered sites: the n-th call finds what the calls before it have left in the store.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from trace_jax.checks import require
from trace_jax.guidance.record import SiteRecord
from trace_jax.qat import sites
from trace_jax.qat.audit import Audit
from trace_jax.qat.resolve import Plan, SitePlan, join
from trace_jax.qat.transform import quantize_params
from trace_jax.types import Mean

MODES = ("probe", "plain", "counted", "record", "guided")
OUT = {"probe": "seen", "counted": "stats", "record": "record", "guided": "stats"}
FEED, LAYER = "feed", "layer"
HOOK = "qat_hook"  # attribute of an NNX module that takes part

Produced = dict[str, Any]  # by real site path
T = TypeVar("T")


@runtime_checkable
class Store(Protocol):
    """Named values that live with one module."""

    @property
    def path(self) -> str: ...
    def has(self, name: str) -> bool: ...
    def get(self, name: str) -> Any: ...
    def put(self, name: str, value: Any) -> None: ...


linen_hook: contextvars.ContextVar[Callable[[Any, str, Array], Array] | None]
linen_hook = contextvars.ContextVar("linen_hook", default=None)


def site(module: Any, name: str, x: Array) -> Array:
    """Names a tensor inside a module's own code, so that a rule's `tensors` can quantise it.

    Args:    module: the module itself (`self`). name: of the site, without "/", such as "k".
             x: floating; quantised along its last axis.
    Returns: x itself unless the model runs under `qat.nnx` or `qat.linen` with a rule for it.
    """
    hook = getattr(module, HOOK, None) or linen_hook.get()
    return x if hook is None else hook(module, name, x)


def at_site(x: Any, name: str, plan: SitePlan | None, mode: str, store: Store) -> Any:
    """Quantises x at one site as the mode says; `plan` None: leaves it as it is."""
    if not is_float(x) or (plan is None and mode != "probe"):
        return x
    prefix = OUT.get(mode, "")
    number = next(n for n in range(10**6) if not prefix or not store.has(f"{prefix}_{name}_{n}"))
    if plan is None or mode == "probe":
        store.put(f"{prefix}_{name}_{number}", x)
        return x
    here = jnp.ones((), bool)
    if plan.layers is not None:
        here = jnp.asarray(plan.layers)[store.get(LAYER)]
    record, valid = None, jnp.ones(x.shape[:-1], bool)
    if mode == "guided" and plan.guided:
        record, valid = _fed(store, name, number, x, plan)
    guided = mode == "guided"
    value, stats = sites.quantize_site(x, record, valid & here, plan.site, guided=guided)
    if mode == "record":
        ran = jnp.zeros((), bool)  # all that is kept of a site that is not recorded
        kept = sites.record_site(x, plan.site) if plan.guided else ran
        store.put(f"{prefix}_{name}_{number}", kept)
    elif prefix:
        pairs = {f.name: getattr(stats, f.name) for f in dataclasses.fields(stats)}
        # scans stack what they carry out, and a `Mean` holds scalars
        store.put(
            f"{prefix}_{name}_{number}",
            {key: (mean.total, mean.count) for key, mean in pairs.items() if mean is not None},
        )
    return value if plan.layers is None else jnp.where(here, value, x)


def is_float(x: Any) -> bool:
    """Whether x is an array that can be quantised along its last axis."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating) and jnp.ndim(x) > 0


def _fed(
    store: Store, name: str, number: int, x: Array, plan: SitePlan
) -> tuple[SiteRecord, Bool[Array, "*A"]]:
    path, name = join(store.path, name, number), f"{FEED}_{name}_{number}"
    fix = "inside a lifted transform, let the variables of qat through: see docs/qat.md"
    require(store.has(name), f"qat guided: {path}", "no record", "the record of this call", fix)
    record, valid = store.get(name)
    like = jax.eval_shape(lambda x: jax.tree.leaves(sites.record_site(x, plan.site)), x)
    got, need = ([leaf.shape for leaf in leaves] for leaves in (jax.tree.leaves(record), like))
    require(got == need, f"qat guided: record of {path}", got, need, "records of these inputs")
    return record, valid


_bypassed: contextvars.ContextVar[tuple["_Bypass", ...]]
_bypassed = contextvars.ContextVar("bypassed", default=())


@dataclasses.dataclass
class _Bypass:
    """An input and what it was before it was quantised, for the submodules that shall see that."""

    quantised: Any
    original: Any
    left: set[str]  # paths of modules that have not taken it yet


@contextlib.contextmanager
def bypass(quantised: Any, original: Any, paths: tuple[str, ...]) -> Iterator[None]:
    """While the module runs, these submodules get `original` where they are given `quantised`."""
    entry = _Bypass(quantised, original, set(paths))
    token = _bypassed.set((*_bypassed.get(), entry))
    try:
        yield
    finally:
        _bypassed.reset(token)
    need = "a call with the module's input itself"
    require(not entry.left, "qat: bypass", f"no such call of {sorted(entry.left)}", need)


def bypassed(x: Any, path: str) -> Any:
    """What the module at `path` shall get for x."""
    for entry in _bypassed.get():
        if x is entry.quantised and path in entry.left:
            entry.left.discard(path)
            return entry.original
    return x


def first_float(args: tuple, kwargs: dict[str, Any]) -> tuple[int | str | None, Any]:
    """Where the first floating array among the arguments is, and the array."""
    for key, value in [*enumerate(args), *kwargs.items()]:
        if is_float(value):
            return key, value
    return None, None


def replaced(args: tuple, kwargs: dict[str, Any], key: int | str | None, value: Any) -> tuple:
    """The arguments with one of them replaced."""
    if isinstance(key, int):
        return (*args[:key], value, *args[key + 1 :]), kwargs
    return (args, kwargs) if key is None else (args, {**kwargs, key: value})


# (params, mode, fed values by site path, args, kwargs) -> (output, produced)
Forward = Callable[[Any, str, dict[str, Any], tuple, dict[str, Any]], tuple[Any, Produced]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantized:
    """A model under a recipe: pure functions of parameters, records and inputs.

    All of them may be put under jit, grad, scan, remat, vmap and shard_map. Whatever else the model
    changes while it runs (caches, running statistics, random streams) is dropped.
    """

    params: Any  # as the model came
    plan: Plan
    audit: Audit
    forward: Forward

    def apply(self, params: Any, *args: Any, **kwargs: Any) -> Any:
        """The model's output under plain QAT: every side rounds on its own."""
        return self._run(params, "plain", {}, args, kwargs)[0]

    def counted(self, params: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict]:
        """(output, stats by site) under plain QAT; `audit.check(stats)` wants the stats."""
        out, produced = self._run(params, "counted", {}, args, kwargs)
        return out, self._stats(produced)

    def record(self, params: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, SiteRecord]]:
        """(output, records by site) under plain QAT: what a rollout hands to the trainer.

        Records of layers that are scanned have a leading axis of layers, and one key for all.
        """
        out, produced = self._run(params, "record", {}, args, kwargs)
        return out, {path: produced[path] for path in self._guided()}

    def guided(
        self,
        params: Any,
        records: Mapping[str, SiteRecord],
        *args: Any,
        valid: Bool[Array, "..."] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, dict]:
        """(output, stats by site), rounding as the records say.

        Args:   records: of the same inputs, one for each recorded site of the audit.
                valid: of the leading axes of the sites, such as (B, T): False where a token has
                no record and rounds on its own; None: everywhere.
        Raises: ValueError if a record is missing, unknown, or of another shape.
        """
        wanted, got = set(self._guided()), set(records)
        lost, extra = sorted(wanted - got)[:5], sorted(got - wanted)[:5]
        fix = "record with the same recipe and model"
        text = f"missing {lost}, unknown {extra}"
        require(wanted == got, "qat guided: records", text, "one for each site", fix)
        feed = {}
        for path, record in records.items():
            lead = record.bits.shape[:-1]
            stack = 0 if self.plan.sites[path].stacked is None else 1
            feed[path] = (record, _spread(path, valid, lead, stack))
        out, produced = self._run(params, "guided", feed, args, kwargs)
        return out, self._stats(produced)

    def quantize_params(self, params: T) -> T:
        """Only the parameters, fake-quantised: what the forward multiplies with."""
        return quantize_params(params, self.plan)

    def _guided(self) -> list[str]:
        return [path for path, plan in self.plan.sites.items() if plan.guided]

    def _run(
        self, params: Any, mode: str, feed: dict, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Any, Produced]:
        out, produced = self.forward(quantize_params(params, self.plan), mode, feed, args, kwargs)
        if mode in OUT:
            lost = sorted(set(self.plan.sites) - set(produced))[:5]
            extra = sorted(set(produced) - set(self.plan.sites))[:5]
            text = f"{lost} did not run, {extra} ran unforeseen"
            fix = "build it with example inputs that take the same way through the model"
            require(not lost and not extra, "qat: sites of this forward", text, "the audited", fix)
        return out, produced

    def _stats(self, produced: Produced) -> dict[str, sites.SiteStats]:
        """Counts of each single layer's sites."""
        found = {}
        for path, pairs in produced.items():
            plan = self.plan.sites[path]
            if plan.stacked is None:
                found[path] = _site_stats(pairs)
                continue
            for row, layer in enumerate(self.plan.recipe.layers_in(path, plan.stacked)):
                if plan.layers is None or plan.layers[row]:
                    one = jax.tree.map(lambda a, row=row: a[row], pairs)
                    found[self.plan.recipe.of_layer(path, layer)] = _site_stats(one)
        return found


def _site_stats(pairs: dict[str, tuple[Array, Array]]) -> sites.SiteStats:
    means = {k: Mean(total=jnp.sum(t), count=jnp.sum(n)) for k, (t, n) in pairs.items()}
    return sites.SiteStats(**means)


def _spread(path: str, valid: Any, lead: tuple[int, ...], stack: int) -> Bool[Array, "*A"]:
    """`valid` repeated over layers and over further axes of the record."""
    if valid is None:
        return jnp.ones(lead, bool)
    fits = lead[stack : stack + valid.ndim] == valid.shape
    need = f"the leading axes of the records: {lead[stack:]} of {path}"
    require(fits, "qat guided: valid", valid.shape, need)
    more = (1,) * (len(lead) - stack - valid.ndim)
    return jnp.broadcast_to(valid.reshape(*(1,) * stack, *valid.shape, *more), lead)
