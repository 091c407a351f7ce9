"""A ``tokenizer.json`` with fewer tokens: WordPiece, BPE, Unigram and WordLevel.

A text whose tokens are all kept is split as before. WordPiece takes the longest token that fits; Unigram takes the
split with the largest score. Either finds the same among fewer tokens. BPE joins the same pairs in the same order, if
all the steps that lead to a kept token are kept. Characters stay, so other text is split further and becomes no unknown
token that it was not before.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise, product
from typing import Any, NamedTuple

from torchdefine.errors import UserError

KINDS = ("WordPiece", "BPE", "Unigram", "WordLevel")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class TrimmedTokenizer(NamedTuple):
    """What is left of a tokenizer."""

    settings: dict[str, Any]
    """Of its ``tokenizer.json``."""
    old_ids: list[int]
    """The former id of every token that is kept, in the order of the new ids."""


def trimmed_tokenizer(settings: Mapping[str, Any], wanted: Collection[int]) -> TrimmedTokenizer:
    """Keep the ``wanted`` ids and what the tokenizer cannot do without; the order of the ids stays.

    Special and added tokens stay, and so do characters, bytes, the unknown token, and the steps of BPE on the way to a
    kept token.
    """
    made: dict[str, Any] = copy.deepcopy(dict(settings))
    model = made["model"]
    if model["type"] not in KINDS:
        raise UserError(f"A {model['type']} tokenizer cannot be trimmed, only {', '.join(KINDS)}: keep its vocabulary.")
    vocabulary = _vocabulary(model)
    added = {token["content"]: token["id"] for token in made["added_tokens"]}
    slots = list(_id_slots(made))
    ids = {*wanted, *(holder[key] for holder, key in slots)}
    kept = {token for token, id_ in vocabulary.items() if id_ in ids or token in added}
    kept |= _indispensable(model, vocabulary)
    if model["type"] == "BPE":
        kept |= _steps(model, vocabulary, kept)
    inside = sorted(kept, key=vocabulary.__getitem__)
    beyond = sorted(added.keys() - vocabulary.keys(), key=added.__getitem__)
    new = {token: index for index, token in enumerate([*inside, *beyond])}
    old_ids = [vocabulary[token] for token in inside] + [added[token] for token in beyond]
    _keep(model, vocabulary, {token: new[token] for token in inside})
    for token in made["added_tokens"]:
        token["id"] = new[token["content"]]
    new_ids = {old: index for index, old in enumerate(old_ids)}
    for holder, key in slots:
        holder[key] = new_ids.get(holder[key], holder[key])
    return TrimmedTokenizer(made, old_ids)


def _vocabulary(model: Mapping[str, Any]) -> dict[str, int]:
    """The ids of a tokenizer's own tokens, without the added ones."""
    if model["type"] == "Unigram":
        return {token: index for index, (token, _) in enumerate(model["vocab"])}
    return dict(model["vocab"])


def _id_slots(settings: Any) -> Iterator[tuple[Any, Any]]:
    """Where ids stand outside the model: in post-processors and in the padding; (holder, key)."""
    if settings.get("padding"):
        yield settings["padding"], "pad_id"
    processor = settings.get("post_processor") or {}
    for one in processor.get("processors", [processor]):
        for name in ("sep", "cls"):
            if isinstance(one.get(name), list):
                yield one[name], 1
        for token in one.get("special_tokens", {}).values():
            yield from ((token["ids"], index) for index in range(len(token["ids"])))


def _indispensable(model: Mapping[str, Any], vocabulary: Mapping[str, int]) -> set[str]:
    """What other text is split into, and what stands for the unknown."""
    kept = {token for token in vocabulary if _BYTE.fullmatch(token) or token == model.get("unk_token")}
    if model["type"] == "BPE":
        prefix = model["continuing_subword_prefix"] or ""
        kept |= vocabulary.keys() - {one + other.removeprefix(prefix) for one, other in model["merges"]}
    elif model["type"] == "WordPiece":
        kept |= {token for token in vocabulary if len(token.removeprefix(model["continuing_subword_prefix"])) == 1}
    elif model["type"] == "Unigram":
        kept |= {token for token in vocabulary if len(token) == 1}
        kept.add(min(model["vocab"], key=lambda entry: entry[1])[0])  # an unknown character's score goes by it
        if model["unk_id"] is not None:
            kept.add(model["vocab"][model["unk_id"]][0])
    return kept


def _steps(model: Mapping[str, Any], vocabulary: Mapping[str, int], tokens: Collection[str]) -> set[str]:
    """All that BPE makes on its way from characters to these tokens.

    A token is made in the same steps in any text: none of them joins it with a neighbour, or it would not be a token.
    """
    ranks = {(one, other): rank for rank, (one, other) in enumerate(model["merges"])}
    prefix, suffix = model["continuing_subword_prefix"] or "", model["end_of_word_suffix"] or ""
    made: set[str] = set()
    for token in tokens:
        for start, end in product({"", prefix}, {"", suffix}):
            if not (token.startswith(start) and token.endswith(end) and len(token) > len(start + end)):
                continue
            letters = list(token.removeprefix(start).removesuffix(end))
            parts = [start + letters[0], *(prefix + letter for letter in letters[1:])]
            parts[-1] += end
            steps = set(parts)
            while known := [(ranks[pair], place) for place, pair in enumerate(pairwise(parts)) if pair in ranks]:
                _, place = min(known)
                parts[place : place + 2] = [parts[place] + parts[place + 1].removeprefix(prefix)]
                steps.add(parts[place])
            if parts == [token]:  # else no text is split into it, but as a whole word
                made |= steps
    return made & vocabulary.keys()


def _keep(model: dict[str, Any], vocabulary: Mapping[str, int], new: Mapping[str, int]) -> None:
    """Let a model have these tokens only, by their new ids."""
    if model["type"] == "Unigram":
        if model["unk_id"] is not None:
            model["unk_id"] = new[model["vocab"][model["unk_id"]][0]]
        model["vocab"] = [model["vocab"][vocabulary[token]] for token in new]
        return
    model["vocab"] = dict(new)
    if model["type"] == "BPE":
        prefix = model["continuing_subword_prefix"] or ""
        whole = ((one, other, one + other.removeprefix(prefix)) for one, other in model["merges"])
        model["merges"] = [[one, other] for one, other, both in whole if {one, other, both} <= new.keys()]
