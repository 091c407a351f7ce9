"""Which words an embedding holds to be alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import Tensor

from torchdefine.data import Tokenization

FEWEST_SIGHTINGS = 10
"""Vectors of rarer words are mostly what they started as."""
FUNCTION_WORDS = 150
"""So many of the most frequent words say little; fewer in a small vocabulary, a tenth of its words."""
LOOKED_AT = 300
"""Words are chosen among so many that follow."""
SHORTEST_WORD = 4
WORDS_SHOWN = 10
WORD_STARTS = ("Ġ", "▁")
"""How subwords carry the space before them, in byte-level BPE and in SentencePiece."""
PIECE_OF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"


def nearest_neighbours(
    table: Tensor, tokenization: Tokenization, words: Sequence[str], count: int = 6
) -> dict[str, list[tuple[str, float]]]:
    """For each of ``words`` in the vocabulary, the ``count`` nearest others by cosine, rare words left out."""
    directions = F.normalize(table.float(), dim=-1)  # (V, m)
    left_out = _left_out(tokenization, len(table))  # (V,)
    found = {}
    for word in words:
        index = _id_of_word(tokenization, word)
        if index == tokenization.unk_id:
            continue
        hidden = left_out.clone()
        hidden[index] = True
        cosines = (directions @ directions[index]).cpu().masked_fill(hidden, -2)  # (V,)
        best = cosines.topk(min(count, int((~hidden).sum())))
        near = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        found[word] = [(readable_token(tokenization, other), cosine) for other, cosine in near]
    return found


def frequent_words(tokenization: Tokenization) -> list[str]:
    """Words of the vocabulary to look at: often seen, but beyond the most frequent ones, most of which only connect."""
    counts, marked = tokenization.counts, tokenization.kind == "subwords" and _marks_words(tokenization)
    words = []  # the most frequent first; a BPE makes the most frequent ones first, too
    for index, token in _tokens(tokenization):
        if index not in _specials(tokenization) and (not marked or token.startswith(WORD_STARTS)):
            word = readable_token(tokenization, index)
            if any(map(str.isalpha, word)):
                words.append((index, word))
    beyond = words[min(FUNCTION_WORDS, len(words) // 10) :]
    known = [word for index, word in beyond if counts is None or counts[index] >= FEWEST_SIGHTINGS]
    long = [word for word in known if word.isalpha() and len(word) >= SHORTEST_WORD]
    among = (long if len(long) >= WORDS_SHOWN else known)[:LOOKED_AT]
    return among[:: max(len(among) // WORDS_SHOWN, 1)][:WORDS_SHOWN]


def readable_token(tokenization: Tokenization, index: int) -> str:
    """A word as it is, a subword as text; one that goes on with a word has a hyphen before it."""
    token = tokenization.token(index)
    if tokenization.kind == "words" or index in _specials(tokenization):
        return token
    text = tokenization.decode([index]).strip()
    if not text or PIECE_OF_A_CHARACTER in text:
        return token
    goes_on = _marks_words(tokenization) and not token.startswith(WORD_STARTS) and text[0].isalpha()
    return f"-{text}" if goes_on else text


def _id_of_word(tokenization: Tokenization, word: str) -> int | None:
    """The id of a word; one that a tokenizer cuts into several is unknown, as no vector is its own."""
    if tokenization.kind == "words":
        return tokenization.id(word)
    for text in (f" {word}", word):  # a subword within a line carries the space before it
        ids = tokenization.encode(text)[:-1]
        if len(ids) == 1:
            return ids[0]
    return tokenization.unk_id


def _marks_words(tokenization: Tokenization) -> bool:
    return any(tokenization.id(start) != tokenization.unk_id for start in WORD_STARTS)


def _specials(tokenization: Tokenization) -> set[int | None]:
    return {tokenization.unk_id, tokenization.eos_id, tokenization.pad_id, tokenization.bos_id}


def _left_out(tokenization: Tokenization, size: int) -> Tensor:
    """(V,): rare words, padding, and subwords that are no text by themselves, such as half a character."""
    if tokenization.counts is not None:
        return torch.tensor(tokenization.counts) < FEWEST_SIGHTINGS
    hidden = torch.ones(size, dtype=torch.bool)
    for index, token in _tokens(tokenization):
        text = token if tokenization.kind == "words" else tokenization.decode([index]).strip()
        is_text = text.isprintable() and text != "" and PIECE_OF_A_CHARACTER not in text
        hidden[index] = not is_text or index in (tokenization.pad_id, tokenization.bos_id)
    return hidden


def _tokens(tokenization: Tokenization) -> Iterator[tuple[int, str]]:
    for index in range(len(tokenization)):
        with suppress(IndexError):  # ids of a tokenizer file may have gaps
            yield index, tokenization.token(index)
