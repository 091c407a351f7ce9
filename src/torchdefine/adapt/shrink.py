"""A folder with a model → one with the same model and a smaller token table, chosen by measurement (extra ``hf``)."""

from __future__ import annotations

import copy
import hashlib
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from torchdefine import __version__
from torchdefine.adapt.adapted_card import add_measures
from torchdefine.adapt.distill import Distillation, distill, has_bfloat16
from torchdefine.adapt.fit import FitOptions, fit
from torchdefine.adapt.fitted import Fitted
from torchdefine.adapt.kept import Kept
from torchdefine.adapt.labelled import Labels, Pairs
from torchdefine.adapt.measures import Measure
from torchdefine.adapt.model_folder import (
    REPORT_FILE,
    carry_over,
    check_carried_over,
    keep_former_card,
    open_model,
    weight_bytes,
)
from torchdefine.adapt.purposes import Purpose, purpose_of
from torchdefine.adapt.replace import ReplacementReport, replace_embeddings
from torchdefine.adapt.rest import Rest, int8_config, round_rest
from torchdefine.adapt.sentences import SENTENCES_AT_ONCE, SentenceParts, sentence_parts, token_counts
from torchdefine.adapt.survey import Table, choose
from torchdefine.adapt.vocabulary import KeptVocabulary, Version, Vocabulary, versions_of
from torchdefine.config import Config, setting
from torchdefine.errors import UserError
from torchdefine.files import Progress, check_new_folder, new_folder, write_json
from torchdefine.run.environment import describe_environment
from torchdefine.tables import METHODS, Budget, CompactTable
from torchdefine.tables.compact_table import sha256_of_tensors

PICTURE_FILE = "front.svg"
REPORT_VERSION = 2
USUALLY_BEST, IF_UNUSED = "bits", "used"
STEP_SECONDS = 1
"""Of distillation, on a core or two; progress goes by it."""

Stage = Callable[[str], AbstractContextManager[Progress]]
"""Takes the name of a stage; returns a context with a progress callback."""


@dataclass(frozen=True)
class ShrinkOptions(Config):
    """How much is tried, and how much is measured."""

    choosing: int = setting(300, "Sentences that candidates are compared on.", at_least=1)
    held_out: int = setting(500, "Sentences that the result is judged on; no choice has seen them.", at_least=2)
    vocabulary: Vocabulary = setting(
        "keep",
        "Which tokens the new model has. keep: all of them. trim: those that the text uses, and letters; the tokenizer "
        "splits the rest. auto: both are tried, and what measures better is taken.",
    )
    rest: Rest = setting(
        "keep", "How the rest of the model is stored. int8: its linear layers have 8 bits a weight, by torchao."
    )
    thorough: bool = setting(
        False, "Whether to try every method, not only the one that is usually best, and to distil what measures best."
    )
    distill_steps: int = setting(200, "Steps of self-distillation where all is tried; 0 for none.", at_least=0)
    trust_code: bool = setting(False, "Whether to run code that lies in the model's folder.")
    device: str = setting("cpu", "Where the model is run and the tables are made.")


@dataclass(frozen=True)
class Shrunk:
    """The result of shrinking a model."""

    folder: Path
    fitted: dict[str, Fitted]
    """By the name of the table."""
    measures: dict[str, Measure]
    """Of the new model, on held-out sentences; which they are depends on what the model is for."""
    held_out: int
    """How many there were."""
    replacement: ReplacementReport
    file_bytes: tuple[int, int]
    """Of the weights on disk, before and after."""
    vocabulary: KeptVocabulary
    rest: Rest
    """How the rest of the model is stored."""
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": "torchdefine adaptation",
            "version": REPORT_VERSION,
            "held_out": {"sentences": self.held_out} | {name: asdict(one) for name, one in self.measures.items()},
            "rest": self.rest,
            "weights_bytes_before": self.file_bytes[0],
            "weights_bytes_after": self.file_bytes[1],
            "vocabulary": self.vocabulary.to_dict(),
            "seconds": round(self.seconds, 1),
            **self.replacement.to_dict(),
            "fits": {name: fitted.to_dict() for name, fitted in self.fitted.items()},
        }


def shrink_model(
    folder: str | Path,
    text: str | Path,
    out: str | Path,
    budget: int | str | Budget,
    *,
    pairs: str | Path | None = None,
    labels: str | Path | None = None,
    options: ShrinkOptions | None = None,
    stage: Stage | None = None,
) -> Shrunk:
    """Replace the token tables of the model in ``folder`` by the best that fit ``budget``, and write it to ``out``.

    ``text`` is a file of plain text like the text that the model will read. Nothing is written to ``out`` until all is
    done. Thorough work is kept beside it until then: the same call goes on after a kill, to the same bytes.
    Several tables share the budget by their sizes; those that fit it already are refused. ``pairs`` and ``labels`` are
    files of the user's own examples (``Pairs.read``, ``Labels.read``), on which both models are measured too.
    """
    began = time.monotonic()
    options, stage = options or ShrinkOptions(), stage or _silent
    folder, out, allowed = Path(folder), Path(out), Budget.of(budget)
    check_new_folder(out)
    if options.rest == "int8":
        int8_config()  # refuses before any work
    parts = sentence_parts(text, choosing=options.choosing, held_out=options.held_out)
    model, tokenizer = open_model(folder, options.device, trust_code=options.trust_code)
    check_carried_over(folder, out)
    whole = Version("keep", model, tokenizer)
    tables = choose(model)
    purpose = purpose_of(model, tokenizer, same_vocabulary=options.vocabulary == "keep")
    examples = [kind.read(path) for kind, path in ((Pairs, pairs), (Labels, labels)) if path is not None]
    for example in examples:
        example.check(purpose)
    for table in tables:
        _place_in_use(purpose.part(model), table)
    _check_too_large(tables, allowed)
    kept = _work_beside(out, model, parts, allowed, options) if options.thorough else None
    replacing = _Fits(purpose, parts, allowed, options, kept, stage)
    fits = {version: replacing.of(version) for version in versions_of(whole, parts.fitting, options.vocabulary)}
    tried = {version: fmean(one.chosen.quality for one in fitted.values()) for version, fitted in fits.items()}
    version = max(tried, key=tried.__getitem__)
    fitted = fits[version]
    given = {name: one.table for name, one in fitted.items()}
    numbers = sum(parameter.numel() for parameter in model.parameters())
    smaller = _sharing_copy(version.model)
    report = replace(replace_embeddings(smaller, table=given, targets=list(given)), parameters_before=numbers)
    with new_folder(out) as in_making:
        carry_over(folder, in_making)
        keep_former_card(in_making)
        smaller.save_pretrained(in_making)
        if options.rest == "int8":
            smaller = round_rest(in_making, smaller)
        with stage("reading the held-out sentences with both models") as progress:
            both = (model, tokenizer), (smaller, version.tokenizer)
            measures = purpose.compare(*both, parts.held_out, progress)
        for example in examples:
            measures |= example.measures(purpose, *both)
        vocabulary = version.saved(in_making, parts.held_out, {one.name: tried[one] for one in tried})
        sizes = (weight_bytes(folder), weight_bytes(in_making))
        seconds = time.monotonic() - began
        shrunk = Shrunk(out, fitted, measures, len(parts.held_out), report, sizes, vocabulary, options.rest, seconds)
        origin = {"options": asdict(options), **describe_environment(torch.device(options.device))}
        write_json(in_making / REPORT_FILE, shrunk.to_dict() | origin)
        add_measures(in_making)
        if options.thorough:
            _draw_fronts(fitted.values(), in_making)
    if kept:
        shutil.rmtree(kept[0])
    return shrunk


def _draw_fronts(fitted: Iterable[Fitted], folder: Path) -> None:
    """A picture for each table of what was tried; none without matplotlib, as the numbers are in the report."""
    with suppress(UserError):
        for number, one in enumerate(fitted, start=1):
            one.draw(folder / (PICTURE_FILE if number == 1 else f"front-{number}.svg"))


def _work_beside(
    out: Path, model: Any, parts: SentenceParts, allowed: Budget, options: ShrinkOptions
) -> tuple[Path, dict[str, Any]]:
    """The folder for unfinished work, and what the work depends on."""
    facts = {
        "torchdefine_version": __version__,
        "model": sha256_of_tensors(model.state_dict()),
        "text": hashlib.sha256("\n".join(chain(*parts)).encode()).hexdigest(),
        "budget": asdict(allowed),
        "options": asdict(options),
    }
    return out.with_name(f"{out.name}.work"), facts


def _sharing_copy(model: Any) -> Any:
    """A model of the same parameters, whose modules can be replaced while the other stays as it is."""
    return copy.deepcopy(model, {id(one): one for one in (*model.parameters(), *model.buffers())})


@dataclass(frozen=True)
class _Fits:
    """How the tables of a model are replaced within a budget."""

    purpose: Purpose
    parts: SentenceParts
    allowed: Budget
    options: ShrinkOptions
    work: tuple[Path, dict[str, Any]] | None
    """Where unfinished work is kept, and what it depends on."""
    stage: Stage

    def of(self, version: Version) -> dict[str, Fitted]:
        """The best replacements of all tables of a model, by the tables' names."""
        part = self.purpose.part(version.model)
        tables = {_place_in_use(part, table): table for table in choose(version.model)}
        numbers = sum(table.module.weight.numel() for table in tables.values())
        found = {}
        for number, (place, table) in enumerate(tables.items()):
            kept = self.work and Kept(self.work[0] / f"{version.name}-{number}", self.work[1])
            share = self.allowed.part(table.module.weight.numel() / numbers)
            found[table.name] = self._of_table(version, place, table, share, kept)
        return found

    def _of_table(self, version: Version, place: str, table: Table, budget: Budget, kept: Kept | None) -> Fitted:
        purpose, parts, options = self.purpose, self.parts, self.options
        weight, padding = table.module.weight.detach(), table.module.padding_idx
        steps = options.distill_steps if options.thorough else 0
        counts = token_counts(version.tokenizer, parts.fitting, len(weight))
        choosing, teaching = (
            version.behaviour(purpose, place, sentences)
            for sentences in (parts.choosing, parts.fitting[: SENTENCES_AT_ONCE * max(steps, 1)])
        )
        with self.stage(f"measuring the sensitivity of {table.name}{version.described}") as progress:
            sensitivity = choosing.sensitivity(progress=progress)

        def distilled(table: CompactTable, progress: Progress | None) -> None:
            learning = Distillation(steps, bfloat16=has_bfloat16(weight.device))
            distill(teaching, table, learning, progress, kept)

        polish, seconds = distilled if steps else None, steps * STEP_SECONDS
        usual = [USUALLY_BEST] if options.vocabulary == "keep" or counts.all() else [USUALLY_BEST, IF_UNUSED]
        methods = [name for name, entry in METHODS.items() if entry.in_fit] if options.thorough else usual
        settings = FitOptions(
            choosing.similarity, purpose.agreement.name, sensitivity, polish, seconds, kept, methods=methods
        )
        # A trimmed table may fit as it is.
        smaller = Budget(min(budget.bytes, 4 * weight.numel() - 1), budget.floats_only)
        zero_padding = padding if padding is not None and not weight[padding].any() else None
        with self.stage(f"fitting {table.name}{version.described}") as progress:
            return fit(weight, counts, smaller, options=settings, padding_idx=zero_padding, progress=progress)


def _check_too_large(tables: Sequence[Table], allowed: Budget) -> None:
    """Refuse tables that fit already: any replacement would be worse."""
    weights = [table.module.weight for table in tables]
    size = sum(weight.numel() * (4 if allowed.floats_only else weight.element_size()) for weight in weights)
    if size <= allowed.bytes:
        names, taken = " and ".join(table.name for table in tables), Budget(size, allowed.floats_only)
        raise UserError(
            f"The budget of {allowed} has room for {names} as in the model, {taken}, so there is nothing to gain: keep "
            "the model, or give a smaller budget."
        )


def _place_in_use(part: nn.Module, table: Table) -> str:
    """Where the part of the model that is run looks rows of this table up."""
    table.scales()  # refuses one that does more than that
    inside = {id(module) for module in part.modules()}
    for place in table.places:
        if id(place.parent) in inside:
            return place.name
    raise UserError(
        f"The table {table.name} is not used by the part of the model that sentences are compared with, so it cannot "
        "be chosen by measurement: fit it with torchdefine.adapt.fit, and put it in with with_table."
    )


def _silent(what: str) -> AbstractContextManager[Progress]:
    return nullcontext(lambda done, total: None)
