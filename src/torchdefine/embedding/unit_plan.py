"""Widths and groups of every layer of a DeFINE unit: pure arithmetic, and the one place where its rules live.

The paper's symbols have one name each: n ``map_dim``, k ``expand_dim``, m ``embedding_dim``, N ``depth``,
g_max ``max_groups``. In every scheme the N-th layer is the reduce layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from torchdefine.config import MOST_DEEP, MOST_WIDE, Config, rate, setting
from torchdefine.errors import UserError, check_count
from torchdefine.spelling import did_you_mean

PlanName = Literal["wide", "published", "published-8", "published-equation", "published-hgt"]
GroupScheme = Literal["halving", "cycle", "fixed", "dense"]
Skip = Literal["mix", "concat", "residual", "none"]
Rounding = Literal["nearest", "down"]
Norm = Literal["none", "layer", "group"]
Activation = Literal["gelu", "relu", "silu", "tanh", "none"]

LARGEST_DEFAULT_GROUPS = 16
MOST_MAP_DIM = 128
"""The paper's n for vectors 512 wide. A map that is not much narrower than the vectors saves nothing."""
MOST_EXPAND_DIM = 1024
"""The paper's k, at four times the width in its smallest model; its larger ones keep it."""

AS_PUBLISHED = {"groups": "cycle", "reach_expand_dim": False, "rounding": "down", "norm": "layer"}
PLANS: dict[str, dict[str, Any]] = {
    "wide": {"groups": "halving", "reach_expand_dim": True, "rounding": "nearest", "norm": "none"},
    "published": {**AS_PUBLISHED, "max_groups": 16},
    "published-8": {**AS_PUBLISHED, "max_groups": 8},
    "published-equation": {**AS_PUBLISHED, "max_groups": 32, "groups": "halving"},
    "published-hgt": {**AS_PUBLISHED, "max_groups": 4, "reach_expand_dim": True},
}
"""How widths and groups follow from the sizes: ours, and those that have the paper's parameter counts.

The paper's tables follow no single rule. ``published`` is that of its LSTMs (table 1a), and of its Transformer-XL and
translation models, whose three layers have the same groups by any of these rules; ``published-8`` that of its study of
depth and width; ``published-equation`` and ``published-hgt`` those of DeFINE and HGT in its ablations.
"""

VARIANTS: dict[str, dict[str, Any]] = {
    "define": {},
    "define-no-mixer": {"skip": "concat"},
    "define-residual": {"skip": "residual"},
    "define-no-reduce": {"reduce": False},
    "hgt": {"skip": "none"},
    "glt": {"groups": "fixed", "skip": "none"},
    "glt-shuffle": {"groups": "fixed", "skip": "none", "shuffle": True},
    "linear": {"groups": "dense", "skip": "none"},
}
"""The rows of the paper's ablations by name: what each changes of the DeFINE unit."""


@dataclass(frozen=True)
class UnitConfig(Config):
    """A DeFINE unit, or the variant of it named by ``kind``: ``UnitConfig.of("hgt", norm="layer")``."""

    kind: str = "define"
    embedding_dim: int | None = setting(
        None, "Width of the output vectors, the paper's m; by default that of the map.", at_least=1, at_most=MOST_WIDE
    )
    expand_dim: int = setting(1024, "Width of the widest layer, the paper's k.", at_least=1, at_most=MOST_WIDE)
    depth: int = setting(
        3, "Number of layers, the paper's N. It includes the reduce layer.", at_least=1, at_most=MOST_DEEP
    )
    plan: PlanName = setting(
        "wide",
        "Decides the groups, widths and norm that are not set. wide: reaches expand_dim, has no norm. The others have "
        "the paper's parameter counts. published: table 1a, Transformer-XL and translation. published-8: the study of "
        "depth and width. published-equation and published-hgt: DeFINE and HGT in the ablations.",
    )
    max_groups: int | None = setting(
        None,
        "Largest number of groups in a layer, g_max. By default the plan decides; wide has 2^(depth - 1), at most 16.",
        at_least=1,
        at_most=MOST_DEEP,
    )
    groups: GroupScheme | None = setting(
        None,
        "Number of groups in layer l. By default the plan decides. halving: max(g_max / 2^(l - 1), 1), the paper's "
        "equation. cycle: 1, 2, 4 … g_max, counted back from the reduce layer and repeated, as the published counts "
        "need it. fixed: g_max in every layer. dense: 1.",
    )
    skip: Skip = setting(
        "mix",
        "Skip connection from the unit's input to the layers after the first. mix: group i reads chunk i of the input "
        "and of the previous output. concat: input and previous output are concatenated. residual: instead, each "
        "layer adds the previous output. none: no skip connection.",
    )
    reach_expand_dim: bool | None = setting(
        None, "Whether the last expansion layer is expand_dim wide. By default the plan decides."
    )
    rounding: Rounding | None = setting(
        None, "How widths between map_dim and expand_dim are rounded. By default the plan decides."
    )
    multiple_of: int | None = setting(
        None,
        "Round widths to a multiple of this; by default of the largest number of groups.",
        at_least=1,
        at_most=MOST_WIDE,
    )
    reduce: bool = setting(True, "Whether the last layer reduces to embedding_dim; otherwise it expands too.")
    fixed_width: int | None = setting(
        None,
        "Give all expansion layers this width. By default they grow; with skip residual they are expand_dim / 2 wide.",
        at_least=1,
        at_most=MOST_WIDE,
    )
    shuffle: bool = setting(False, "Shuffle the outputs of every expansion layer across groups (GLT + shuffle).")
    norm: Norm | None = setting(
        None,
        "Affine norm of the expansion layers, over all features or within each group. By default the plan decides.",
    )
    activation: Activation = setting("gelu", "Activation of the expansion layers.")
    output_norm: bool = setting(False, "Whether an affine layer norm follows the last layer, as in DeLighT.")
    dropout: float = rate("Dropout rate after every expansion layer.")
    bias: bool = setting(True, "Whether the expansion layers have biases; the reduce layer has none.")
    weight_scaling: bool = setting(
        False,
        "Weight scaling: weights are divided by the square root of their fan-in when used (equalised learning rate).",
    )

    @classmethod
    def of(cls, unit: UnitConfig | str = "define", **changes: Any) -> UnitConfig:
        """A variant by name, or other settings, with changes: ``of("glt", norm="layer")``; None changes nothing."""
        if not isinstance(unit, UnitConfig | str):
            raise TypeError(f"A unit is a UnitConfig or the name of a variant, not {unit!r}.")
        if unit == "projection":
            raise UserError("The projection is not a variant of the unit: use depth=1, which is one projection.")
        if isinstance(unit, str) and unit not in VARIANTS:
            raise UserError(f"The variant {unit!r} is unknown{did_you_mean(unit, VARIANTS)}")
        known = {f.name for f in fields(cls)}
        for name in changes:
            if name not in known:
                raise UserError(f"A unit has no setting {name!r}{did_you_mean(name, known)}")
        changes = {name: value for name, value in changes.items() if value is not None}
        return cls(**{"kind": unit, **VARIANTS[unit], **changes}) if isinstance(unit, str) else replace(unit, **changes)

    def planned(self) -> UnitConfig:
        """The same with what the plan decides, where it was left open."""
        rules = PLANS[self.plan]
        return replace(self, **{name: value for name, value in rules.items() if getattr(self, name) is None})


@dataclass(frozen=True)
class PlannedLayer:
    """One group-linear layer: what enters it (the skip connection included), what leaves it, in how many groups."""

    input_width: int
    output_width: int
    groups: int
    skipped_width: int  # how much of ``input_width`` is the unit's own input, the skip connection

    @property
    def weights(self) -> int:
        return self.input_width * self.output_width // self.groups


@dataclass(frozen=True)
class Plan:
    """The layers of a unit, first to last; the last one reduces unless the rules say otherwise."""

    map_dim: int
    embedding_dim: int
    config: UnitConfig
    layers: tuple[PlannedLayer, ...]

    @property
    def depth(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[PlannedLayer]:
        return iter(self.layers)

    def role(self, index: int) -> str:
        return "reduce" if self.config.reduce and index == self.depth - 1 else "expand"

    def __str__(self) -> str:
        rows = [("layer", "step", "input", "skip", "output", "groups", "weights")]
        for index, layer in enumerate(self):
            skipped = f"{layer.skipped_width:,}" if layer.skipped_width else "–"
            widths = f"{layer.input_width:,}", skipped, f"{layer.output_width:,}"
            rows.append((str(index + 1), self.role(index), *widths, str(layer.groups), f"{layer.weights:,}"))
        columns = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, columns, strict=True)) for row in rows)


def make_plan(map_dim: int, config: UnitConfig | None = None) -> Plan:
    """Plan a unit that takes vectors of ``map_dim`` to those of ``config.embedding_dim``, ``map_dim`` by default."""
    config = (config or UnitConfig()).planned()
    embedding_dim = config.embedding_dim or map_dim
    _check_sizes(map_dim, embedding_dim, config)
    groups = layer_groups(config)
    outputs = _output_widths(map_dim, embedding_dim, config, config.multiple_of or max(groups))
    skips = [0, *[map_dim if config.skip in ("mix", "concat") else 0] * (config.depth - 1)]
    layers = tuple(
        PlannedLayer(previous + skip, output, layer_groups, skip)
        for previous, output, layer_groups, skip in zip([map_dim, *outputs[:-1]], outputs, groups, skips, strict=True)
    )
    plan = Plan(map_dim, embedding_dim, config, layers)
    _check_divisibility(plan)
    return plan


def default_map_dim(embedding_dim: int) -> int:
    """The width of a table that nobody chose: a quarter of the vectors', at most 128; a multiple of 16."""
    check_count("embedding_dim", embedding_dim)
    quarter = -(-embedding_dim // (4 * LARGEST_DEFAULT_GROUPS)) * LARGEST_DEFAULT_GROUPS
    return min(quarter, MOST_MAP_DIM)


def default_expand_dim(map_dim: int, embedding_dim: int, config: UnitConfig) -> int:
    """The width of a unit that nobody chose: four times the vectors', at most 1024, at least ``map_dim``.

    A multiple of 32. A unit that does not reduce gives vectors as wide as its last layer, so their width decides.
    """
    check_count("map_dim", map_dim)
    if not config.reduce:
        return 2 * embedding_dim if config.skip == "residual" else embedding_dim
    multiple = 2 * LARGEST_DEFAULT_GROUPS  # half of it, as in residual layers, still divides into equal groups
    wanted = min(4 * embedding_dim, MOST_EXPAND_DIM) // multiple * multiple
    return max(wanted, -(-map_dim // multiple) * multiple)


def default_max_groups(depth: int) -> int:
    """The g_max of a unit that leaves it open."""
    return min(2 ** (depth - 1), LARGEST_DEFAULT_GROUPS)


def layer_groups(config: UnitConfig) -> list[int]:
    """The number of groups of every layer of a unit, whose plan is worked out."""
    depth = config.depth
    # By default the power of two that lets the halving end at 1 in the reduce layer, within bounds.
    max_groups = config.max_groups or default_max_groups(depth)
    if config.groups == "dense":
        return [1] * depth
    if config.groups == "fixed":
        return [max_groups] * depth
    if config.groups == "halving":
        return [max(max_groups >> level, 1) for level in range(depth)]
    powers = max_groups.bit_length()  # how many steps 1, 2, 4 … max_groups are, before the cycle starts again
    return [2 ** (step % powers) for step in range(depth)][::-1]


def _output_widths(map_dim: int, embedding_dim: int, config: UnitConfig, multiple: int) -> list[int]:
    expanding = config.depth - 1 if config.reduce else config.depth
    last = [embedding_dim] if config.reduce else []
    if (fixed := _fixed_width(config)) is not None:
        return [fixed] * expanding + last
    # The line from n to k has one point more than there are expansion layers; either its first or its last is left out.
    first, steps = (1, expanding) if config.reach_expand_dim else (0, expanding)
    if not config.reduce and not config.reach_expand_dim:
        steps -= 1  # with nothing to give way to, the published convention keeps both ends
    divisor = 2 * steps * multiple
    half = 0 if config.rounding == "down" else steps * multiple
    widths = []
    for point in range(first, first + expanding):
        exact = map_dim * steps + (config.expand_dim - map_dim) * point  # times ``steps``, as whole numbers are exact
        widths.append(config.expand_dim if point == steps else (2 * exact + half) // divisor * multiple)
    return widths + last


def _fixed_width(config: UnitConfig) -> int | None:
    return config.fixed_width or (config.expand_dim // 2 if config.skip == "residual" else None)


def _check_sizes(map_dim: int, embedding_dim: int, config: UnitConfig) -> None:
    check_count("map_dim", map_dim)
    fixed = _fixed_width(config)
    if config.expand_dim < map_dim and fixed is None:
        raise UserError(f"expand_dim {config.expand_dim} is smaller than map_dim {map_dim}: use {map_dim} or more.")
    width = fixed or config.expand_dim
    if not config.reduce and embedding_dim != width:
        problem = f"Without the reduce layer the vectors are {width} wide, not embedding_dim {embedding_dim}"
        raise UserError(f"{problem}: use embedding_dim={width}.")
    max_groups = config.max_groups or 1
    if config.groups == "cycle" and max_groups & (max_groups - 1):
        lower = 1 << (max_groups.bit_length() - 1)
        raise UserError(f"max_groups {max_groups} must be a power of two for groups cycle: use {lower} or {2 * lower}.")


def _check_divisibility(plan: Plan) -> None:
    """Every group must get an equal part of its layer's input and output, and under mix of the skipped input."""
    for index, layer in enumerate(plan):
        widths = [(_width_name(plan, index), layer.output_width)]
        if index and plan.config.skip == "concat":
            widths.insert(0, ("the input", layer.input_width))
        elif index:
            widths.insert(0, (_width_name(plan, index - 1), plan.layers[index - 1].output_width))
        if index == 0 or plan.config.skip == "mix":
            widths.insert(0, ("map_dim", plan.map_dim))
        for name, width in widths:
            if width % layer.groups:
                lower = width // layer.groups * layer.groups
                options = f"{lower} or {lower + layer.groups}" if lower else f"{layer.groups}"
                problem = f"{name} {width} is not divisible by the {layer.groups} groups of layer {index + 1}"
                raise UserError(f"{problem}: use {options}, or a smaller max_groups.")


def _width_name(plan: Plan, index: int) -> str:
    width = plan.layers[index].output_width
    if plan.role(index) == "reduce":
        return "embedding_dim"
    if _fixed_width(plan.config) is not None:
        return "fixed_width"
    return "expand_dim" if width == plan.config.expand_dim else f"the width of layer {index + 1}"
