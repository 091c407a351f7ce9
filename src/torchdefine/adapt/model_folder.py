"""A folder with a model of transformers: opened with its tokenizer, and what lies beside it (extra ``hf``)."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchdefine.errors import UserError, in_a_line
from torchdefine.files import read_json
from torchdefine.recipe import RUN_SETTINGS_FILE
from torchdefine.spelling import option

CONFIG_FILE = "config.json"
REPORT_FILE = "adapt.json"
"""What ``adapt`` measured of the model that it wrote."""
CARD_FILE, FORMER_CARD_FILE = "README.md", "README.before.md"
"""The card of a folder, and that of the model that it was made of."""
_OF_THE_MODEL = ("model", "pytorch_model", "tf_model", "flax_model", "rust_model", "openvino", "onnx")
"""Files and folders that hold weights, in any format: they are not copied."""

_VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model", "*.bpe.model", "*.spm")
"""Where tokenizers keep their tokens: without any of these, transformers makes a tokenizer without tokens."""


def is_model_folder(folder: Path) -> bool:
    """Whether this is what a model's ``save_pretrained`` writes, and no run of torchdefine."""
    return (folder / CONFIG_FILE).is_file() and not (folder / RUN_SETTINGS_FILE).is_file()


def open_model(folder: Path, device: str = "cpu", *, trust_code: bool = False, packed: bool = False) -> tuple[Any, Any]:
    """The model in a folder that ``save_pretrained`` wrote, frozen, and its tokenizer; nothing is downloaded.

    Code that lies in the folder is run only with ``trust_code``. One whose tables were replaced is opened only if it
    may be ``packed``.
    """
    if not folder.is_dir():
        raise UserError(
            f"There is no folder {folder}, and nothing is downloaded: give a folder that save_pretrained wrote."
        )
    if (folder / RUN_SETTINGS_FILE).is_file():
        raise UserError(
            f"{folder} is a run of torchdefine and no model of transformers: make it smaller by `torchdefine compress "
            f"{shlex.quote(str(folder))}`."
        )
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"{folder} has no {CONFIG_FILE}: give a folder that save_pretrained wrote.")
    if not any(path for pattern in _VOCABULARIES for path in folder.glob(pattern)):
        raise UserError(f"The tokenizer in {folder} is missing: save it beside the model, with save_pretrained.")
    from torchdefine.adapt.huggingface import compact_class, transformers

    how = {"local_files_only": True, "trust_remote_code": trust_code}
    with _readable(f"The model in {folder}", "save it again"):
        config = transformers.AutoConfig.from_pretrained(folder, **how)
        named = getattr(transformers, str([*(config.architectures or []), ""][0]), None)
        is_model = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
        model_class: Any = named if is_model else transformers.AutoModel
        if getattr(config, "torchdefine", None) is not None:
            if not packed:
                raise UserError(
                    f"The tables of the model in {folder} were replaced already: give the folder of the old model."
                )
            model_class = compact_class(model_class) if is_model else model_class
        model = model_class.from_pretrained(folder, config=config, **how)
    with _readable(f"The tokenizer in {folder}", "save it beside the model"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **how)
    return model.to(device).eval().requires_grad_(False), tokenizer


@contextmanager
def _readable(what: str, way_out: str) -> Iterator[None]:
    """Failures of another package in a sentence, of whatever kind: a wrong setting fails wherever it is first used."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            way_out = f"read it, and pass {option('trust_code')} if you want it to run"
            raise UserError(f"{what} has Python code, which torchdefine does not run: {way_out}.") from None
        raise UserError(f"{what} cannot be read ({in_a_line(error)}): {way_out}.") from None


def check_carried_over(source: Path, target: Path) -> None:
    """Refuse, before any work, what ``carry_over`` would fail at."""
    if source.resolve() in target.resolve().parents:
        raise UserError(f"{target} lies within {source}, so it would be copied into itself: choose a folder outside.")
    for path in _beside_the_weights(source):
        for one in (path, *path.rglob("*")):
            if not (one.is_dir() or one.is_file()) or not os.access(one, os.R_OK):
                raise UserError(
                    f"{one} is to be copied with the model, but is a link to nothing or cannot be read: mend or "
                    "remove it."
                )


def carry_over(source: Path, target: Path) -> None:
    """Copy what lies beside a model's weights: tokenizer, pooling, licences."""
    for path in _beside_the_weights(source):
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


def loading_code(folder: Path, shown: str) -> str:
    """Python that loads the model of ours in ``folder``, which it calls ``shown``."""
    from torchdefine.adapt.huggingface import transformers
    from torchdefine.adapt.pretrained import auto_classes

    where = json.dumps(shown)
    if (folder / "modules.json").exists():
        name, call = "sentence_transformers", f"SentenceTransformer({where})"
    else:
        architecture = str([*(read_json(folder / CONFIG_FILE).get("architectures") or []), ""][0])
        plain = getattr(transformers, architecture, None)
        auto = [*(auto_classes(plain) if isinstance(plain, type) else []), "AutoModel"][0]
        name, call = "transformers", f"{auto}.from_pretrained({where})"
    imported = call.partition("(")[0].partition(".")[0]
    return f"import torchdefine.adapt.huggingface\nfrom {name} import {imported}\n\nmodel = {call}"


def keep_former_card(folder: Path) -> None:
    """Make room for a card of the model as it is now."""
    if (folder / CARD_FILE).exists():
        (folder / CARD_FILE).replace(folder / FORMER_CARD_FILE)


def weight_bytes(folder: Path) -> int:
    """Of the weights on disk, as safetensors or else as torch saves them."""
    sizes = ([path.stat().st_size for path in folder.glob(name)] for name in ("*.safetensors", "pytorch_model*.bin"))
    return next((sum(some) for some in sizes if some), 0)
