"""Whether runs may be compared: why their numbers do not compare, and what differs beside their embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torchdefine.analysis.run_summary import RunSummary
from torchdefine.analysis.settings_table import differing_settings
from torchdefine.data.token_file import LOSS_THAT_COUNTS
from torchdefine.recipe import Recipe
from torchdefine.recipe.effects import implied_settings
from torchdefine.training.evaluate import short_stream_warning

UNKNOWN_MAY_DIFFER = 0.001
"""Share of a text. A model is credited with all the bytes of a word of which it only has to say <unk>."""
PASSES_MAY_DIFFER = 1.01
"""By this factor."""
MOST_SETTINGS_NAMED = 6
SPOKEN_OF_ELSEWHERE = ("task", "data", "embedding", "output", "eval")
"""Sections whose differences are what is compared, or show in texts, vocabularies and protocols …"""
WAYS_TO_TRAIN = {"embedding.row_dropout", "output.label_smoothing"}
"""… but for these, which any embedding may have."""
IMMATERIAL = {
    *(f"train.{name}" for name in ("seed", "log_every", "checkpoint_every", "keep", "record", "compile")),
    "beam.batch_size",
}


def why_incomparable(runs: Sequence[RunSummary]) -> list[str]:
    """Why perplexities do not compare, a sentence each; empty where they do."""
    if len({run.recipe.task for run in runs}) > 1:
        return ["Language models and translators stand side by side: of their numbers only parameters compare."]
    found = []
    same_texts = all(
        _is_one(hashes)
        for split in ("valid", "test")
        if (hashes := [_text(run, split) for run in runs if _evaluation(run, split)])
    )
    if not same_texts:
        found.append("The runs were evaluated on different texts, so neither perplexities nor bits per byte compare.")
    if not all(_is_one(_protocols(runs, split)) for split in ("valid", "test")):
        found.append("The runs were evaluated by different protocols, so their perplexities compare only roughly.")
    evaluated = [run for run in runs if run.fact("evaluation")]
    if not _is_one([run.fact("data")["vocabulary_sha256"] for run in evaluated]):
        reasons = [
            reason(evaluated, split)
            for reason in (_lost_characters, _different_shares_unknown)
            for split in ("test", "valid")
            if same_texts
        ]
        found.append(next(filter(None, reasons), _different_vocabularies(same_texts)))
    return found


def _lost_characters(runs: Sequence[RunSummary], split: str) -> str:
    """A sentence, or nothing where no run is known to be without a part of the text; early results do not tell."""
    lost = {run.name: run.fact("data")["splits"].get(split, {}).get("lost_share") or 0.0 for run in runs}
    most = max(lost, key=lost.__getitem__)
    if lost[most] < LOSS_THAT_COUNTS:
        return ""
    return (
        f"The vocabularies differ, and the tokenizer of {most} loses {lost[most]:.1%} of the characters of the {split} "
        "text: neither perplexities nor bits per byte compare."
    )


def _different_shares_unknown(runs: Sequence[RunSummary], split: str) -> str:
    """A sentence, or nothing where the shares are alike.

    Tokens are compared by number, not by share: an <unk> that stands in the text itself, as WikiText has many, is one
    token in every vocabulary, though one of more words than of subwords.
    """
    evaluated = {run.name: e for run in runs if "unknown_share" in (e := _evaluation(run, split))}
    if len(evaluated) < 2:
        return ""
    unknown = {name: e["unknown_share"] * e["tokens"] for name, e in evaluated.items()}
    most, fewest = max(unknown, key=unknown.__getitem__), min(unknown, key=unknown.__getitem__)
    if unknown[most] - unknown[fewest] <= UNKNOWN_MAY_DIFFER * min(e["tokens"] for e in evaluated.values()):
        return ""
    more, less = (f"{evaluated[name]['unknown_share']:.1%}" for name in (most, fewest))
    return (
        f"The vocabularies differ, so that {more} of the {split} text is <unk> in {most} and {less} in {fewest}: "
        "neither perplexities nor bits per byte compare."
    )


def _different_vocabularies(same_texts: bool) -> str:
    instead = "; bits per byte do" if same_texts else ""
    return f"The runs have different vocabularies, so their perplexities do not compare{instead}."


def what_else_differs(runs: Sequence[RunSummary]) -> list[str]:
    """What the runs of a task had for their training beside their embeddings, where it was not the same."""
    if len({run.recipe.task for run in runs}) > 1:
        return []
    found = []
    finished = _finished(runs)
    same_text = _is_one([_text(run, "train") for run in finished])
    if not same_text:
        found.append("The runs were trained on different texts.")
    tokens = [run.fact("tokens") for run in finished]
    if not _is_one(tokens):
        found.append(f"The runs were trained for different numbers of tokens, from {min(tokens):,} to {max(tokens):,}.")
    elif same_text:
        found += _different_passes(finished)
    return [*found, *_different_context_models(runs), *_different_settings(runs, tokens_named=not _is_one(tokens))]


def _different_passes(runs: Sequence[RunSummary]) -> list[str]:
    """A sentence where as many tokens are more text in one run than in another, as words are beside subwords."""
    passes = [run.fact("tokens") / run.fact("data")["splits"]["train"]["tokens"] for run in runs]
    if not passes or max(passes) <= PASSES_MAY_DIFFER * min(passes):
        return []
    return [
        "The runs were trained for as many tokens, but these are not as much text: from "
        f"{min(passes):.3g} to {max(passes):.3g} passes over it."
    ]


def _different_context_models(runs: Sequence[RunSummary]) -> list[str]:
    counts = {run.name: run.parameters["context"] for run in runs if run.parameters}
    if _is_one(list(counts.values())):
        return []
    most, fewest = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
    sizes = (
        f"The context model has {counts[most] / 1e6:.3f} M parameters in {most} and {counts[fewest] / 1e6:.3f} M in "
        f"{fewest}"
    )
    widths = _widths(runs, "context.output_dim")
    if widths and not _is_one(widths) and any("context.output_dim" in implied_settings(run.recipe) for run in runs):
        return [
            f"{sizes}: a tied LSTM ends as wide as embedding.map_dim; to compare embeddings alone, give all of them "
            f"--context.output_dim {max(widths)}."
        ]
    if not _is_one(_widths(runs, "embedding.embedding_dim")):
        return [f"{sizes}: it is made for the width of its vectors, embedding.embedding_dim."]
    return [f"{sizes}."]


def _widths(runs: Sequence[RunSummary], name: str) -> list[int]:
    """The value of a width in every run, as far as it is known."""
    section, _, setting = name.partition(".")
    found = [implied_settings(run.recipe).get(name, getattr(getattr(run.recipe, section), setting)) for run in runs]
    return [width for width in found if width is not None]


def _different_settings(runs: Sequence[RunSummary], *, tokens_named: bool) -> list[str]:
    """One sentence; steps and epochs are left out where the numbers of tokens are named already."""
    silent = IMMATERIAL | ({"train.steps", "train.epochs"} if tokens_named else set())
    rows = [
        (name, list(dict.fromkeys(values)))
        for name, *values in differing_settings([_recipe_as_run(run) for run in runs], only_chosen=True)
        if (name.partition(".")[0] not in SPOKEN_OF_ELSEWHERE or name in WAYS_TO_TRAIN) and name not in silent
    ]
    if not rows:
        return []
    shown = [f"{name} ({', '.join(values)})" for name, values in rows[:MOST_SETTINGS_NAMED]]
    more = f" and {len(rows) - len(shown)} more" if len(rows) > len(shown) else ""
    return [f"Settings beside the kinds of embedding and output differ: {', '.join(shown)}{more}."]


def _recipe_as_run(run: RunSummary) -> Recipe:
    """The recipe with the precision that was computed in, which on a CPU is not always the one that was asked for."""
    computed = (run.result or {}).get("precision", run.recipe.train.precision)
    return replace(run.recipe, train=replace(run.recipe.train, precision=computed))


def which_texts_are_short(runs: Sequence[RunSummary]) -> list[str]:
    """A sentence for each text whose pieces are so short that how a model begins may decide its perplexity."""
    found = []
    for split in ("valid", "test"):
        for run in _finished(runs):
            tokens, streams = _evaluation(run, split).get("tokens"), run.recipe.eval.batch_size
            if run.recipe.task != "translation" and tokens and short_stream_warning(tokens, streams):
                found.append(
                    f"The {split} text is short, {tokens:,} tokens in {min(streams, tokens)} streams that begin "
                    "without context: perplexities are likely too high, and another model may be the best by "
                    f"`torchdefine eval RUN --split {split} --batch-size 1`."
                )
                break
    return found


def what_is_missing(runs: Sequence[RunSummary]) -> list[str]:
    """Which runs are unfinished, and which were never evaluated."""
    found = []
    for missing in (["valid", "test"], ["valid"], ["test"]):
        names = [
            run.name
            for run in _finished(runs)
            if [split for split in ("valid", "test") if not _evaluation(run, split)] == missing
        ]
        if names:
            were, have = ("was", "it has") if len(names) == 1 else ("were", "they have")
            found.append(f"{' and '.join(names)} {were} not evaluated: {have} no {' or '.join(missing)} text.")
    return found + [run.status for run in runs if run.status]


def _finished(runs: Sequence[RunSummary]) -> list[RunSummary]:
    return [run for run in runs if run.result is not None]


def _evaluation(run: RunSummary, split: str) -> dict[str, Any]:
    found: dict[str, Any] = (run.fact("evaluation") or {}).get(split, {})
    return found


def _protocols(runs: Sequence[RunSummary], split: str) -> list[str]:
    return [e["protocol"] for run in runs if "protocol" in (e := _evaluation(run, split))]


def _text(run: RunSummary, split: str) -> str | None:
    """The hash of a text as it is, whatever its tokens."""
    found: str | None = run.fact("data")["splits"].get(split, {}).get("text_sha256")
    return found


def _is_one(values: Sequence[Any]) -> bool:
    """Whether all are the same; there may be none."""
    return all(value == values[0] for value in values)
