"""What autograd keeps, operation by operation: a tape of sizes.

A forward pass is written down as operations on tensors that are only numbers of bytes. The tape then knows what is
kept for backward, and the highest point of the backward pass: gradients appear, meet, and are freed in the order in
which autograd does it. This is how a layer's activations are computed (`planning.block`), by the rules of torch:
a product keeps its inputs, a sum keeps nothing, a cast keeps nothing, a kernel keeps what its backward formula needs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Value:
    """A tensor: so many numbers of so many bytes."""

    numbers: int
    width: int
    """Bytes of a number."""
    needs_gradient: bool = True
    external: bool = False
    """Held by someone else (weights, the input of a layer): not counted among what is kept."""
    base: Value | None = None
    """The tensor that this one is a view of: keeping the view keeps all of it."""

    @property
    def num_bytes(self) -> int:
        """Size."""
        return self.numbers * self.width


@dataclass(slots=True, eq=False)
class _Operation:
    inputs: tuple[Value, ...]
    output: Value
    keeps: tuple[Value, ...]
    scratch_bytes: int
    """Allocated inside backward, and free when it is over."""
    passes: bool
    """Whether the gradient of the output is handed on as it is (a sum of equal shapes)."""


@dataclass(slots=True, eq=False)
class Tape:
    """One forward pass, written down; what is asked of it is reckoned once, when it is complete."""

    operations: list[_Operation] = field(default_factory=list)
    constants: int = 0
    """Bytes kept that do not belong to a tensor of this tape (cast or merged copies of weights)."""
    cached: int = 0
    """How many of them autocast holds until forward ends, checkpointing or not."""
    result: Value | None = None

    def apply(
        self,
        *inputs: Value,
        numbers: int | None = None,
        width: int | None = None,
        keeps: tuple[Value, ...] = (),
        scratch_bytes: int = 0,
        passes: bool = False,
        view: bool = False,
    ) -> Value:
        """One operation; its output has the size of the first input unless told otherwise."""
        first = inputs[0]
        output = Value(
            first.numbers if numbers is None else numbers,
            first.width if width is None else width,
            any(each.needs_gradient for each in inputs),
            base=(first.base or first) if view else None,
        )
        if output.needs_gradient:
            self.operations.append(_Operation(inputs, output, keeps, scratch_bytes, passes))
        return output

    def keep(self, *values: Value) -> None:
        """Let the last operation keep these, its own output perhaps among them."""
        if self.operations:
            self.operations[-1].keeps = values

    def copy_weights(self, num_bytes: int, *, cached: bool = True) -> None:
        """Keep a copy of weights, which autocast makes once per forward (`cached`) or an operation each time."""
        self.constants += num_bytes
        self.cached += num_bytes if cached else 0

    def cast(self, value: Value, width: int) -> Value:
        """The same numbers in another width; nothing happens if it is the same."""
        return value if value.width == width else self.apply(value, width=width)

    def add(self, one: Value, other: Value) -> Value:
        """Sum of equal shapes, in the wider of both."""
        width = max(one.width, other.width)
        return self.apply(one, other, width=width, passes=one.width == other.width == width)

    @property
    def kept_bytes(self) -> int:
        """What backward needs, without external tensors; each tensor once."""
        return _kept_bytes(self)

    def backward_bytes(self) -> int:
        """The highest point of backward, the gradient of the result included."""
        return _backward_bytes(self)


@functools.lru_cache(maxsize=4096)
def _kept_bytes(tape: Tape) -> int:
    kept = {id(each.base or each): each.base or each for operation in tape.operations for each in operation.keeps}
    return tape.constants + sum(each.num_bytes for each in kept.values() if not each.external)


@functools.lru_cache(maxsize=4096)
def _backward_bytes(tape: Tape) -> int:
    return _Backward(tape).run()


class _Backward:
    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.holders: dict[int, int] = {}
        self.gradients: dict[int, _Gradient] = {}
        for operation in tape.operations:
            for value in (each.base or each for each in operation.keeps):
                self.holders[id(value)] = self.holders.get(id(value), 0) + 1
        self.live = tape.kept_bytes
        self.peak = self.live

    def run(self) -> int:
        result = self.tape.result
        if result is None or not result.needs_gradient:
            return self.live
        self.gradients[id(result)] = _Gradient(result.num_bytes)
        self._grow(result.num_bytes)
        for operation in reversed(self.tape.operations):
            gradient = self.gradients.pop(id(operation.output), None)
            if gradient is not None:
                self._step(operation, gradient)
        return self.peak

    def _step(self, operation: _Operation, gradient: _Gradient) -> None:
        self._grow(operation.scratch_bytes)
        for value in operation.inputs:
            if value.needs_gradient:
                self._hand_on(value, gradient if operation.passes else None)
        self._grow(-operation.scratch_bytes)
        self._release(gradient)
        for value in (each.base or each for each in operation.keeps):
            self.holders[id(value)] -= 1
            if self.holders[id(value)] == 0 and not value.external:
                self._grow(-value.num_bytes)

    def _hand_on(self, value: Value, shared: _Gradient | None) -> None:
        known = self.gradients.get(id(value))
        if known is None:
            if shared is not None:
                shared.holders += 1
                self.gradients[id(value)] = shared
                return
            self.gradients[id(value)] = _Gradient(value.num_bytes)
            self._grow(value.num_bytes)
            return
        if shared is None:
            # a second gradient is there for a moment, then added to the first
            self._grow(value.num_bytes)
            self._grow(-value.num_bytes)
        if known.holders > 1:
            known.holders -= 1
            self.gradients[id(value)] = _Gradient(value.num_bytes)
            self._grow(value.num_bytes)

    def _release(self, gradient: _Gradient) -> None:
        gradient.holders -= 1
        if gradient.holders == 0:
            self._grow(-gradient.num_bytes)

    def _grow(self, num_bytes: int) -> None:
        self.live += num_bytes
        self.peak = max(self.peak, self.live)


@dataclass(slots=True)
class _Gradient:
    num_bytes: int
    holders: int = 1
