"""Flax Linen models under a recipe: `qat.linen(module, recipe, variables, *example_inputs)`.

Flax's own method interceptors quantise inputs and outputs of the modules that take part; records
and counts are variables of the collection `qat`, which lifted transforms carry: `nn.remat` and
`nn.jit` on their own, `nn.scan` and `nn.vmap` with `variable_axes={..., "qat": 0}`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import traverse_util
from flax.core.scope import DenyList
from jaxtyping import Array

from trace_jax.checks import require
from trace_jax.qat import layouts, runtime
from trace_jax.qat.recipe import Recipe
from trace_jax.qat.resolve import SitePlan, Weight, join, resolve, seen_sites

COLLECTION = "qat"
_METHODS = ("__call__", "attend")
_STATE = DenyList(deny="params")  # what a forward may write; all but `qat` is dropped


@dataclasses.dataclass(frozen=True)
class _Store:
    module: nn.Module

    @property
    def path(self) -> str:
        return "/".join(self.module.path)

    def has(self, name: str) -> bool:
        return self.module.has_variable(COLLECTION, name)

    def get(self, name: str) -> Any:
        return self.module.get_variable(COLLECTION, name)

    def put(self, name: str, value: Any) -> None:
        where = f"qat.linen: {self.path}"
        fix = f'variable_axes={{..., "{COLLECTION}": 0}} where the model calls nn.scan or nn.vmap'
        free = self.module.is_mutable_collection(COLLECTION)
        require(free, where, "a lifted transform that hides the site", "the collection", fix)
        self.module.put_variable(COLLECTION, name, value)


def quantized(
    module: nn.Module, recipe: Recipe, variables: Mapping[str, Any], *args: Any, **kwargs: Any
) -> runtime.Quantized:
    """The module under the recipe. Public as `qat.linen`.

    Args:    variables: as `init` gives them, with "params"; what the forward writes into other
             collections is dropped.
             args, kwargs: example inputs of `apply`, for one abstract run that finds the sites;
             their values do not matter.
    Returns: pure functions of the parameters, `variables["params"]`, and the audit.
    Raises:  ValueError where the recipe does not fit the model; see `qat.resolve`.
    """
    params, rest = variables["params"], {k: v for k, v in variables.items() if k != "params"}
    modules: dict[str, nn.Module] = {}

    def forward(params: Any, mode: str, feed: dict, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        tap = _Tap(mode, sites, modules)
        given = {"params": params, **rest, **_fed(feed, sites)}
        token = runtime.linen_hook.set(tap.tensor)
        try:
            with nn.intercept_methods(tap):
                out, changed = module.apply(given, *args, **kwargs, mutable=_STATE)
        finally:
            runtime.linen_hook.reset(token)
        return out, _produced(changed)

    sites: dict[str, SitePlan] = {}
    _, seen = jax.eval_shape(lambda params: forward(params, "probe", {}, args, kwargs), params)
    weights = _weights(params, modules)
    plan = resolve(recipe, weights, seen_sites(seen, weights, recipe))
    sites.update(plan.sites)
    return runtime.Quantized(params=params, plan=plan, audit=plan.audit, forward=forward)


def _weights(params: Any, modules: Mapping[str, nn.Module]) -> dict[str, Weight]:
    found = {}
    for keys, leaf in traverse_util.flatten_dict(params).items():
        path, (*lead, name) = "/".join(keys), keys
        owner = "/".join(lead)
        found[path] = layouts.weight(modules.get(owner), name, leaf, owner)
    return found


def _fed(feed: dict[str, Any], sites: Mapping[str, SitePlan]) -> dict[str, Any]:
    """The variables that go in: records, and the layer's number where layers are left out."""
    flat = {}
    for path, site in sites.items():
        if site.layers is not None:
            module = path.rpartition("/")[0]
            flat[(*module.split("/"), runtime.LAYER)] = jnp.arange(site.stacked)
    for path, value in feed.items():
        path, _, number = path.partition("#")
        module, _, name = path.rpartition("/")
        flat[(*module.split("/"), f"{runtime.FEED}_{name}_{number or 0}")] = value
    return {COLLECTION: traverse_util.unflatten_dict(flat)} if flat else {}


def _produced(changed: Mapping[str, Any]) -> runtime.Produced:
    """What the forward left in the collection, by site path."""
    found = {}

    def walk(path: tuple[str, ...], node: Any) -> None:
        for name, value in node.items():
            kind, _, rest = name.partition("_")
            if kind in runtime.OUT.values() and rest.rpartition("_")[2].isdigit():
                site, _, number = rest.rpartition("_")
                found[join("/".join(path), site, int(number))] = value
            elif isinstance(value, Mapping):
                walk((*path, name), value)

    walk((), changed.get(COLLECTION, {}))
    return found


@dataclasses.dataclass(frozen=True)
class _Tap:
    """The interceptor of one forward."""

    mode: str
    sites: Mapping[str, SitePlan]
    modules: dict[str, nn.Module]  # filled by the probe

    def tensor(self, module: nn.Module, name: str, x: Array) -> Array:
        """One site of a module, whatever calls it."""
        plan = self.sites.get(join("/".join(module.path), name))
        return runtime.at_site(x, name, plan, self.mode, _Store(module))

    def __call__(self, method: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        module = context.module
        if context.method_name not in _METHODS:
            return method(*args, **kwargs)
        path = "/".join(module.path)
        if self.mode == "probe":
            self.modules[path] = module
        key, given = runtime.first_float(args, kwargs)
        x = runtime.bypassed(given, path)
        y = self.tensor(module, "input", x) if key is not None else x
        args, kwargs = runtime.replaced(args, kwargs, key, y)
        plan = self.sites.get(join(path, "input"))
        inner = tuple(join(path, name) for name in plan.bypass) if plan is not None else ()
        with runtime.bypass(y, x, inner), _tapped(self, module):
            out = method(*args, **kwargs)
        return self.tensor(module, "output", out) if runtime.is_float(out) else out


@contextlib.contextmanager
def _tapped(tap: _Tap, module: nn.Module) -> Iterator[None]:
    """While stock attention runs, its attention function is one that passes K and V by the tap."""
    if not isinstance(module, nn.MultiHeadDotProductAttention):
        yield
        return
    plain = module.attention_fn

    @functools.wraps(plain)  # Flax asks which keyword arguments the function takes
    def attention_fn(query, key, value, *args, **kwargs):
        key, value = tap.tensor(module, "k", key), tap.tensor(module, "v", value)
        return plain(query, key, value, *args, **kwargs)

    object.__setattr__(module, "attention_fn", attention_fn)
    try:
        yield
    finally:
        object.__setattr__(module, "attention_fn", plain)
