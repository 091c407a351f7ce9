"""What a model is for, and so how a smaller table in it is judged: by vectors, by predicted tokens, or by classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.adapt.behaviour import COSINE, KL, Agreement
from torchdefine.adapt.measures import Measure, measured
from torchdefine.adapt.sentences import (
    SENTENCES_AT_ONCE,
    compared_part,
    encode_batch,
    rank_correlation,
    sentence_batches,
    sentence_vectors,
)
from torchdefine.files import Progress

Read = tuple[Any, Any]
"""A model and its tokenizer."""
LOGITS_AT_ONCE = 1 << 25
TOKENS_OF_A_SENTENCE = 32
"""About how many there are, to see how many sentences are read at once."""
MASKED = 7
"""One token in so many is masked and predicted."""


class Purpose(ABC):
    """How outputs are read from a model, and how those of two models are compared."""

    agreement: ClassVar[Agreement]

    def part(self, model: Any) -> nn.Module:
        """The part of a model that is run."""
        whole: nn.Module = model
        return whole

    def batches(self, model: Any, tokenizer: Any, sentences: Sequence[str]) -> list[dict[str, Tensor]]:
        return sentence_batches(model, tokenizer, sentences)

    @abstractmethod
    def encode(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        """What ``agreement`` compares, (N, d)."""

    @abstractmethod
    def compare(
        self, before: Read, after: Read, sentences: Sequence[str], progress: Progress | None = None
    ) -> dict[str, Measure]:
        """The measures of a smaller model on sentences, by their names."""


class Vectors(Purpose):
    """A model whose vectors of sentences are used; also one that reads them for a decoder."""

    agreement = COSINE

    def part(self, model: Any) -> nn.Module:
        return compared_part(model)

    def encode(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        return encode_batch(model, batch)

    def compare(
        self, before: Read, after: Read, sentences: Sequence[str], progress: Progress | None = None
    ) -> dict[str, Measure]:
        old, new = (sentence_vectors(*one, sentences, progress) for one in (before, after))
        cosines = F.cosine_similarity(old, new, dim=-1)
        return {
            "cosine": measured(lambda some: float(cosines[some].mean()), len(sentences)),
            "rank correlation": measured(lambda some: rank_correlation(old[some], new[some]), len(sentences)),
        }


class Predictions(Purpose):
    """A language model: the next token at every place, or the masked ones."""

    agreement = KL

    def __init__(self, masks: bool) -> None:
        self.masks = masks

    def batches(self, model: Any, tokenizer: Any, sentences: Sequence[str]) -> list[dict[str, Tensor]]:
        rows = model.get_input_embeddings().num_embeddings
        at_once = max(min(LOGITS_AT_ONCE // (rows * TOKENS_OF_A_SENTENCE), SENTENCES_AT_ONCE), 1)
        made = []
        for batch in sentence_batches(model, tokenizer, sentences, at_once):
            ids, real = batch["input_ids"], batch["attention_mask"].bool()
            if self.masks:
                special = torch.isin(ids, torch.tensor(tokenizer.all_special_ids, device=ids.device))
                place = torch.arange(ids.numel(), device=ids.device).view_as(ids)
                predicted = real & ~special & (place % MASKED == 0)
                wanted, read = ids, ids.masked_fill(predicted, tokenizer.mask_token_id)
            else:
                predicted, wanted, read = F.pad(real[:, 1:] & real[:, :-1], (0, 1)), ids.roll(-1, 1), ids
            if predicted.any():
                given = {"input_ids": read, "attention_mask": batch["attention_mask"]}
                made.append({**given, "predicted": predicted, "wanted": wanted[predicted]})
        return made

    def encode(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return logits[batch["predicted"]]

    @torch.no_grad()
    def compare(
        self, before: Read, after: Read, sentences: Sequence[str], progress: Progress | None = None
    ) -> dict[str, Measure]:
        sums = []
        batches = self.batches(*before, sentences)
        for number, batch in enumerate(batches):
            old, new = (self.encode(one[0], batch).float().log_softmax(-1) for one in (before, after))
            wanted = batch["wanted"].unsqueeze(-1)
            of_a_token = [
                torch.ones(len(wanted)),
                KL.items(new, old).neg(),
                old.gather(-1, wanted).squeeze(-1).neg(),
                new.gather(-1, wanted).squeeze(-1).neg(),
                (old.argmax(-1) == new.argmax(-1)).float(),
            ]
            sentence = batch["predicted"].nonzero()[:, 0].cpu()
            some = torch.zeros(len(batch["predicted"]), len(of_a_token), dtype=torch.float64)
            sums.append(some.index_add_(0, sentence, torch.stack([one.cpu().double() for one in of_a_token], -1)))
            if progress:
                progress(number + 1, len(batches))
        total = torch.cat(sums)  # (sentences, 5)

        def mean(column: int, some: Tensor) -> Tensor:
            return total[some, column].sum() / total[some, 0].sum()

        count = len(total)
        return {
            "KL": measured(lambda some: float(mean(1, some)), count),
            "perplexity": measured(
                lambda some: float(mean(3, some).exp()), count, lambda some: float(mean(2, some).exp())
            ),
            "top-1 agreement": measured(lambda some: float(mean(4, some)), count),
        }


class Classes(Purpose):
    """A classifier of texts."""

    agreement = KL

    def encode(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = model(**batch).logits
        return logits

    @torch.no_grad()
    def compare(
        self, before: Read, after: Read, sentences: Sequence[str], progress: Progress | None = None
    ) -> dict[str, Measure]:
        old, new = (
            torch.cat([self.encode(model, batch).float().cpu() for batch in self.batches(model, tokenizer, sentences)])
            for model, tokenizer in (before, after)
        )
        agree, lost = (old.argmax(-1) == new.argmax(-1)).float(), KL.items(new, old).neg()
        return {
            "agreement": measured(lambda some: float(agree[some].mean()), len(old)),
            "KL": measured(lambda some: float(lost[some].mean()), len(old)),
        }


def purpose_of(model: Any, tokenizer: Any, *, same_vocabulary: bool = True) -> Purpose:
    """By the name of a model's class. Predictions over two vocabularies have no KL, so vectors stand for them."""
    name = type(model).__name__
    if name.endswith("ForSequenceClassification"):
        return Classes()
    if same_vocabulary and name.endswith(("ForCausalLM", "LMHeadModel")):
        return Predictions(masks=False)
    if same_vocabulary and name.endswith("ForMaskedLM") and tokenizer.mask_token_id is not None:
        return Predictions(masks=True)
    return Vectors()
