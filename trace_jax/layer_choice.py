"""Texts that choose layers: "all", "latter_half", "last:N", "0,3,5", or one of these for each site.

By site, such as "expert_in=0,1,3 kv=last:1", sites that are not named get no layer; "kv" names
both K and V.
"""

import re
from collections.abc import Mapping, Sequence

from trace_jax.checks import require

WHERE = "config.quant.guide_layers"
ALIASES = {"kv": ("k", "v")}
_NEED = (
    'all, latter_half, last:N, different layers like 0,3,5, or by site like "expert_in=all kv=2"'
)


def parse(text: str) -> dict[str | None, tuple[str, tuple[int, ...]]]:
    """Per named site (None: every site) the kind of choice and its numbers.

    Raises: ValueError if the text is none of the forms.
    """
    pairs = [pair.partition("=") for pair in text.split()] or [(text, "", "")]
    by_site = any(equals for _, equals, _ in pairs)
    one = not by_site and len(pairs) == 1
    well = one or all(equals and site for site, equals, _ in pairs)
    names = [site for site, _, _ in pairs]
    require(well and len(set(names)) == len(names), WHERE, repr(text), _NEED)
    if one:
        return {None: _parse_one(text)}
    return {site: _parse_one(choice) for site, _, choice in pairs}


def choose(
    text: str, sites: Mapping[str, Sequence[int]], first: int, stop: int
) -> dict[str, tuple[int, ...]]:
    """Layer ids of each site, ascending; sites without any are left out.

    Args:   sites: that can be chosen for, and the layers that have each. first, stop: the choice is
            among layers first..stop-1; halves and counts are of these, ids are absolute. Of the
            chosen layers a site gets those that have it.
    Raises: ValueError for a text of another form, another site, a layer outside, or one that does
            not have the site that was named for it.
    """
    chosen: dict[str, tuple[int, ...]] = {}
    for name, choice in parse(text).items():
        layers = _layers(text, *choice, first, stop)
        named = list(sites) if name is None else list(ALIASES.get(name, (name,)))
        for site in named:
            require(site in sites, WHERE, f"site {site}", f"some of {list(sites)}")
            require(site not in chosen, WHERE, repr(text), f"{site} named once")
            chosen[site] = tuple(i for i in layers if i in sites[site])
        _check_had(text, name, choice[0], layers, {site: chosen[site] for site in named}, sites)
    return {site: chosen[site] for site in sites if chosen.get(site)}


def _check_had(
    text: str,
    name: str | None,
    form: str,
    layers: tuple[int, ...],
    chosen: Mapping[str, tuple[int, ...]],
    sites: Mapping[str, Sequence[int]],
) -> None:
    """Layers chosen by id have a site each, those chosen for a site have that; some layer is."""
    got = {i for ids in chosen.values() for i in ids}
    lack = [i for i in layers if i not in got] if form == "list" else []
    what = "any of " + ", ".join(chosen) if name is None else name
    having = sorted({i for site in chosen for i in sites[site]})
    need = f"layers that have {what}: {having}"
    require(not lack, WHERE, f"{text!r}, layers {lack} without {what}", need)
    require(bool(got) or not chosen, WHERE, f"{text!r}, no layer with {what}", need)


def _parse_one(text: str) -> tuple[str, tuple[int, ...]]:
    if text in ("all", "latter_half"):
        return text, ()
    found = re.fullmatch(r"(last:)?(\d+(?:,\d+)*)", text)
    numbers = () if found is None else tuple(int(number) for number in found[2].split(","))
    last = found is not None and found[1] is not None
    well = len(numbers) == 1 or (len(numbers) == len(set(numbers)) > 1 and not last)
    require(well, WHERE, repr(text), _NEED)
    return "last" if last else "list", numbers


def _layers(
    text: str, kind: str, numbers: tuple[int, ...], first: int, stop: int
) -> tuple[int, ...]:
    if kind == "all":
        return tuple(range(first, stop))
    if kind == "latter_half":
        return tuple(range((first + stop) // 2, stop))
    if kind == "last":
        inside = 1 <= numbers[0] <= stop - first
        need = f"last:N with N in 1..{stop - first}, the quantised layers"
        require(inside, WHERE, text, need)
        return tuple(range(stop - numbers[0], stop))
    inside = all(first <= number < stop for number in numbers)
    require(inside, WHERE, text, f"quantised layers, {first}..{stop - 1}")
    return tuple(sorted(numbers))
