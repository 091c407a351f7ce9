"""Stored results were written under earlier names of settings; this is the one map from those to today's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OF_THE_EMBEDDING = {
    "map": "kind",
    "projected_dim": "output_dim",
    **{name: name for name in ("map_dim", "cutoffs", "division", "scaled", "scale")},
    **{name: name for name in ("init_std", "projection_std", "row_dropout")},
}
OF_THE_UNIT = {
    "unit": "kind",
    **{name: name for name in ("embedding_dim", "expand_dim", "depth", "max_groups", "groups", "skip")},
    **{name: name for name in ("reach_expand_dim", "rounding", "multiple_of", "fixed_width", "norm", "activation")},
    **{name: name for name in ("dropout", "equalised")},
}
OF_THE_LOSS = ("output_dropout", "activation_penalty", "temporal_penalty")


def with_new_names(old: Mapping[str, Any], whole: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Settings by section under today's names; ``whole`` are all settings of the recipe, where ``old`` are some.

    Settings of other kinds than those chosen are left out, since they had no effect.
    """
    whole = whole or old
    if "loss" in old or "unit" in old or not {"embedding", "context", "output", "optim", "train"} & old.keys():
        return dict(old)  # written under today's names, or nothing but facts
    new = {name: value for name, value in old.items() if not isinstance(value, Mapping) or name == "published"}
    for name in ("data", "embedding", "context", "output", "optim", "schedule", "train", "eval", "beam"):
        new |= {name: {}} if name in old else {}
    _rename_embedding(old, whole, new)
    _rename_context(old, whole, new)
    _rename_output(old, whole, new)
    _rename_training(old, whole, new)
    for name in ("data", "schedule", "eval", "beam"):
        if name in old:
            new[name] = {**dict(old[name]), **new.get(name, {})}
    if whole.get("task") == "translation":
        _rename_translation(old, new)
    return {name: value for name, value in new.items() if value != {}}


def _rename_embedding(old: Mapping[str, Any], whole: Mapping[str, Any], new: dict[str, Any]) -> None:
    given = old.get("embedding", {})
    new["embedding"] = {OF_THE_EMBEDDING[name]: value for name, value in given.items() if name in OF_THE_EMBEDDING}
    new["unit"] = {OF_THE_UNIT[name]: value for name, value in given.items() if name in OF_THE_UNIT}
    for name in ("groups", "skip"):  # None meant: as the variant has it
        if new["unit"].get(name, "") is None:
            del new["unit"][name]
    every = whole.get("embedding", {})
    if every.get("map") == "projective" and every.get("unit", "none") == "none" and "embedding_dim" in new["unit"]:
        new["embedding"].setdefault("output_dim", new["unit"].pop("embedding_dim"))


def _rename_context(old: Mapping[str, Any], whole: Mapping[str, Any], new: dict[str, Any]) -> None:
    given, kind = dict(old.get("context", {})), whole.get("context", {}).get("kind", "lstm")
    moved = OF_THE_LOSS[1:] if kind == "transformer-xl" else OF_THE_LOSS
    new["loss"] = {name: given.pop(name) for name in moved if name in given}
    given.pop("options", None)
    new["context"] = given


def _rename_output(old: Mapping[str, Any], whole: Mapping[str, Any], new: dict[str, Any]) -> None:
    given = dict(old.get("output", {}))
    if "label_smoothing" in given:
        new["loss"]["label_smoothing"] = given.pop("label_smoothing")
    given.pop("options", None)
    banded = whole.get("output", {}).get("kind") == "adaptive"
    if (
        banded
        and whole.get("embedding", {}).get("map", "standard") != "adaptive"
        and ("kind" in given or "cutoffs" in given)
    ):
        given["kind"] = "adaptive-table"
    new["output"] = given


def _rename_training(old: Mapping[str, Any], whole: Mapping[str, Any], new: dict[str, Any]) -> None:
    optim, train = dict(old.get("optim", {})), dict(old.get("train", {}))
    patience = whole.get("optim", {}).get("stall_patience", 5)
    if "optimizer" in optim:
        optim = {"kind": optim.pop("optimizer"), **optim}
    averaging = optim.pop("averaging", None)
    if averaging is not None or "stall_patience" in optim:
        kind = averaging or whole.get("optim", {}).get("averaging", "none")
        new["averaging"] = {"kind": kind, **({"patience": patience} if kind == "stalled" else {})}
    optim.pop("stall_patience", None)
    if "record" in train:
        train["cuda_graphs"] = train.pop("record")
    if train.pop("stop_when_stalled", False):
        train["early_stopping"] = patience
    new["optim"], new["train"] = optim, train


def _rename_translation(old: Mapping[str, Any], new: dict[str, Any]) -> None:
    bitext, transformer = dict(old.get("bitext", {})), dict(old.get("transformer", {}))
    if "batch_tokens" in bitext:
        new["train"]["batch_tokens"] = bitext.pop("batch_tokens")
    new["data"] = {**new.get("data", {}), **bitext}
    share, source = transformer.pop("share", None), transformer.pop("source_embedding", None)
    new["source"] = {} if share is None else {"share": share}
    if source:
        new["source"] |= {name: value for name, value in with_new_names({"embedding": source}).items() if value}
    new["context"] = transformer
    for name in ("batch_size", "length", "random_length"):
        new["train"].pop(name, None)
    for name in ("min_count", "max_size"):
        new["data"].pop(name, None)
