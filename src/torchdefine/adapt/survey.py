"""Which tables a model has, where each of them is used, and why some cannot be replaced."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from torchdefine.adapt.stand_in import SharedStandIn, StandIn
from torchdefine.embedding import DeFINEBag, TokenEmbedding
from torchdefine.errors import UserError
from torchdefine.spelling import closest
from torchdefine.tables import CompactTable

Target = str | re.Pattern[str] | type[nn.Module]
Targets = Target | Sequence[Target] | None

_ALREADY_OURS = (StandIn, SharedStandIn, TokenEmbedding, CompactTable, DeFINEBag)
_PROBED_IDS = 8
_NAME_IT = "name the table by targets=…"


@dataclass(frozen=True)
class Place:
    """One attribute of a module, and the module that it holds."""

    name: str
    parent: nn.Module
    attribute: str
    module: nn.Module

    @classmethod
    def at(cls, model: nn.Module, name: str) -> Place:
        parent, _, attribute = name.rpartition(".")
        return cls(name, model.get_submodule(parent), attribute, model.get_submodule(name))


@dataclass(frozen=True)
class Table:
    """One matrix of vectors with everything that uses it."""

    places: tuple[Place, ...]
    """Where ids are looked up in it; it is named after the first."""
    heads: tuple[Place, ...]
    """Linear layers that share it."""
    problem: str | None
    """Why it cannot be replaced, as the end of a sentence that begins with its name."""

    @property
    def name(self) -> str:
        return self.places[0].name

    @property
    def module(self) -> nn.Embedding | nn.EmbeddingBag:
        assert isinstance(self.places[0].module, nn.Embedding | nn.EmbeddingBag)
        return self.places[0].module

    def described(self) -> str:
        module = self.places[0].module
        weight = getattr(module, "weight", None)
        sizes = tuple(weight.shape) if isinstance(weight, Tensor) else ()
        if isinstance(module, _ALREADY_OURS):
            sizes = (module.num_embeddings, module.embedding_dim)
        facts = [" × ".join(f"{length:,}" for length in sizes) or "no size"]
        facts += [f"also at {place.name}" for place in self.places[1:]]
        facts += [f"tied to {head.name}" for head in self.heads]
        return f"{self.name} ({', '.join(facts)}{f'; {self.problem}' if self.problem else ''})"

    def scales(self, known: Mapping[str, float] | None = None) -> list[float]:
        """What each place multiplies its vectors by: as known by its name, or found by trying."""
        known, scales = known or {}, []
        for place in self.places:
            if isinstance(place.module, nn.EmbeddingBag):
                return [1.0]
            assert isinstance(place.module, nn.Embedding)
            scale = known[place.name] if place.name in known else lookup_scale(place.module)
            if scale is None:
                why = "so it cannot be replaced"
                if place.module.weight.is_meta:
                    why = "and the meta device does not tell what: replace it where the model has its weights"
                kind = type(place.module).__name__
                raise UserError(f"The table {place.name} does more than look rows up ({kind}), {why}.")
            scales.append(scale)
        return scales


def lookup_scale(module: nn.Embedding) -> float | None:
    """The factor by which a table multiplies its rows, found by trying; None if it does anything else to them."""
    if type(module).forward is nn.Embedding.forward:
        return 1.0
    if module.weight.is_meta:
        return None
    rows, device, mode = len(module.weight), module.weight.device, module.training
    ids = torch.arange(min(_PROBED_IDS, rows), device=device) * (rows // min(_PROBED_IDS, rows))
    stored = module.weight.detach()[ids].double()
    stated = getattr(module, "embed_scale", None)  # exact where the module says it itself
    if not stored.any():
        return None if stated is None else float(stated)
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        given = [module.train(training)(ids) for training in (False, True)]  # it may drop some in training
    module.train(mode)
    if not all(isinstance(vectors, Tensor) and vectors.shape == stored.shape for vectors in given):
        return None
    scale = float((given[0].double() * stored).sum() / (stored**2).sum())
    if not all(torch.allclose(vectors.double(), stored * scale, rtol=1e-2, atol=1e-6) for vectors in given):
        return None
    return float(stated) if stated is not None and abs(float(stated) - scale) < 1e-2 * abs(scale) else scale


def survey(model: nn.Module, ties: Mapping[str, str] | None = None) -> list[Table]:
    """All tables of a model, and those that look like one but cannot be replaced.

    Modules that hold the same parameter are one table. ``ties`` names parameters that will be the same though they are
    not yet: {name: name of the one it will be}, as a model that is being loaded knows them.
    """
    ties = ties or {}
    named = dict(model.named_parameters(remove_duplicate=False))
    same: dict[int, int] = {}  # id of a parameter → id of the parameter that takes its place
    for target, source in ties.items():
        while source in ties:
            source = ties[source]
        if target in named and source in named:
            same[id(named[target])] = id(named[source])
    groups: dict[int, list[Place]] = {}
    for place in _table_like(model):
        weight = place.module._parameters.get("weight")
        groups.setdefault(id(place.module) if weight is None else same.get(id(weight), id(weight)), []).append(place)
    return [_table(model, places, same) for places in groups.values()]


def _table_like(model: nn.Module) -> Iterator[Place]:
    """Every place of a module that maps ids to vectors, whether we understand it or not."""
    ours: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if any(f"{name}.".startswith(f"{prefix}.") for prefix in ours):
            continue
        if isinstance(module, _ALREADY_OURS):
            ours.append(name)
            yield Place.at(model, name)
        elif name:
            weight = getattr(module, "weight", None) if "Embedding" in type(module).__name__ else None
            matrix = isinstance(weight, Tensor) and weight.ndim == 2 and not list(module.children())
            if matrix or isinstance(module, nn.Embedding | nn.EmbeddingBag):
                yield Place.at(model, name)


def _table(model: nn.Module, places: list[Place], same: Mapping[int, int]) -> Table:
    """One table, with the output layers that share its parameter; anything else in its memory is a problem."""
    problems = [_problem(place.module) for place in places]
    heads: list[Place] = []
    weight = places[0].module._parameters.get("weight")
    for name, module in [] if weight is None else model.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            if parameter is None or weight is None:
                continue
            shared = same.get(id(parameter), id(parameter)) == same.get(id(weight), id(weight))
            if shared and isinstance(module, nn.Embedding | nn.EmbeddingBag) and key == "weight":
                continue
            if shared and type(module) is nn.Linear and key == "weight":
                heads.append(Place.at(model, name))
                put_on = _put_on(module)
                problems.append(put_on and f"is shared by {name}, which {put_on}")
            elif shared or _overlap(parameter, weight):
                user = f"{name or 'the model'}.{key}"
                problems.append(f"shares its memory with {user} in a way that is not understood")
    users = [*places, *heads]
    if len(users) > 1 and any(isinstance(place.module, nn.EmbeddingBag) for place in places):
        problems.append(f"is an EmbeddingBag's and stands in several places ({', '.join(user.name for user in users)})")
    if heads and any(getattr(place.module, "sparse", False) for place in places):
        problems.append(f"has sparse gradients, but dense ones from {heads[0].name}, which shares it")
    return Table(tuple(places), tuple(heads), next(filter(None, problems), None))


def _problem(module: nn.Module) -> str | None:
    """Why a module cannot be replaced, or None."""
    kind = type(module).__name__
    if isinstance(module, StandIn | SharedStandIn):
        return "was replaced already"
    if isinstance(module, _ALREADY_OURS):
        return f"is a {kind} already"
    if "Parallel" in kind or hasattr(module, "vocab_start_index"):
        return f"is split over several processes ({kind})"
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or hasattr(module, "parametrizations"):
        return f"has no plain weight ({kind})"
    held = type(weight.data).__name__
    if held == "DTensor":
        return "is split over several processes (DTensor)"
    if type(weight.data) is not Tensor or not weight.is_floating_point() or "uant" in type(module).__module__:
        return f"is quantised ({held if type(weight.data) is not Tensor else str(weight.dtype).split('.')[-1]}, {kind})"
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return f"is no nn.Embedding but a {kind}"
    if module.max_norm is not None or module.scale_grad_by_freq:
        return "uses max_norm or scale_grad_by_freq, which a replacement does not have"
    if isinstance(module, nn.EmbeddingBag) and type(module).forward is not nn.EmbeddingBag.forward:
        return f"does more than an EmbeddingBag ({kind})"
    if len(module._parameters) > 1 or list(module.children()):
        return f"has more than a table in it ({kind})"
    return _put_on(module)


def _put_on(module: nn.Module) -> str | None:
    """Hooks or a forward added to a module or its weight, which would be lost with it."""
    weight = module._parameters["weight"]
    on_module = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    on_weight = (getattr(weight, name, None) for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))
    if any(on_module) or any(on_weight):
        return "has hooks, which would be lost"
    return "has a forward that was put on it, which would be lost" if "forward" in vars(module) else None


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors lie in the same memory."""
    if one.is_meta or other.is_meta or type(one.data) is not Tensor or type(other.data) is not Tensor:
        return False
    pointer = one.untyped_storage().data_ptr()
    return pointer != 0 and pointer == other.untyped_storage().data_ptr()


def choose(model: nn.Module, targets: Targets = None) -> list[Table]:
    """The tables of a model that ``targets`` name, each once; refuses a target without a match, and lists the tables.

    Without targets, those that the model names as its input embeddings are meant, or else its only one.
    """
    tables = survey(model)
    listed = "the model has " + ("; ".join(table.described() for table in tables) or "no nn.Embedding")
    if targets is None:
        if not tables:
            raise UserError("The model has no table to replace: no nn.Embedding was found in it.")
        meant = {id(module) for module in _input_embeddings(model)}
        chosen = [table for table in tables if any(id(place.module) in meant for place in table.places)] or tables
        if chosen is tables and len(tables) > 1:
            raise UserError(f"The model has several tables, and none is named: {_NAME_IT}; {listed}.")
    else:
        if not isinstance(targets, str | re.Pattern | type | Iterable):
            raise TypeError(f"Targets are names, patterns or types, not {targets!r}: {_NAME_IT}; {listed}.")
        wanted = [targets] if isinstance(targets, str | re.Pattern | type) else list(targets)
        if not wanted:
            raise UserError(f"The targets are an empty list: {_NAME_IT}; {listed}.")
        matched = {id(table): table for target in wanted for table in _matching(tables, target, listed)}
        chosen = list(matched.values())
    for table in chosen:
        if table.problem:
            way_on = ", so it cannot be replaced" + (f": name others with targets=…; {listed}" if tables[1:] else "")
            if isinstance(table.places[0].module, StandIn | SharedStandIn):
                way_on = ": go on with it as it is, or call restore(model, report) before you replace it again"
            elif isinstance(table.places[0].module, _ALREADY_OURS):
                way_on = ", so there is nothing to replace"
            raise UserError(f"The table {table.name} {table.problem}{way_on}.")
    return chosen


def _input_embeddings(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that a model, or a model inside it, names as its input embeddings."""
    for module in model.modules():
        with suppress(NotImplementedError, AttributeError):  # a part that has none of its own
            yield module.get_input_embeddings()  # type: ignore[operator]


def _matching(tables: Sequence[Table], target: Target, listed: str) -> list[Table]:
    """The tables of a type or a pattern, or the one of that name, or of the only name that ends with it."""
    places = [(place, table) for table in tables for place in table.places]
    if isinstance(target, re.Pattern):
        meant, matched = target.pattern, [table for place, table in places if target.fullmatch(place.name)]
    elif isinstance(target, type):
        meant, matched = target.__name__, [table for place, table in places if isinstance(place.module, target)]
    elif set("*?[") & set(target):
        meant, matched = target, [table for place, table in places if fnmatchcase(place.name, target)]
    else:
        meant, matched = target, [table for place, table in places if place.name == target]
        matched = matched or [table for place, table in places if place.name.endswith(f".{target}")]
        if len(set(map(id, matched))) > 1:
            raise UserError(f"The target {target!r} is the end of several names: write one of them in full; {listed}.")
        if not matched and (close := closest(target, [place.name for place, _ in places])):
            listed = f"did you mean {close!r}; {listed}"
    if not matched:
        raise UserError(f"The target {meant!r} matches no table: {listed}.")
    return matched
