"""Flax NNX models under a recipe: `qat.nnx(model, recipe, *example_inputs)`.

The model itself is left alone. A copy of its module graph has the modules that take part replaced
by subclasses whose call quantises input and output, and records and counts live in NNX variables
of those modules: `nnx.scan`, `nnx.vmap`, `nnx.remat` and `nnx.jit` inside the model carry them.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from trace_jax.qat import layouts, runtime
from trace_jax.qat.recipe import Recipe
from trace_jax.qat.resolve import Plan, Seen, SitePlan, Weight, join, resolve, seen_sites


class QatVariable(nnx.Variable):
    """What QAT keeps in a module during one forward; name its axis in `nnx.StateAxes`."""


@dataclasses.dataclass(frozen=True)
class Hook:
    """The static part of a module that takes part; also what `qat.site` calls."""

    path: str
    mode: str
    plans: tuple[tuple[str, SitePlan], ...] = ()
    bypass: tuple[str, ...] = ()

    def __call__(self, module: nnx.Module, name: str, x: Array) -> Array:
        plan = dict(self.plans).get(name)
        return runtime.at_site(x, name, plan, self.mode, _Store(module))


@dataclasses.dataclass(frozen=True)
class _Store:
    module: nnx.Module

    @property
    def path(self) -> str:
        return getattr(self.module, runtime.HOOK).path

    def has(self, name: str) -> bool:
        return f"qat_{name}" in vars(self.module)

    def get(self, name: str) -> Any:
        return vars(self.module)[f"qat_{name}"].get_value()

    def put(self, name: str, value: Any) -> None:
        setattr(self.module, f"qat_{name}", QatVariable(value))


def quantized(model: nnx.Module, recipe: Recipe, *args: Any, **kwargs: Any) -> runtime.Quantized:
    """The model under the recipe. Public as `qat.nnx`.

    Args:    model: stays as it is. args, kwargs: example inputs of its call, for one abstract run
             that finds the sites; their values do not matter.
    Returns: pure functions of the parameters, `nnx.state(model, nnx.Param)`, and the audit.
    Raises:  ValueError where the recipe does not fit the model; see `qat.resolve`.
    """
    params = nnx.state(model, nnx.Param)
    copy = nnx.clone(model)
    modules = dict(_modules(copy))
    weights = _weights(modules, params)
    probe = _Hooked.build(copy, {p: Hook(p, "probe") for p in modules}, {})
    _, seen = jax.eval_shape(lambda: probe(params, {}, args, kwargs))
    sites = seen_sites(seen, weights, recipe)
    plan = resolve(recipe, weights, sites)
    forwards = {
        mode: _Hooked.build(nnx.clone(model), *_hooks(plan, sites, mode))
        for mode in runtime.MODES[1:]
    }

    def forward(params: Any, mode: str, feed: dict, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        return forwards[mode](params, feed, args, kwargs)

    return runtime.Quantized(params=params, plan=plan, audit=plan.audit, forward=forward)


def _modules(model: nnx.Module) -> Iterator[tuple[str, nnx.Module]]:
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Module):
            yield "/".join(map(str, path)), node


def _weights(modules: dict[str, nnx.Module], params: Any) -> dict[str, Weight]:
    """Of every parameter, a tied one at each of its places: `params` has it only at the first."""
    found, places = {}, {}
    kept = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(params)}
    for owner, module in modules.items():
        for name, value in vars(module).items():
            if isinstance(value, nnx.Param):
                path = join(owner, name)
                found[path] = layouts.weight(module, name, value.get_value(), owner)
                places.setdefault(id(value), []).append(path)
    for paths in places.values():
        first = next((path for path in paths if path in kept), paths[0])
        for path in paths:
            if path != first:
                found[path] = dataclasses.replace(found[path], same_as=first)
    return found


def _hooks(plan: Plan, sites: dict[str, Seen], mode: str) -> tuple[dict[str, Hook], dict[str, int]]:
    """The hook of each module that takes part, and the layers of those that must know theirs."""
    plans: dict[str, dict[str, SitePlan]] = {}
    layers, around = {}, {}
    for path, site in plan.sites.items():
        module, name = sites[path].module, path.partition("#")[0].rpartition("/")[2]
        plans.setdefault(module, {})[name] = site
        if site.layers is not None and site.stacked is not None:
            layers[module] = site.stacked
        if site.bypass:
            around[module] = tuple(join(module, inner) for inner in site.bypass)
            for inner in around[module]:
                plans.setdefault(inner, {})
    hooks = {m: Hook(m, mode, tuple(p.items()), around.get(m, ())) for m, p in plans.items()}
    return hooks, layers


@dataclasses.dataclass(frozen=True)
class _Hooked:
    """A copy of the model with hooks in it, as a pure function."""

    graph: Any
    rest: Any

    @staticmethod
    def build(copy: nnx.Module, hooks: dict[str, Hook], layers: dict[str, int]) -> "_Hooked":
        for path, module in list(_modules(copy)):
            if path in hooks and callable(module):
                object.__setattr__(module, "__class__", _hooked_class(type(module)))
            if path in hooks:
                setattr(module, runtime.HOOK, hooks[path])
            if path in layers:
                _Store(module).put(runtime.LAYER, jnp.arange(layers[path]))
        graph, _, rest = nnx.split(copy, nnx.Param, ...)
        return _Hooked(graph, rest)

    def __call__(self, params: Any, feed: dict, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        model = nnx.merge(self.graph, params, self.rest, copy=True)
        modules = dict(_modules(model)) if feed else {}
        for path, value in feed.items():
            path, _, number = path.partition("#")
            module, _, name = path.rpartition("/")
            _Store(modules[module]).put(f"{runtime.FEED}_{name}_{number or 0}", value)
        out = model(*args, **kwargs)
        return out, _produced(model)


def _produced(model: nnx.Module) -> runtime.Produced:
    """What the forward left in the modules, by site path."""
    found = {}
    for path, module in _modules(model):
        for name, value in vars(module).items():
            parts = name.split("_", 2)
            if parts[0] == "qat" and len(parts) == 3 and parts[1] in runtime.OUT.values():
                site, _, number = parts[2].rpartition("_")
                found[join(path, site, int(number))] = value.get_value()
    return found


@functools.cache
def _hooked_class(base: type) -> type:
    """A subclass whose calls go through the module's hook."""

    def call(method: Any):
        @functools.wraps(method)
        def wrapped(self, *args, **kwargs):
            return _call(self, functools.partial(method, self), args, kwargs)

        return wrapped

    names = [n for n in ("__call__", "attend") if hasattr(base, n)]
    members: dict[str, Any] = {name: call(getattr(base, name)) for name in names}
    if issubclass(base, nnx.MultiHeadAttention):
        # found before the attribute of that name: K and V pass here on their way to attention
        members["attention_fn"] = property(_attention, _set_attention)
    meta: Any = type(base)
    return meta(base.__name__, (base,), members | {"__module__": base.__module__})


def _call(module: nnx.Module, method: Any, args: tuple, kwargs: dict) -> Any:
    hook: Hook = getattr(module, runtime.HOOK)
    key, given = runtime.first_float(args, kwargs)
    x = runtime.bypassed(given, hook.path)
    y = hook(module, "input", x) if key is not None else x
    args, kwargs = runtime.replaced(args, kwargs, key, y)
    with runtime.bypass(y, x, hook.bypass):
        out = method(*args, **kwargs)
    return hook(module, "output", out) if runtime.is_float(out) else out


def _attention(module: nnx.MultiHeadAttention) -> Any:
    plain, hook = vars(module)["attention_fn"], getattr(module, runtime.HOOK)

    def attention_fn(query, key, value, *args, **kwargs):
        key, value = hook(module, "k", key), hook(module, "v", value)
        return plain(query, key, value, *args, **kwargs)

    return attention_fn


def _set_attention(module: nnx.MultiHeadAttention, value: Any) -> None:
    vars(module)["attention_fn"] = value
