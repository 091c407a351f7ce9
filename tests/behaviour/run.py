"""Runs one use on one class, plain and with replaced tables, and says how it went."""

from __future__ import annotations

import hashlib
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.adapt.model_identity import hash_tensors
from tests.behaviour.models import Case
from tests.behaviour.uses import NotFor, Refused, Use
from torchdefine.adapt import replace_embeddings
from torchdefine.adapt.huggingface import with_define
from torchdefine.adapt.survey import choose
from torchdefine.errors import UserError
from torchdefine.tables import dense_table

SIZES = {"map_dim": 16, "expand_dim": 32, "depth": 2}


def lossless(model: Any) -> Any:
    """The model with its own vectors in compact tables."""
    tables = {table.name: dense_table(table.module.weight.detach(), "float32") for table in choose(model)}
    replace_embeddings(model, table=tables)
    return model


def fresh(model: Any) -> Any:
    torch.manual_seed(4)
    return with_define(model, **SIZES)


KINDS: dict[str, Callable[[Any], Any]] = {"DeFINE": fresh, "compact": lossless}


def identity(model: Any) -> str:
    """The model's class, modules and numbers; its configuration says more once it was saved."""
    digest = hashlib.sha256(f"{type(model)} {model}".encode())
    hash_tensors(digest, model)
    return digest.hexdigest()


def outcome(case: Case, use: Use, kind: str) -> str:
    """ "works", "refused" in a sentence with the model as it was, or "no meaning" for the plain model either.

    Anything else is an error. With tables that lost nothing, the tensors are those of the plain model.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as ours, tempfile.TemporaryDirectory() as plain:
        warnings.simplefilter("ignore")
        model = KINDS[kind](case.make())
        before = identity(model)
        try:
            found = use(case, model, Path(ours))
        except NotFor:
            return "no meaning"
        except (UserError, Refused) as error:
            sentence, checked = str(error), isinstance(error, Refused)
            if "\n" in sentence or not sentence.endswith("."):
                raise AssertionError(f"This is no sentence: {sentence}") from error
            if not checked and identity(model) != before:
                raise AssertionError(f"It was refused, but the model has changed: {sentence}") from error
            return "refused"
        except Exception as error:
            try:
                use(case, case.make(), Path(plain))
            except Exception as plain_error:
                if type(error) is type(plain_error) and str(error) == str(plain_error):
                    return "no meaning"
            raise
        if kind == "compact" and found:
            try:
                wanted = use(case, case.make(), Path(plain))
            except Exception:  # the plain model cannot do it
                return "works"
            assert len(wanted) == len(found)
            for one, other in zip(wanted, found, strict=True):
                torch.testing.assert_close(other, one, rtol=1e-3, atol=2e-5)
    return "works"
