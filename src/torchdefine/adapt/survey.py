"""Which tables a model has, where each of them is used, and why some cannot be replaced."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from torchdefine.adapt.stand_in import SharedStandIn, StandIn
from torchdefine.embedding import TokenEmbedding
from torchdefine.errors import UserError
from torchdefine.spelling import closest
from torchdefine.tables import CompactTable

Target = str | re.Pattern[str] | type[nn.Module]
Targets = Target | Sequence[Target] | None

_ALREADY_OURS = (StandIn, SharedStandIn, TokenEmbedding, CompactTable)
_PROBED_IDS = 8
_NAME_IT = "name what is meant with targets=…"


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
    def module(self) -> nn.Embedding:
        assert isinstance(self.places[0].module, nn.Embedding)
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


def survey(model: nn.Module, ties: Mapping[str, str] | None = None) -> list[Table]:
    """All tables of a model, and those that look like one but cannot be replaced.

    Modules that hold the same parameter are one table. ``ties`` names parameters that will be the same though they are
    not yet: {name: name of the one it will be}, as a model that is being loaded knows them.
    """
    same = _declared_ties(model, ties or {})
    groups: dict[int, list[Place]] = {}
    for place in _table_like(model):
        weight = place.module._parameters.get("weight")
        groups.setdefault(id(place.module) if weight is None else same.get(id(weight), id(weight)), []).append(place)
    return [_table(model, places, same) for places in groups.values()]


def choose(tables: Sequence[Table], targets: Targets, fallback: Iterable[nn.Module] = ()) -> list[Table]:
    """The tables that ``targets`` name, each once; refuses a target without a match, and lists the tables found.

    Without targets, ``fallback`` says which modules are meant; without that, a model with one table means that one.
    """
    if targets is None:
        meant = {id(module) for module in fallback}
        chosen = [table for table in tables if any(id(place.module) in meant for place in table.places)]
        if not chosen and len(tables) == 1:
            chosen = list(tables)
        if not tables:
            raise UserError("The model has no table to replace: no nn.Embedding was found in it.")
        if not chosen:
            raise UserError(f"The model has several tables, and none is named: {_NAME_IT}; {_listed(tables)}.")
    else:
        if not isinstance(targets, str | re.Pattern | type | Iterable):
            raise TypeError(f"Targets are names, patterns or types, not {targets!r}: {_NAME_IT}; {_listed(tables)}.")
        wanted = [targets] if isinstance(targets, str | re.Pattern | type) else list(targets)
        if not wanted:
            raise UserError(f"The targets are an empty list: {_NAME_IT}; {_listed(tables)}.")
        found = [table for target in wanted for table in _matching(tables, target)]
        chosen = list({id(table): table for table in found}.values())
    for table in chosen:
        if table.problem:
            raise UserError(f"The table {table.name} {table.problem}{_way_on(table, tables)}")
    return chosen


def _listed(tables: Sequence[Table]) -> str:
    """What was found, as a part of a sentence."""
    found = "; ".join(table.described() for table in tables)
    return f"the model has {found}" if tables else "the model has no nn.Embedding"


def _way_on(table: Table, tables: Sequence[Table]) -> str:
    """The rest of a sentence that said why a table cannot be replaced."""
    module = table.places[0].module
    if isinstance(module, StandIn | SharedStandIn):
        return ": go on with it as it is, or call restore(model, report) before you replace it again."
    if isinstance(module, _ALREADY_OURS):
        return ", so there is nothing to replace."
    others = f": name others with targets=…; {_listed(tables)}" if len(tables) > 1 else ""
    return f", so it cannot be replaced{others}."


def lookup_scale(module: nn.Embedding) -> float | None:
    """The factor by which a table multiplies its rows, found by trying; None if it does anything else to them."""
    if type(module).forward is nn.Embedding.forward:
        return 1.0
    if module.weight.is_meta:
        return None
    rows = len(module.weight)
    ids = torch.arange(min(_PROBED_IDS, rows), device=module.weight.device) * (rows // min(_PROBED_IDS, rows))
    stored = module.weight.detach()[ids].double()
    stated = getattr(module, "embed_scale", None)  # exact where the module says it itself
    if not stored.any():
        return None if stated is None else float(stated)
    given = [_probed(module, ids, training).double() for training in (False, True)]  # it may drop some in training
    if any(vectors.shape != stored.shape for vectors in given):
        return None
    scale = float((given[0] * stored).sum() / (stored**2).sum())
    if not all(torch.allclose(vectors, stored * scale, rtol=1e-2, atol=1e-6) for vectors in given):
        return None
    if stated is not None and abs(float(stated) - scale) < 1e-2 * abs(scale):
        return float(stated)
    return scale


@torch.no_grad()
def _probed(module: nn.Embedding, ids: Tensor, training: bool) -> Tensor:
    """A table's output in one of its modes; neither the table nor later random numbers change."""
    before, device = module.training, module.weight.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        given = module.train(training)(ids)
    module.train(before)
    return given if isinstance(given, Tensor) else ids


def _declared_ties(model: nn.Module, ties: Mapping[str, str]) -> dict[int, int]:
    """id of a parameter → id of the parameter that takes its place."""
    named = dict(model.named_parameters(remove_duplicate=False))
    same = {}
    for target, source in ties.items():
        while source in ties:
            source = ties[source]
        if target in named and source in named:
            same[id(named[target])] = id(named[source])
    return same


def _table_like(model: nn.Module) -> Iterator[Place]:
    """Every place of a module that maps ids to vectors, whether we understand it or not."""
    ours: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if any(f"{name}.".startswith(f"{prefix}.") for prefix in ours):
            continue
        if isinstance(module, _ALREADY_OURS):
            ours.append(name)
        if isinstance(module, _ALREADY_OURS) or (name and _looks_like_a_table(module)):
            yield Place.at(model, name)


def _looks_like_a_table(module: nn.Module) -> bool:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return True
    weight = getattr(module, "weight", None) if "Embedding" in type(module).__name__ else None
    return isinstance(weight, Tensor) and weight.ndim == 2 and not list(module.children())


def _table(model: nn.Module, places: list[Place], same: Mapping[int, int]) -> Table:
    problems = [_problem(place.module) for place in places]
    weight = places[0].module._parameters.get("weight")
    heads: list[Place] = []
    if weight is not None:
        for name, key, exactly in _other_users(model, weight, same):
            shared = model.get_submodule(name)
            if type(shared) is not nn.Linear or key != "weight" or not exactly:
                user = f"{name or 'the model'}.{key}"
                problems.append(f"shares its memory with {user} in a way that is not understood")
            elif put_on := _put_on(shared):
                problems.append(f"is shared by {name}, which {put_on}")
            else:
                heads.append(Place.at(model, name))
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
    if isinstance(module, nn.EmbeddingBag):
        return "gives sums of vectors (EmbeddingBag)"
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or hasattr(module, "parametrizations"):
        return f"has no plain weight ({kind})"
    held = type(weight.data).__name__
    if held == "DTensor":
        return "is split over several processes (DTensor)"
    if type(weight.data) is not Tensor or not weight.is_floating_point() or "uant" in type(module).__module__:
        return f"is quantised ({held if type(weight.data) is not Tensor else str(weight.dtype).split('.')[-1]}, {kind})"
    if not isinstance(module, nn.Embedding):
        return f"is no nn.Embedding but a {kind}"
    if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
        return "uses max_norm, sparse or scale_grad_by_freq, which a replacement does not have"
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
    if "forward" in vars(module):
        return "has a forward that was put on it, which would be lost"
    return None


def _other_users(model: nn.Module, weight: nn.Parameter, same: Mapping[int, int]) -> Iterator[tuple[str, str, bool]]:
    """What else uses a table's memory: a module and the name in it, and whether it is exactly the table's parameter."""
    wanted = same.get(id(weight), id(weight))
    for name, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            is_shared = same.get(id(parameter), id(parameter)) == wanted
            if is_shared and isinstance(module, nn.Embedding) and key == "weight":
                continue
            if is_shared or _overlap(parameter, weight):
                yield name, key, is_shared


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors lie in the same memory."""
    if one.is_meta or other.is_meta or type(one.data) is not Tensor or type(other.data) is not Tensor:
        return False
    pointer = one.untyped_storage().data_ptr()
    return pointer != 0 and pointer == other.untyped_storage().data_ptr()


def _matching(tables: Sequence[Table], target: Target) -> list[Table]:
    if isinstance(target, str) and not set("*?[") & set(target):
        return [_named(tables, target)]

    def is_meant(place: Place) -> bool:
        if isinstance(target, str):
            return fnmatchcase(place.name, target)
        if isinstance(target, re.Pattern):
            return target.fullmatch(place.name) is not None
        return isinstance(place.module, target)

    matched = [table for table in tables if any(map(is_meant, table.places))]
    if not matched:
        meant = target.pattern if isinstance(target, re.Pattern) else getattr(target, "__name__", target)
        raise UserError(f"The target {meant!r} matches no table: {_listed(tables)}.")
    return matched


def _named(tables: Sequence[Table], name: str) -> Table:
    """The table of that name, or of the only name that ends with it."""
    for exact in (True, False):
        matched = [
            t for t in tables if any(p.name == name or (not exact and p.name.endswith(f".{name}")) for p in t.places)
        ]
        if len(matched) > 1:
            raise UserError(
                f"The target {name!r} is the end of several names: write one of them in full; {_listed(tables)}."
            )
        if matched:
            return matched[0]
    known = [place.name for table in tables for place in table.places]
    close = closest(name, known)
    hint = f"did you mean {close!r}; " if close else ""
    raise UserError(f"The target {name!r} matches no table: {hint}{_listed(tables)}.")
