"""Which of a quantiser's decisions still decide the value in the optimised program.

XLA may delete rounding: a cast to FP4 and back is to XLA:GPU a cast that costs precision for
nothing. So the program is taken twice, as JAX wrote it and as the target's compiler left it. In
each, from the value that a site hands on (scope "quantize[<site>]/value"), everything it is
computed from is searched for *decisions* of that site:

    comparison of two computed floats      |x| > 0.25 * step: one for each rounding threshold, and
                                           those that correct the block scale
    conversion to a type of 8 or 4 bits    x.astype(float4_e2m1fn)
    conversion to BF16, reduce-precision   the source of the weights; the value in its dtype
    floor, ceil, round                     integer formats
    a kernel                               all of the above in one; compilers do not look into it

Comparisons with a literal (x < 0) decide no rounding and may be simplified away, so they do not
count. A decision that is written and no longer found behind *every* copy of the site's value was
deleted. A comparison that lives on for a metric alone is not behind the value, so does not count.
"""

import collections
import dataclasses
import re

from trace_jax.aot.hlo import LAYOUT, Graph, Instruction, Node

_SITE = re.compile(r"quantize\[([^\]/]+)\]")
_SEGMENT = re.compile(r"layers\[\d+:\d+\]")
_FLOATS = frozenset({"f64", "f32", "bf16", "f16"})
_HALVES = frozenset({"bf16", "f16"})
_NARROW = re.compile(r"(f8|f4|f6|s8|u8|s4|u4|s2|u2)")
_ROUND = frozenset({"floor", "ceil", "round-nearest-even", "round-nearest-afz"})
_MOVES = LAYOUT | {"fusion", "call", "parameter", "slice", "dynamic-slice", "pad", "concatenate"}
_STRICT = {"GT": ">", "LT": ">", "GE": ">=", "LE": ">=", "EQ": "=", "NE": "="}

Site = tuple[str, str]  # (segment such as "layers[0:2]", site such as "expert_in")
Decisions = collections.Counter[str]  # what is decided, in words -> how many different ones


@dataclasses.dataclass(frozen=True, kw_only=True)
class Survival:
    """One site: what was written, and what is left of it."""

    site: Site
    written: Decisions
    alive: Decisions  # at most what was written
    copies: int  # of the site's value in the optimised program

    @property
    def kept(self) -> bool:
        """All of it is there, and there was something."""
        return self.written.total() > 0 and self.alive == self.written

    @property
    def verdict(self) -> str:
        """In words."""
        if not self.written:
            return "NOT MARKED"
        if self.kept:
            return "kept"
        return "DELETED" if not self.alive else "PARTLY DELETED"

    @property
    def missing(self) -> Decisions:
        """What is gone."""
        return self.written - self.alive


def survival(written: str, optimised: str, sites: list[Site]) -> list[Survival]:
    """Compares two forms of a program site by site.

    Args:    written, optimised: HLO text with metadata. sites: those that must be there. One that
             the written program does not have counts as not kept.
    """
    before, after = decisions(written), decisions(optimised)
    found = []
    for site in sites:
        # of the written copies (there is one, unless JAX recomputes) the most; of the optimised
        # ones the least: each has to be quantised in full
        wanted: Decisions = collections.Counter()
        for copy in before.get(site, []):
            wanted |= copy
        alive = wanted.copy() if after.get(site) else collections.Counter()
        for copy in after.get(site, []):
            alive &= copy
        copies = len(after.get(site, []))
        found.append(Survival(site=site, written=wanted, alive=alive, copies=copies))
    return found


def decisions(text: str) -> dict[Site, list[Decisions]]:
    """For each site the decisions behind each copy of its value."""
    graph = Graph(text)
    values: dict[Site, list[Node]] = {}
    for instruction in graph.instructions():
        computes = instruction.dtype in _FLOATS and instruction.opcode not in LAYOUT
        computes = computes or instruction.opcode == "custom-call"  # a kernel; it gives a tuple
        if not computes or instruction.opcode in ("fusion", "parameter", "constant"):
            continue
        for node in graph.places(instruction):
            scope = _scope(node)
            if "/value/" in scope and (site := _site(scope)):
                values.setdefault(site, []).append(node)
    found = {}
    for site, nodes in values.items():
        behind = {node: graph.behind(node) for node in nodes}
        last = [n for n in nodes if not any(n in behind[m] for m in nodes if m != n)]
        found[site] = [_decided(graph, site, node, behind[node]) for node in last]
    return found


def _scope(node: Node) -> str:
    """Named scopes of a node. A function that JAX calls by name does not repeat its caller's."""
    names = [i.op_name for i in node.path if i.opcode == "call"] + [node.instruction.op_name]
    return "/".join(names)


def _site(scope: str) -> Site | None:
    sites, segments = _SITE.findall(scope), _SEGMENT.findall(scope)
    return (segments[-1] if segments else "", sites[-1]) if sites else None


def _decided(graph: Graph, site: Site, value: Node, behind: set[Node]) -> Decisions:
    """The site's decisions among what is behind one copy of its value.

    Work that two segments share (weights of neighbouring layers are rounded to BF16 at once) bears
    the name of one. It counts for both, if it is reached without leaving the site.
    """
    different: dict[str, set[int]] = collections.defaultdict(set)
    identity = _Identity(graph, site)
    shared = _within(graph, site[1], value)
    for node in behind:
        named = _site(_scope(node))
        ours = named == site or (named is not None and named[1] == site[1] and node in shared)
        if ours and (what := _decision(graph, node)) is not None:
            different[what].add(identity(node))
    return collections.Counter({what: len(ids) for what, ids in different.items()})


def _within(graph: Graph, name: str, value: Node) -> set[Node]:
    """What is behind a value without leaving the sites of this name."""
    seen, todo = {value}, [value]
    while todo:
        node = todo.pop()
        named = _site(_scope(node))
        inside = named is not None and named[1] == name
        if inside or node.instruction.opcode in _MOVES or not node.instruction.op_name:
            new = [source for source in graph.sources(node) if source not in seen]
            seen.update(new)
            todo += new
    return seen


def _decision(graph: Graph, node: Node) -> str | None:
    """What an instruction decides, in words that both forms of a program share."""
    instruction = node.instruction
    opcode, attributes = instruction.opcode, instruction.attributes
    if opcode == "reduce-precision":
        bits = re.findall(r"(?:exponent|mantissa)_bits=(\d+)", attributes)
        return None if bits[1] == "23" else f"to {bits[0]} exponent and {bits[1]} mantissa bits"
    if opcode in _ROUND:
        return opcode
    if opcode == "custom-call":
        kernel = re.search(r'custom_call_target="[^"]*(triton|mosaic|tpu)[^"]*"', attributes)
        return f"kernel of {kernel[1]}" if kernel else None
    if opcode == "convert" and _NARROW.match(instruction.dtype):
        source = graph.sources(node)[0].instruction
        return f"to {instruction.dtype}" if source.dtype in _FLOATS else None
    if opcode == "convert" and instruction.dtype in _HALVES:
        source = graph.sources(node)[0].instruction
        rounded = source.opcode == "reduce-precision"  # then the cast decides nothing
        return f"to {instruction.dtype}" if source.dtype == "f32" and not rounded else None
    if opcode == "compare":
        sides = [graph.through_layout(source) for source in graph.sources(node)]
        if any(side.instruction.opcode == "constant" for side in sides):
            return None
        if any(side.instruction.dtype not in _FLOATS for side in sides):
            return None
        direction = re.search(r"direction=(\w+)", attributes)
        assert direction, instruction
        factors = sorted(f for side in sides for f in _factors(graph, side))
        threshold = " ".join(factors) or "computed"
        return f"x {_STRICT[direction[1]]} {threshold}"
    return None


def _factors(graph: Graph, node: Node) -> list[str]:
    """Literal factors of a product, other than 1, which compilers take out."""
    if node.instruction.opcode != "multiply":
        return []
    factors = []
    for source in graph.sources(node):
        source = graph.through_layout(source)
        if source.instruction.opcode == "constant" and source.instruction.inside != "1":
            factors.append(source.instruction.inside)
    return factors


class _Identity:
    """Tells equal computations from different ones, wherever the compiler put copies of them.

    Equal: the same operations on the same operands down to where the site begins, and there the
    same operation by JAX's name for it.
    """

    def __init__(self, graph: Graph, site: Site):
        self.graph, self.site = graph, site
        self.known: dict[Node, int] = {}

    def __call__(self, start: Node) -> int:
        todo = [start]
        while todo:  # no recursion: such chains are long
            node = todo[-1]
            if node in self.known:
                todo.pop()
                continue
            sources = self.graph.sources(node) if self._inside(node) else []
            unknown = [s for s in sources if s not in self.known]
            if unknown:
                todo += unknown
                continue
            todo.pop()
            self.known[node] = self._of(node.instruction, [self.known[s] for s in sources])
        return self.known[start]

    def _inside(self, node: Node) -> bool:
        name = node.instruction.op_name
        passes = node.instruction.opcode in _MOVES
        return passes or not name or _site(_scope(node)) == self.site

    def _of(self, instruction: Instruction, sources: list[int]) -> int:
        opcode = instruction.opcode
        if opcode == "constant":
            return hash((opcode, instruction.inside))
        if len(sources) == 1 and opcode in _MOVES and opcode != "slice":
            return sources[0]
        if sources:
            kind = re.search(r"(?:direction=\w+|slice=\{\S*\})", instruction.attributes)
            return hash((opcode, kind[0] if kind else "", *sources))
        if opcode in ("get-tuple-element", "parameter"):  # of what a loop hands in
            index = re.search(r"index=\d+", instruction.attributes)
            return hash((opcode, instruction.computation, index and index[0], instruction.inside))
        if instruction.op_name:
            return hash((opcode, instruction.dtype, instruction.op_name))
        return hash((opcode, instruction.computation, instruction.name))
