"""BLEU and chrF by sacrebleu (extra ``mt``), each with the signature that says how it was computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torchdefine.errors import UserError


@dataclass(frozen=True)
class TranslationScores:
    """How close translations come to references."""

    bleu: float
    bleu_signature: str
    chrf: float
    chrf_signature: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def require_sacrebleu() -> Any:
    """The package, or a UserError that says how to get it; called before long work that ends with scores."""
    try:
        import sacrebleu
    except ImportError as error:
        raise UserError("BLEU and chrF need the package sacrebleu: pip install 'torchdefine[mt]'.") from error
    return sacrebleu


def score_translations(translations: Sequence[str], references: Sequence[str]) -> TranslationScores:
    """Corpus BLEU and chrF of detokenised text against one reference a line."""
    if len(translations) != len(references):
        raise UserError(
            f"There are {len(translations):,} translations and {len(references):,} references: give one a line."
        )
    if not translations:
        raise UserError("There are no translations to score.")
    sacrebleu = require_sacrebleu()
    bleu, chrf = sacrebleu.metrics.BLEU(), sacrebleu.metrics.CHRF()
    bleu_score = bleu.corpus_score(list(translations), [list(references)]).score
    chrf_score = chrf.corpus_score(list(translations), [list(references)]).score
    return TranslationScores(bleu_score, str(bleu.get_signature()), chrf_score, str(chrf.get_signature()))
