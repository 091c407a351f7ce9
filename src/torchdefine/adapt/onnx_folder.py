"""A model of transformers with packed tables as a folder for onnxruntime and transformers.js (extras hf, export).

The program is ``onnx/model.onnx``, where transformers.js and Optimum look for it; beside it lie the tokenizer and the
model's settings in its own terms. The folder appears once onnxruntime has given what the model gives.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchdefine.adapt.adapted_card import adapted_card
from torchdefine.adapt.model_folder import (
    CARD_FILE,
    CONFIG_FILE,
    carry_over,
    check_carried_over,
    keep_former_card,
    open_model,
)
from torchdefine.errors import MachineError, UserError
from torchdefine.export.formats import Onnx, open_onnx, quiet, save_onnx
from torchdefine.export.program import difference
from torchdefine.files import check_new_folder, new_folder, write_json, write_text
from torchdefine.tables.quantised import QuantisedRows

PROGRAM_FILE = "onnx/model.onnx"
TOLERANCE = 1e-4
"""The largest difference allowed to the model, relative for numbers above 1."""
TRACED_AT, CHECKED_AT = (3, 6), ((1, 1), (2, 9), (5, 33))
"""Texts and tokens of each."""
GATHERED_BITS = (4, 8)
"""What onnxruntime's GatherBlockQuantized unpacks and our rows hold in its order."""


def export_onnx(folder: str | Path, out: str | Path) -> dict[str, Any]:
    """Write the model that ``adapt`` or ``save_pretrained`` left in ``folder`` as ONNX; returns what was written.

    A table of 8 or 4 bits in even groups is read by onnxruntime's own operator; one of any other kind is unpacked by
    plain operators. The output is that of the model as it was saved: hidden states, or the logits of its head.
    """
    folder, out = Path(folder), Path(out)
    check_new_folder(out)
    Onnx().check_installed()
    model, tokenizer = open_model(folder, packed=True)
    if model.config.is_encoder_decoder:
        kind = type(model).__name__
        raise UserError(
            f"A {kind} has an encoder and a decoder, and only one program can be written: export its encoder."
        )
    if getattr(model.config, "quantization_config", None) is not None:
        raise UserError(
            "The rest of this model is in int8 by torchao, which cannot become ONNX: adapt it with --rest keep."
        )
    check_carried_over(folder, out)
    whole = _Whole(model.float(), tokenizer.model_input_names)
    with new_folder(out) as making:
        carry_over(folder, making)
        path = making / PROGRAM_FILE
        path.parent.mkdir()
        _write(whole, path)
        apart = _difference(whole, path)
        if not apart <= TOLERANCE:
            raise MachineError(f"The program differs from the model by {apart:.1e}, so nothing was written.")
        settings = json.loads((folder / CONFIG_FILE).read_text())
        own = {name: value for name, value in settings.items() if name not in ("torchdefine", "transformers_weights")}
        write_json(making / CONFIG_FILE, {**own, "model_type": model.config.model_type})
        facts = {
            "file": PROGRAM_FILE,
            "bytes": sum(one.stat().st_size for one in path.parent.iterdir()),
            "inputs": whole.names,
            "output": whole.output,
            "operators": sorted(whole.gathered),
            "largest_difference": apart,
        }
        card = making / CARD_FILE
        if card.exists() and "library_name: torchdefine" not in card.read_text(encoding="utf-8"):
            keep_former_card(making)  # somebody's own, and no note on how torchdefine loads the model
        write_text(card, adapted_card(making, type(model).__name__, facts))
    return facts


class _Whole(nn.Module):
    """A model as a function from the tokenizer's tensors, in order, to its first output."""

    def __init__(self, model: Any, names: list[str]) -> None:
        super().__init__()
        accepted = {"input_ids", "attention_mask", "token_type_ids"} & signature(model.forward).parameters.keys()
        self.model, self.names = model, [name for name in names if name in accepted]
        model.config.use_cache = False
        self.vocabulary = model.get_input_embeddings().num_embeddings
        self.gathered: set[str] = set()
        self.output = "logits" if hasattr(self._run(*self.sample(1, 2)), "logits") else "last_hidden_state"

    def _run(self, *given: Tensor) -> Any:
        return self.model(**dict(zip(self.names, given, strict=True)))

    def forward(self, *given: Tensor) -> Tensor:
        found: Tensor = self._run(*given)[self.output]
        return found

    def sample(self, texts: int, length: int) -> tuple[Tensor, ...]:
        """Ids, the second half of the first text filled up, and segments."""
        generator = torch.Generator().manual_seed(length)
        made = {
            "input_ids": torch.randint(self.vocabulary, (texts, length), generator=generator),
            "attention_mask": torch.ones(texts, length, dtype=torch.long),
            "token_type_ids": torch.zeros(texts, length, dtype=torch.long),
        }
        made["attention_mask"][0, length // 2 + 1 :] = 0
        return tuple(made[name] for name in self.names)


@torch.no_grad()
def _write(whole: _Whole, path: Path) -> None:
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with quiet(), _gathering(whole):
        made: Any = torch.onnx.export(
            whole,
            whole.sample(*TRACED_AT),
            dynamo=True,
            verbose=False,
            dynamic_shapes=((free,) * len(whole.names),),
            input_names=whole.names,
            output_names=[whole.output],
        )
        save_onnx(made, path, whole.state_dict().values())


@torch.no_grad()
def _difference(whole: _Whole, path: Path) -> float:
    """The largest one to the model, at sizes that the program was not traced at."""
    run = open_onnx(path, whole.names)
    samples = [whole.sample(*sizes) for sizes in CHECKED_AT]
    return max(difference(run(given), [whole(*given)]) for given in samples)


@contextmanager
def _gathering(whole: _Whole) -> Iterator[None]:
    """For the exporter, rows that onnxruntime can unpack by itself become its operator."""
    changed = [part for part in whole.modules() if isinstance(part, QuantisedRows) and _fits(part)]
    for part in changed:
        part.forward = partial(_gathered, part)  # type: ignore[method-assign]
        whole.gathered.add(f"GatherBlockQuantized, {part.bits} bits")
    try:
        yield
    finally:
        for part in changed:
            del part.forward


def _fits(rows: QuantisedRows) -> bool:
    size = rows.group_size
    even = size >= 16 and size & (size - 1) == 0 and rows.width % size == 0
    return rows.bits in GATHERED_BITS and even


def _gathered(rows: QuantisedRows, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Its levels are (code - 2^(bits - 1)) × step; ours lie half a step higher, evenly around zero."""
    steps = rows.steps.to(dtype)
    settings: Any = {"bits": rows.bits, "block_size": rows.group_size, "gather_axis": 0, "quantize_axis": 1}
    levels: Tensor = torch.onnx.ops.symbolic(
        "com.microsoft::GatherBlockQuantized",
        [rows.codes, ids, steps],
        settings,
        dtype=dtype,
        shape=[*ids.shape, rows.width],
        version=1,
    )
    return levels + 0.5 * steps[ids].repeat_interleave(rows.group_size, dim=-1)
