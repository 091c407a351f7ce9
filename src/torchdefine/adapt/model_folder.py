"""A folder with a model of transformers: opened with its tokenizer, and what lies beside it (extra ``hf``)."""

from __future__ import annotations

import os
import shlex
import shutil
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from torchdefine.errors import UserError
from torchdefine.recipe import RUN_SETTINGS_FILE

CONFIG_FILE = "config.json"
_OF_THE_MODEL = ("model", "pytorch_model", "tf_model", "flax_model", "rust_model", "openvino", "onnx")
"""Files and folders that hold weights, in any format: they are not copied."""

_VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model", "*.bpe.model", "*.spm")
"""Where tokenizers keep their tokens: without any of these, transformers makes a tokenizer without tokens."""


@dataclass(frozen=True)
class OpenedModel:
    """A model in evaluation mode with its tokenizer, and where they came from."""

    folder: Path
    model: Any
    tokenizer: Any


def open_model(folder: str | Path, device: str = "cpu") -> OpenedModel:
    """Read a folder that ``save_pretrained`` wrote; nothing is downloaded."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}: give one that a model's save_pretrained wrote.")
    if (folder / RUN_SETTINGS_FILE).is_file():
        raise UserError(
            f"{folder} is a run of torchdefine and no model of transformers: make it smaller by `torchdefine compress "
            f"{shlex.quote(str(folder))}`."
        )
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"{folder} has no {CONFIG_FILE}: give a folder that a model's save_pretrained wrote.")
    if not any(path for pattern in _VOCABULARIES for path in folder.glob(pattern)):
        raise UserError(f"The tokenizer in {folder} is missing: save it beside the model, with save_pretrained.")
    transformers = import_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        names = getattr(config, "architectures", None) or [""]
        model_class = getattr(transformers, names[0], transformers.AutoModel)
        if getattr(config, "torchdefine", None) is not None:
            raise UserError(
                f"The tables of the model in {folder} were replaced already: give the model it was made of."
            )
        model = model_class.from_pretrained(folder, config=config, local_files_only=True)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # of whatever kind: a wrong setting fails wherever some model first uses it
        raise UserError(f"The model in {folder} cannot be read ({_first_line(error)}): save it again.") from None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the package tokenizers raises nothing more precise
        raise UserError(
            f"The tokenizer in {folder} cannot be read ({_first_line(error)}): save it beside the model."
        ) from None
    return OpenedModel(folder, model.to(device).eval(), tokenizer)


def check_carried_over(source: Path, target: str | Path) -> None:
    """Refuse, before any work, what ``carry_over`` would fail at."""
    if source.resolve() in Path(target).resolve().parents:
        raise UserError(
            f"{target} lies within {source}, whose files are copied with the model, so that it would be copied into "
            "itself: choose a folder outside."
        )
    for path in _beside_the_weights(source):
        for one in (path, *path.rglob("*")):
            if not (one.is_dir() or one.is_file()) or not os.access(one, os.R_OK):
                raise UserError(
                    f"{one} is to be copied with the model, but is a link to nothing or cannot be read: mend or "
                    "remove it."
                )


def carry_over(source: Path, target: Path) -> None:
    """Copy files beside a model's weights: tokenizer, pooling, licences. Those that ``target`` has already stay."""
    for path in _beside_the_weights(source):
        if (target / path.name).exists():
            continue
        if path.is_dir():
            shutil.copytree(path, target / path.name)
        else:
            shutil.copyfile(path, target / path.name)


def _beside_the_weights(folder: Path) -> list[Path]:
    return [
        path
        for path in sorted(folder.iterdir())
        if path.name.split(".")[0].split("-")[0] not in _OF_THE_MODEL and not path.name.startswith(".")
    ]


def import_transformers() -> Any:
    """The package, which then knows models with replaced tables."""
    try:
        import transformers
    except ImportError:
        raise UserError("Models of transformers need that package: pip install 'torchdefine[hf]'.") from None
    import_module("torchdefine.adapt.pretrained")
    return transformers


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200].rstrip(".")
