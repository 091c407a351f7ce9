"""A folder with a model → one with the same model and a smaller token table, chosen by measurement (extra ``hf``)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torchdefine.adapt.behaviour import Behaviour
from torchdefine.adapt.distill import Distillation, distill
from torchdefine.adapt.fit import FitOptions, fit
from torchdefine.adapt.fitted import Fitted
from torchdefine.adapt.model_folder import OpenedModel, carry_over, check_carried_over, open_model
from torchdefine.adapt.replace import ReplacementReport, replace_embeddings
from torchdefine.adapt.sentences import (
    SENTENCES_AT_ONCE,
    Likeness,
    SentenceParts,
    encode_batch,
    likeness,
    sentence_batches,
    sentence_parts,
    sentence_vectors,
    token_counts,
)
from torchdefine.adapt.stand_in import StandIn
from torchdefine.adapt.survey import Table, choose, survey
from torchdefine.adapt.swap import scales_of
from torchdefine.errors import UserError
from torchdefine.files import Progress, check_new_folder, new_folder, write_json
from torchdefine.tables import METHODS, Budget

REPORT_FILE, PICTURE_FILE = "adapt.json", "front.svg"
REPORT_VERSION = 1

Stage = Callable[[str], AbstractContextManager[Progress]]
"""Takes the name of a stage; returns a context with a progress callback."""


@dataclass(frozen=True)
class ShrinkOptions:
    """How much is measured, and how long the chosen table learns."""

    choosing: int = 300
    """Sentences that candidates are compared on."""
    held_out: int = 2_000
    """Sentences that the result is judged on; no choice has seen them."""
    distill_steps: int = 200
    """Steps of self-distillation; 0 for none."""
    quick: bool = False
    """Leave out methods that take minutes: units and codes."""
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, least in (("choosing", 1), ("held_out", 2), ("distill_steps", 0)):
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}, but must be at least {least}.")


@dataclass(frozen=True)
class Shrunk:
    """The result of shrinking a model."""

    folder: Path
    fitted: dict[str, Fitted]
    """By the name of the table."""
    likeness: Likeness
    """Of the new model to the old, on held-out sentences."""
    held_out: int
    """How many there were."""
    replacement: ReplacementReport
    file_bytes: tuple[int, int]
    """Of the weights on disk, before and after."""
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": "torchdefine adaptation",
            "version": REPORT_VERSION,
            "held_out": {"sentences": self.held_out, **asdict(self.likeness)},
            "weights_bytes_before": self.file_bytes[0],
            "weights_bytes_after": self.file_bytes[1],
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
    options: ShrinkOptions | None = None,
    stage: Stage | None = None,
) -> Shrunk:
    """Replace the token tables of the model in ``folder`` by the best that fit ``budget``, and write it to ``out``.

    ``text`` is a file of plain text like the text that the model will read. Nothing is written until all is done.
    Several tables share the budget by their sizes; those that fit it already are refused.
    """
    began = time.monotonic()
    options, stage = options or ShrinkOptions(), stage or _silent
    allowed = Budget.of(budget)
    check_new_folder(out)
    parts = sentence_parts(text, choosing=options.choosing, held_out=options.held_out)
    opened = open_model(folder, options.device)
    check_carried_over(opened.folder, out)
    tables = _token_tables(opened)
    _check_too_large(tables, allowed)
    with stage("reading the held-out sentences") as progress:
        before = sentence_vectors(opened.model, opened.tokenizer, parts.held_out, progress)
    numbers = sum(table.module.weight.numel() for table in tables)
    fitted = {
        table.name: _fitted(opened, table, parts, allowed.part(table.module.weight.numel() / numbers), options, stage)
        for table in tables
    }
    given = {name: one.table for name, one in fitted.items()}
    report = replace_embeddings(opened.model, table=given, targets=list(given))
    with stage("reading them again") as progress:
        after = sentence_vectors(opened.model, opened.tokenizer, parts.held_out, progress)
    with new_folder(out) as folder_in_making:
        carry_over(opened.folder, folder_in_making)  # first, so that the model's own README stays
        opened.model.save_pretrained(folder_in_making)
        sizes = (_weight_bytes(opened.folder), _weight_bytes(folder_in_making))
        alike, seconds = likeness(before, after), time.monotonic() - began
        shrunk = Shrunk(Path(out), fitted, alike, len(parts.held_out), report, sizes, seconds)
        write_json(folder_in_making / REPORT_FILE, shrunk.to_dict())
        _draw(fitted, folder_in_making)
    return shrunk


class _InPlace(Behaviour):
    """Measures a table as it will be used in the model: with the scale that the model's own table applies."""

    def __init__(self, model: nn.Module, target: str, scale: float, batches: Sequence[dict[str, Tensor]]) -> None:
        super().__init__(model, target, encode_batch, batches)
        self.scale, self.like = scale, model.get_submodule(target).weight

    @contextmanager
    def swapped(self, table: nn.Module) -> Iterator[None]:
        assert isinstance(self.like, Tensor)
        with super().swapped(StandIn(table, self.like, self.scale)):
            yield


def _token_tables(opened: OpenedModel) -> list[Table]:
    """The token tables of a model and of its decoder."""
    named = (module.get_input_embeddings() for module in (opened.model, _decoder(opened.model)) if module is not None)
    return choose(survey(opened.model), None, named)


def _check_too_large(tables: Sequence[Table], allowed: Budget) -> None:
    """Refuse tables that fit already: any replacement would be worse."""
    weights = [table.module.weight for table in tables]
    size = sum(weight.numel() * (4 if allowed.floats_only else weight.element_size()) for weight in weights)
    if size <= allowed.bytes:
        names, taken = " and ".join(table.name for table in tables), Budget(size, allowed.floats_only)
        raise UserError(
            f"The budget of {allowed} has room for {names} as in the model, {taken}, and no replacement would be as "
            "good: keep the model, or give a smaller budget."
        )


def _decoder(model: Any) -> Any:
    return model.get_decoder() if model.config.is_encoder_decoder else None


def _fitted(
    opened: OpenedModel,
    table: Table,
    parts: SentenceParts,
    budget: Budget,
    options: ShrinkOptions,
    stage: Stage,
) -> Fitted:
    weight = table.module.weight.detach()
    counts = token_counts(opened.tokenizer, parts.fitting, len(weight))
    looked_up = _place_in_use(opened.model, table)
    scale = dict(zip((place.name for place in table.places), scales_of(table), strict=True))[looked_up]
    sentences = (parts.choosing, parts.fitting[: SENTENCES_AT_ONCE * max(options.distill_steps, 1)])
    choosing, teaching = (
        _InPlace(opened.model, looked_up, scale, sentence_batches(opened.model, opened.tokenizer, some))
        for some in sentences
    )
    with stage(f"measuring the sensitivity of {table.name}") as progress:
        sensitivity = choosing.sensitivity(progress=progress)
    learning = Distillation(max(options.distill_steps, 1))
    polish = partial(distill, teaching, options=learning) if options.distill_steps else None
    methods = [name for name, entry in METHODS.items() if entry.in_fit and (entry.quick or not options.quick)]
    settings = FitOptions(choosing.similarity, "mean cosine", sensitivity, polish, methods=methods)
    padding = table.module.padding_idx
    zero_padding = padding if padding is not None and not weight[padding].any() else None
    with stage(f"fitting {table.name}") as progress:
        return fit(weight, counts, budget, options=settings, padding_idx=zero_padding, progress=progress)


def _place_in_use(model: Any, table: Table) -> str:
    """Where the compared part of the model uses this table."""
    body = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
    inside = {id(module) for module in body.modules()}
    for place in table.places:
        if id(place.parent) in inside:
            return place.name
    raise UserError(
        f"The table {table.name} is not used by the part of the model that sentences are compared with, so it cannot "
        "be chosen by measurement: fit it with torchdefine.adapt.fit, and put it in with with_table."
    )


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) or sum(
        path.stat().st_size for path in folder.glob("pytorch_model*.bin")
    )


def _draw(fitted: dict[str, Fitted], folder: Path) -> None:
    """The front of each table, if matplotlib is installed."""
    for number, one in enumerate(fitted.values()):
        try:
            one.draw(folder / (PICTURE_FILE if number == 0 else f"front-{number + 1}.svg"))
        except UserError:  # matplotlib is an extra, and the numbers are in the report
            return


def _silent(what: str) -> AbstractContextManager[Progress]:
    return nullcontext(lambda done, total: None)
