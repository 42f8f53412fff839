"""HLO text as a graph that looks through fusions and calls; nothing here knows about FP4.

A `Node` is an instruction together with the fusions and calls that lead to its computation, so that
a computation used twice is two places. `Graph.sources` gives what a node is computed from. Loops
are not entered: what a loop body is handed is a leaf.
"""

import dataclasses
import functools
import re

# These move, repeat or wrap values and compute nothing.
LAYOUT = frozenset(
    {"bitcast", "broadcast", "copy", "copy-done", "copy-start", "get-tuple-element"}
    | {"opt-barrier", "optimization-barrier", "reshape", "transpose", "tuple"}
)
_WRAPPERS = frozenset({"fusion", "call"})
_LOOPS = frozenset({"while", "conditional"})
_HEAD = re.compile(r"^\s*(ROOT )?%?([^\s=]+) = ")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([^\s(]+) .*\{$|^(ENTRY )?%?([^\s(]+) \{$")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_BODY = re.compile(r"body=%?([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_INDEX = re.compile(r"index=(\d+)")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Instruction:
    """One line of HLO."""

    computation: str
    name: str
    type: str  # "f32[8,16]{1,0}", or a tuple
    opcode: str
    inside: str  # between the parentheses: operands, a literal, a parameter's number
    attributes: str
    root: bool

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands, in order."""
        if self.opcode in ("constant", "parameter", "iota"):
            return ()
        return tuple(re.findall(r"%([^\s,()]+)", self.inside))

    @functools.cached_property
    def op_name(self) -> str:
        """The scopes and the primitive of JAX that it comes from."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""

    @property
    def dtype(self) -> str:
        """The element type, "" for a tuple."""
        return "" if self.type.startswith("(") else self.type.partition("[")[0]


@dataclasses.dataclass(frozen=True)
class Node:
    """An instruction at one place: `path` has the fusions and calls around it, outermost first."""

    instruction: Instruction
    path: tuple[Instruction, ...] = ()


class Graph:
    """A whole module, or several."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.roots: dict[str, Instruction] = {}
        for instruction in _parse(text):
            self.computations.setdefault(instruction.computation, {})[instruction.name] = (
                instruction
            )
            if instruction.root:
                self.roots[instruction.computation] = instruction
        self._callers: dict[str, list[Instruction]] = {}
        self._loops: dict[str, Instruction] = {}  # by their bodies
        self._applied: set[str] = set()  # computations of two scalars
        for instruction in self.instructions():
            if instruction.opcode == "while" and (body := _BODY.search(instruction.attributes)):
                self._loops[body[1]] = instruction
            callee = self._callee(instruction)
            if callee is not None:
                self._callers.setdefault(callee, []).append(instruction)
            elif applied := _CALLED.search(instruction.attributes):
                self._applied.add(applied[1])

    def instructions(self) -> list[Instruction]:
        """All of them."""
        return [i for computation in self.computations.values() for i in computation.values()]

    def places(self, instruction: Instruction) -> list[Node]:
        """Every place where an instruction stands; none for how a reduction adds two numbers."""
        if instruction.computation in self._applied:
            return []
        return [Node(instruction, path) for path in self._paths(instruction.computation)]

    def sources(self, node: Node) -> list[Node]:
        """What a node is computed from; nothing for constants and what a loop changes."""
        instruction, path = node.instruction, node.path
        if instruction.opcode == "parameter":
            if not path:
                return []
            caller = path[-1]
            return [self._operand(caller, int(instruction.inside), path[:-1])]
        if instruction.opcode in _LOOPS:
            return []
        if instruction.opcode == "get-tuple-element":
            return self._element(node)
        callee = self._callee(instruction)
        if callee is not None:
            return [Node(self.roots[callee], (*path, instruction))]
        return self._operands(node)

    def through_layout(self, node: Node) -> Node:
        """The node that computes the value, behind broadcasts, reshapes, copies, fusions."""
        while True:
            instruction = node.instruction
            passes = instruction.opcode in LAYOUT | _WRAPPERS | {"parameter"}
            sources = self.sources(node) if passes else []
            # after layouts are assigned, `bitcast` also stands for a change of type
            kept = {node.instruction.dtype, ""} if instruction.opcode == "bitcast" else None
            if len(sources) != 1 or (kept and sources[0].instruction.dtype not in kept):
                return node
            node = sources[0]

    def behind(self, node: Node) -> set[Node]:
        """Everything a node is computed from, itself included."""
        seen, todo = {node}, [node]
        while todo:
            for source in self.sources(todo.pop()):
                if source not in seen:
                    seen.add(source)
                    todo.append(source)
        return seen

    def _element(self, node: Node) -> list[Node]:
        """A tuple's element, if the tuple is made in sight."""
        found = _INDEX.search(node.instruction.attributes)
        assert found, node.instruction
        index, todo, elements = int(found[1]), self._operands(node), []
        while todo:  # a tuple may be handed through fusions and loops
            holder = todo.pop()
            instruction = holder.instruction
            if instruction.opcode == "tuple":
                elements.append(self._operand(instruction, index, holder.path))
            elif instruction.opcode == "while":
                todo += self._operands(holder) if self._passes(instruction, index) else []
            elif instruction.opcode == "parameter" and not holder.path:
                loop = self._loops.get(instruction.computation)
                if loop is not None and self._passes(loop, index):
                    todo += [source for at in self.places(loop) for source in self._operands(at)]
            elif instruction.opcode in _WRAPPERS | {"parameter", "opt-barrier"}:
                todo += self.sources(holder)
            elif instruction.opcode not in _LOOPS:
                elements.append(holder)
        return elements

    def _passes(self, loop: Instruction, index: int) -> bool:
        """Whether a loop hands an element of its state on as it is."""
        body = _BODY.search(loop.attributes)
        root = self.roots[body[1]] if body else None
        if root is None or root.opcode != "tuple":
            return False
        last = self._operand(root, index, ()).instruction
        found = _INDEX.search(last.attributes) if last.opcode == "get-tuple-element" else None
        if found is None or int(found[1]) != index:
            return False
        return self._operand(last, 0, ()).instruction.opcode == "parameter"

    def _operands(self, node: Node) -> list[Node]:
        instruction = node.instruction
        return [self._operand(instruction, i, node.path) for i in range(len(instruction.operands))]

    def _operand(self, instruction: Instruction, i: int, path: tuple[Instruction, ...]) -> Node:
        return Node(self.computations[instruction.computation][instruction.operands[i]], path)

    def _callee(self, instruction: Instruction) -> str | None:
        """The computation that a fusion or call stands for."""
        if instruction.opcode not in _WRAPPERS:
            return None
        found = _CALLED.search(instruction.attributes)
        return found[1] if found and found[1] in self.roots else None

    def _paths(self, computation: str) -> list[tuple[Instruction, ...]]:
        callers = self._callers.get(computation, [])
        if not callers:
            return [()]
        return [(*p, caller) for caller in callers for p in self._paths(caller.computation)]


def _parse(text: str) -> list[Instruction]:
    """Instructions of HLO text; a literal may run over several lines."""
    statements: list[tuple[str, str]] = []
    computation = ""
    for line in text.splitlines():
        if _HEAD.match(line):
            statements.append((computation, line))
        elif line.endswith("{") and not line.startswith(" ") and (m := _COMPUTATION.match(line)):
            computation = m[2] or m[4]
        elif line.startswith("}"):
            computation = ""
        elif computation and statements:
            statements[-1] = (statements[-1][0], f"{statements[-1][1]} {line.strip()}")
    return [_instruction(where, line) for where, line in statements]


def _instruction(computation: str, line: str) -> Instruction:
    head = _HEAD.match(line)
    assert head, line
    rest = re.sub(r"/\*.*?\*/", "", line[head.end() :])
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    type_, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    return Instruction(
        computation=computation,
        name=head[2],
        type=type_,
        opcode=rest[:opening],
        inside=rest[opening + 1 : closing],
        attributes=rest[closing + 1 :],
        root=head[1] is not None,
    )


def _closing(text: str, opening: int) -> int:
    """Where the parenthesis opened at `opening` closes."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    raise ValueError(f"unbalanced parentheses in HLO: {text[:200]}")
