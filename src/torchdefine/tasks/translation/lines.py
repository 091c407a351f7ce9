"""From a line of text to pieces that can be translated, and back; BLEU and chrF of many lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

from torchdefine.data.bitext import one_line
from torchdefine.data.tokenizer import SubwordTokenizer, TokenizerPair
from torchdefine.errors import UserError, check_count
from torchdefine.files import Progress
from torchdefine.tasks.sampling import SamplingOptions
from torchdefine.tasks.translation.beam import BeamConfig, Hypothesis, TargetTokens, beam_search, sample_targets
from torchdefine.tasks.translation.model import Translator

PLACES_AT_ONCE = 8192
"""Source tokens of a batch, padding included: fewer long sources are searched at a time."""


@dataclass(frozen=True)
class TranslationOptions:
    """How lines are translated."""

    beam: BeamConfig = field(default_factory=BeamConfig)
    sampling: SamplingOptions | None = None
    """Draw instead of searching."""
    seed: int = 1
    n_best: int = 1

    def __post_init__(self) -> None:
        check_count("n_best", self.n_best)
        if self.seed < 0:
            raise UserError(f"The seed is {self.seed}, but must not be negative: try 1.")
        if self.sampling is None and self.n_best > self.beam.size:
            problem = f"A beam of {self.beam.size} cannot give the {self.n_best} best translations"
            raise UserError(f"{problem}: use a beam of {self.n_best} or more.")


@dataclass(frozen=True)
class Translation:
    """A line's translation, its log-probability and the score that it was ranked by."""

    text: str
    log_prob: float = 0.0
    score: float = 0.0


def cut_sentence(ids: list[int], longest: int, tokenizer: SubwordTokenizer) -> list[list[int]]:
    """A sentence's ids in pieces of at most ``longest``; none for an empty one.

    A cut comes before the last token that begins a word; after a sentence's end, if one is not too far back.
    """
    pieces = []
    while len(ids) > longest:
        tokens = [tokenizer.token(index) for index in ids[: longest + 1]]
        begins = [at for at in range(1, len(tokens)) if tokens[at].startswith(("Ġ", "▁"))]
        after_stop = [at for at in begins if tokens[at - 1].endswith((".", "!", "?", ";", ":"))]
        at = begins[-1] if begins else longest
        if after_stop and after_stop[-1] >= len(tokens) // 3:
            at = after_stop[-1]
        pieces.append(ids[:at])
        ids = ids[at:]
    return [*pieces, ids] if ids else pieces


def translate_pieces(
    model: Translator,
    tokenization: TokenizerPair,
    pieces: list[list[int]],
    options: TranslationOptions,
    progress: Progress | None = None,
) -> list[list[Hypothesis]]:
    """Search in batches of about equal length, the longest first, and put the results back in order."""
    source, target = tokenization.source, tokenization.target
    forbidden = tuple({target.pad_id, target.bos_id, target.unk_id})
    tokens = TargetTokens(target.bos_id, target.eos_id, source.pad_id, forbidden)
    found: list[list[Hypothesis]] = [[] for _ in pieces]
    order = sorted(range(len(pieces)), key=lambda place: -len(pieces[place]))
    done = 0
    while done < len(order):
        count = min(options.beam.batch_size, max(1, PLACES_AT_ONCE // (len(pieces[order[done]]) + 1)))
        places = order[done : done + count]
        sources = [[*pieces[place], source.eos_id] for place in places]
        if options.sampling is None:
            batch = beam_search(model, sources, tokens, options.beam, options.n_best)
        else:
            seeds = [options.seed * 1_000_003 + place for place in places]
            batch = sample_targets(model, sources, tokens, options.sampling, options.beam, seeds, options.n_best)
        for place, hypotheses in zip(places, batch, strict=True):
            found[place] = hypotheses
        done += len(places)
        if progress is not None:
            progress(done, len(order))
    return found


def joined(pieces: list[list[Hypothesis]], tokenizer: SubwordTokenizer, n_best: int) -> list[Translation]:
    """The translations of a line from those of its pieces: the best of each together, the second best, and so on."""
    if not pieces:
        return [Translation("")]
    ranked = []
    for rank in range(min(n_best, max(map(len, pieces)))):
        chosen = [hypotheses[min(rank, len(hypotheses) - 1)] for hypotheses in pieces]
        text = one_line(" ".join(tokenizer.decode_sentence(hypothesis.ids) for hypothesis in chosen))
        ranked.append(Translation(text, sum(h.log_prob for h in chosen), sum(h.score for h in chosen)))
    return ranked


@dataclass(frozen=True)
class TranslationScores:
    """How close translations come to references."""

    bleu: float
    bleu_signature: str
    chrf: float
    chrf_signature: str

    def lines(self) -> list[str]:
        return [f"BLEU {self.bleu:.2f}  {self.bleu_signature}", f"chrF {self.chrf:.2f}  {self.chrf_signature}"]


def require_packages(scores: bool = True) -> None:
    """Called before any long work; only a test text is scored."""
    missing = [name for name in ("tokenizers", "sacrebleu") if find_spec(name) is None]
    if "tokenizers" in missing or (scores and missing):
        packages = " and ".join(missing)
        raise UserError(f"Translation needs {packages}, for subwords and BLEU: pip install 'torchdefine[mt]'.")


def score_translations(translations: Sequence[str], references: Sequence[str]) -> TranslationScores:
    """Corpus BLEU and chrF of detokenised text against one reference a line."""
    if len(translations) != len(references):
        raise UserError(f"{len(translations):,} translations need as many references, not {len(references):,}.")
    if not translations:
        raise UserError("There are no translations to score.")
    require_packages()
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    bleu, chrf = BLEU(), CHRF()
    scores = [metric.corpus_score(list(translations), [list(references)]).score for metric in (bleu, chrf)]
    return TranslationScores(scores[0], str(bleu.get_signature()), scores[1], str(chrf.get_signature()))
