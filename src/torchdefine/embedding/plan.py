"""Widths and groups of every layer of a DeFINE unit: pure arithmetic, and the one place where its rules live.

The paper's symbols have one name each: n ``map_dim``, k ``expand_dim``, m ``embedding_dim``, N ``depth``,
g_max ``max_groups``. In every scheme the N-th layer is the reduce layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from torchdefine.errors import UserError

GroupScheme = Literal["halving", "cycle", "fixed", "dense"]
Skip = Literal["mix", "concat", "residual", "none"]
Rounding = Literal["nearest", "down"]

LARGEST_DEFAULT_GROUPS = 16


@dataclass(frozen=True)
class PlanRules:
    """How widths and groups follow from the sizes. The defaults are the library's own."""

    groups: GroupScheme = "halving"
    """halving: max(g_max / 2^(l-1), 1), the paper's equation; cycle: 1, 2, 4 … g_max counted back from the reduce
    layer, then again, which the published parameter counts need; fixed: g_max everywhere (GLT); dense: 1 (linear)."""
    skip: Skip = "mix"
    """What a layer after the first sees beside the previous output: mix puts chunk i of the input beside chunk i of the
    output in every group; concat places the whole input before the whole output; residual adds the previous
    output to the new one; none is a plain stack."""
    reach_expand_dim: bool = True
    """Whether the last expansion layer is k wide. The published counts need False: the line from n to k then
    starts at n itself and its last point, k, gives way to the reduce layer."""
    rounding: Rounding = "nearest"
    multiple_of: int | None = None
    """Widths between n and k are rounded to a multiple of this; the largest number of groups by default."""
    reduce: bool = True
    """Without it the N-th layer expands too, and the finished vector is k wide."""
    fixed_width: int | None = None
    """Every expansion layer has this width instead of growing; k / 2 by default with residual connections."""

    def __post_init__(self) -> None:
        for name, kinds in (("groups", GroupScheme), ("skip", Skip), ("rounding", Rounding)):
            value = getattr(self, name)
            if value not in get_args(kinds):
                raise UserError(f"{name} {value!r} is unknown: use one of {', '.join(get_args(kinds))}.")


@dataclass(frozen=True)
class PlannedLayer:
    """One group-linear layer: what enters it (the skipped input included), what leaves it, in how many groups."""

    input_width: int
    output_width: int
    groups: int
    skipped_width: int
    """How much of ``input_width`` is the unit's own input, seen again."""

    @property
    def weights(self) -> int:
        return self.input_width * self.output_width // self.groups


@dataclass(frozen=True)
class Plan:
    """The layers of a unit, first to last; the last one reduces unless the rules say otherwise."""

    map_dim: int
    expand_dim: int
    embedding_dim: int
    max_groups: int
    rules: PlanRules
    layers: tuple[PlannedLayer, ...]

    @property
    def depth(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[PlannedLayer]:
        return iter(self.layers)

    def role(self, index: int) -> str:
        return "reduce" if self.rules.reduce and index == self.depth - 1 else "expand"

    def __str__(self) -> str:
        rows = [("layer", "step", "input", "seen again", "output", "groups", "weights")]
        rows += [
            (
                str(index + 1),
                self.role(index),
                f"{layer.input_width:,}",
                f"{layer.skipped_width:,}" if layer.skipped_width else "–",
                f"{layer.output_width:,}",
                str(layer.groups),
                f"{layer.weights:,}",
            )
            for index, layer in enumerate(self.layers)
        ]
        columns = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, columns, strict=True)) for row in rows)


def default_max_groups(depth: int) -> int:
    """The power of two that lets the halving end at 1 in the reduce layer, within bounds."""
    return min(2 ** (depth - 1), LARGEST_DEFAULT_GROUPS)


def make_plan(
    map_dim: int,
    expand_dim: int,
    embedding_dim: int,
    depth: int,
    max_groups: int | None = None,
    rules: PlanRules | None = None,
) -> Plan:
    """Plan a unit that takes ``map_dim`` values to ``embedding_dim`` through ``depth`` layers.

    ``max_groups`` defaults to the power of two that lets the halving end at 1 in the reduce layer, at most 16.
    """
    rules = rules or PlanRules()
    _check_sizes(map_dim, expand_dim, embedding_dim, depth, max_groups, rules)
    max_groups = default_max_groups(depth) if max_groups is None else max_groups
    groups = _groups(rules.groups, depth, max_groups)
    outputs = _output_widths(map_dim, expand_dim, embedding_dim, depth, rules, rules.multiple_of or max(groups))
    skipped = map_dim if rules.skip in ("mix", "concat") else 0
    layers = tuple(
        PlannedLayer(
            input_width=map_dim if index == 0 else outputs[index - 1] + skipped,
            output_width=outputs[index],
            groups=groups[index],
            skipped_width=skipped if index else 0,
        )
        for index in range(depth)
    )
    plan = Plan(map_dim, expand_dim, embedding_dim, max_groups, rules, layers)
    _check_divisibility(plan)
    return plan


def _groups(scheme: GroupScheme, depth: int, max_groups: int) -> list[int]:
    if scheme == "dense":
        return [1] * depth
    if scheme == "fixed":
        return [max_groups] * depth
    if scheme == "halving":
        return [max(max_groups >> level, 1) for level in range(depth)]
    powers = max_groups.bit_length()  # how many steps 1, 2, 4 … max_groups are, before the cycle starts again
    return [2 ** (step % powers) for step in range(depth)][::-1]


def _output_widths(
    map_dim: int, expand_dim: int, embedding_dim: int, depth: int, rules: PlanRules, multiple: int
) -> list[int]:
    expanding = depth - 1 if rules.reduce else depth
    last = [embedding_dim] if rules.reduce else []
    fixed = _fixed_width(expand_dim, rules)
    if fixed is not None:
        return [fixed] * expanding + last
    # The line from n to k has one point more than there are expansion layers; either its first or its last is left out.
    first, steps = (1, expanding) if rules.reach_expand_dim else (0, expanding)
    if not rules.reduce and not rules.reach_expand_dim:
        steps -= 1  # with nothing to give way to, the published convention keeps both ends
    span = expand_dim - map_dim
    widths = []
    for point in range(first, first + expanding):
        exact_times_steps = map_dim * steps + span * point  # an integer, so no rounding error decides a width
        if point == steps:
            widths.append(expand_dim)
        elif rules.rounding == "down":
            widths.append(exact_times_steps // (steps * multiple) * multiple)
        else:
            widths.append((2 * exact_times_steps + steps * multiple) // (2 * steps * multiple) * multiple)
    return widths + last


def _fixed_width(expand_dim: int, rules: PlanRules) -> int | None:
    return rules.fixed_width or (expand_dim // 2 if rules.skip == "residual" else None)


def _check_sizes(
    map_dim: int, expand_dim: int, embedding_dim: int, depth: int, max_groups: int | None, rules: PlanRules
) -> None:
    sizes = {"map_dim": map_dim, "expand_dim": expand_dim, "embedding_dim": embedding_dim, "depth": depth}
    optional = {
        "max_groups": max_groups,
        "multiple_of": rules.multiple_of,
        "fixed_width": rules.fixed_width,
    }
    sizes.update({name: value for name, value in optional.items() if value is not None})
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be a whole number, not {value!r}.")
        if value < 1:
            example = {"depth": 3, "max_groups": 4}.get(name, 128)
            raise UserError(f"{name} is {value}, but must be at least 1: use {example}, say.")
    fixed = _fixed_width(expand_dim, rules)
    if expand_dim < map_dim and fixed is None:
        raise UserError(
            f"expand_dim {expand_dim} is smaller than map_dim {map_dim}, but the unit expands: use {map_dim} or more."
        )
    finished = fixed or expand_dim
    if not rules.reduce and embedding_dim != finished:
        raise UserError(
            f"Without the reduce layer the vectors are {finished} wide, not embedding_dim {embedding_dim}: "
            f"use embedding_dim={finished}."
        )
    if rules.groups == "cycle" and max_groups is not None and max_groups & (max_groups - 1):
        lower = 1 << (max_groups.bit_length() - 1)
        raise UserError(
            f"max_groups {max_groups} is not a power of two, as the cycle needs: use {lower} or {2 * lower}."
        )


def _check_divisibility(plan: Plan) -> None:
    """Every group must get an equal share of its layer's input and output, and under mix of the skipped input."""
    for index, layer in enumerate(plan.layers):
        where = f"layer {index + 1}"
        if index == 0 or plan.rules.skip == "mix":
            _require_multiple("map_dim", plan.map_dim, layer.groups, where)
        if index and plan.rules.skip == "concat":
            _require_multiple("the input", layer.input_width, layer.groups, where)
        elif index:
            _require_multiple(_width_name(plan, index - 1), plan.layers[index - 1].output_width, layer.groups, where)
        _require_multiple(_width_name(plan, index), layer.output_width, layer.groups, where)


def _width_name(plan: Plan, index: int) -> str:
    width = plan.layers[index].output_width
    if plan.role(index) == "reduce":
        return "embedding_dim"
    if _fixed_width(plan.expand_dim, plan.rules) is not None:
        return "fixed_width"
    return "expand_dim" if width == plan.expand_dim else f"the width of layer {index + 1}"


def _require_multiple(name: str, value: int, groups: int, where: str) -> None:
    if value % groups:
        lower, upper = value // groups * groups, (value // groups + 1) * groups
        options = f"{lower} or {upper}" if lower else f"{upper}"
        raise UserError(
            f"{name} {value} is not divisible by the {groups} groups of {where}: use {options}, or a smaller "
            "max_groups."
        )
