"""Whether runs may be compared: why their numbers do not compare, and what differs beside their embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torchdefine.analysis.run_summary import RunSummary
from torchdefine.data.token_file import LOSS_THAT_COUNTS
from torchdefine.embedding import MapConfig, UnitConfig
from torchdefine.embedding.unit_plan import default_max_groups
from torchdefine.spelling import listed
from torchdefine.task import Recipe, find_task
from torchdefine.training.loop import for_five_validations

SPLITS = ("valid", "test")
UNKNOWN_MAY_DIFFER = 0.001
"""Fraction of a text. A model is credited with all the bytes of a word of which it only has to say <unk>."""
PASSES_MAY_DIFFER = 1.01
"""By this factor."""
MOST_SETTINGS_NAMED = 6
SPOKEN_OF_ELSEWHERE = ("task", "data", "embedding", "unit", "source", "output", "eval")
"""Sections whose differences are what is compared, or show in texts, vocabularies and protocols …"""
WAYS_TO_TRAIN = ("embedding.row_dropout", "embedding.map_dropout")
"""… but for these, which any embedding may have."""
IMMATERIAL = {
    *(f"train.{name}" for name in ("seed", "log_every", "checkpoint_every", "keep", "cuda_graphs", "compile")),
    "beam.batch_size",
    "context.output_dim",  # shows in the parameters of the context model
}
NO_SUCH_SETTING = "–"


def differing_settings(recipes: Sequence[Recipe]) -> list[list[str]]:
    """A row for each: its name, and its value in every recipe, or a dash where the recipe has none of that name.

    What only some recipes have is left out where these leave it at its default. So is a value that follows from other
    settings, written out or not.
    """
    settings = [_flat(recipe, recipe.to_plain()) for recipe in recipes]
    implied = [_implied(recipe) for recipe in recipes]
    usual = [_flat(recipe, recipe.defaults()) | own for recipe, own in zip(recipes, implied, strict=True)]
    _forget_derived_validations(settings)
    rows = []
    for name in dict.fromkeys(name for one in settings for name in one):
        own = [one.get(name, known.get(name, NO_SUCH_SETTING)) for one, known in zip(settings, implied, strict=True)]
        chosen = any(name in one and one[name] != below[name] for one, below in zip(settings, usual, strict=True))
        everywhere = all(name in one and name not in known for one, known in zip(settings, implied, strict=True))
        if not _is_one(own) and (chosen or everywhere):
            rows.append([name, *("none" if value is None else str(value) for value in own)])
    return rows


def _flat(recipe: Recipe, plain: dict[str, Any]) -> dict[str, Any]:
    settings = {f"{section}.{name}": value for section in recipe.sections() for name, value in plain[section].items()}
    return {"task": recipe.task, **settings}


def _implied(recipe: Any) -> dict[str, Any]:
    """The values that settings take where a recipe leaves them open, as far as they are known without a text."""
    embedding, unit, context, output, evaluation, train = (
        getattr(recipe, section, None) for section in ("embedding", "unit", "context", "output", "eval", "train")
    )
    known: dict[str, Any] = {}
    if isinstance(embedding, MapConfig):
        given, mapped = getattr(unit, "embedding_dim", None), getattr(embedding, "output_dim", None)
        width = given or mapped or embedding.map_dim
        std, widths = round(embedding.map_dim**-0.5, 6), {"table": embedding.map_dim, "finished": width}
        known = {
            "embedding.init_std": std,
            "embedding.projection_std": std,
            "embedding.output_dim": given or embedding.map_dim,
            "unit.embedding_dim": mapped or embedding.map_dim,
            "context.output_dim": widths.get(getattr(output, "tied", "none"), getattr(context, "hidden_dim", None)),
            "context.head_dim": width // getattr(context, "heads", 1),
            "context.inner_dim": 4 * width,
        }
    if isinstance(unit, UnitConfig):
        known |= {"unit.max_groups": default_max_groups(unit.depth)}
        planned = {name: value for name, value in vars(unit.planned()).items() if value != getattr(unit, name)}
        known |= {f"unit.{name}": value for name, value in planned.items()}
    known["context.eval_memory"] = getattr(context, "memory", None)
    known["eval.valid_batch_size"] = getattr(evaluation, "batch_size", None)
    known["train.epochs"] = 1.0 if getattr(train, "steps", None) is None else None
    names = {f"{section}.{name}" for section in recipe.sections() for name in vars(getattr(recipe, section))}
    return {name: value for name, value in known.items() if value is not None and name in names}


def _forget_derived_validations(settings: Sequence[dict[str, Any]]) -> None:
    """Take out steps between validations that follow from the number of steps, if no others differ."""
    every, steps = "train.eval_every", "train.steps"
    known = [one for one in settings if every in one]
    chosen = {one[every] for one in known if not one.get(steps) or one[every] != for_five_validations(one[steps])}
    if len(chosen) <= 1:
        for one in settings:
            one.pop(every, None)


def why_incomparable(runs: Sequence[RunSummary]) -> list[str]:
    """Why perplexities do not compare, a sentence each; empty where they do."""
    tasks = dict.fromkeys(run.recipe.task for run in runs)
    if len(tasks) > 1:
        shown = ", ".join(tasks)
        return [f"The runs are of different tasks ({shown}): compare only their parameters."]
    found = []
    measured = {split: [run for run in runs if run.evaluation(split)] for split in SPLITS}
    same_texts = all(_is_one([_text(run, split) for run in measured[split]]) for split in SPLITS)
    if not same_texts:
        found.append("The runs were evaluated on different texts: do not compare perplexities or bits per byte.")
    if not all(_is_one([run.evaluation(split).get("protocol") for run in measured[split]]) for split in SPLITS):
        found.append("The runs were evaluated by different protocols: perplexities can only be compared roughly.")
    evaluated = [run for run in runs if run.fact("evaluation")]
    if not _is_one([run.fact("data")["vocabulary_sha256"] for run in evaluated]):
        checks = (_lost_characters, _different_fractions_unknown) if same_texts else ()
        reasons = (check(evaluated, split) for check in checks for split in ("test", "valid"))
        if reason := next(filter(None, reasons), ""):
            found.append(f"The vocabularies differ, {reason}: do not compare perplexities or bits per byte.")
        else:
            instead = "; compare bits per byte instead" if same_texts else ""
            found.append(f"The runs have different vocabularies: do not compare perplexities{instead}.")
    return found


def _lost_characters(runs: Sequence[RunSummary], split: str) -> str:
    """The middle of a sentence, or nothing where no run is known to be without a part of the text."""
    lost = {run.name: run.fact("data")["splits"].get(split, {}).get("lost_share") or 0.0 for run in runs}
    most = max(lost, key=lost.__getitem__)
    if lost[most] < LOSS_THAT_COUNTS:
        return ""
    return f"and the tokenizer of {most} loses {lost[most]:.1%} of the characters of the {split} text"


def _different_fractions_unknown(runs: Sequence[RunSummary], split: str) -> str:
    """The middle of a sentence, or nothing where the fractions are alike.

    Tokens are compared by number, not by fraction: an <unk> that stands in the text itself, as WikiText has many, is
    one token in every vocabulary, though one of more words than of subwords.
    """
    evaluated = {run.name: e for run in runs if "unknown_share" in (e := run.evaluation(split))}
    unknown = {name: e["unknown_share"] * e["tokens"] for name, e in evaluated.items()}
    most, fewest = max(unknown, key=unknown.__getitem__, default=""), min(unknown, key=unknown.__getitem__, default="")
    may_differ = UNKNOWN_MAY_DIFFER * min((e["tokens"] for e in evaluated.values()), default=0)
    if not unknown or unknown[most] - unknown[fewest] <= may_differ:
        return ""
    more, less = (f"{evaluated[name]['unknown_share']:.1%}" for name in (most, fewest))
    return f"so that {more} of the {split} text is <unk> in {most} and {less} in {fewest}"


def what_else_differs(runs: Sequence[RunSummary]) -> list[str]:
    """What the runs of a task had for their training beside their embeddings, where it was not the same."""
    if not _is_one([run.recipe.task for run in runs]):
        return []
    found = []
    finished = [run for run in runs if run.result is not None]
    tokens = [run.fact("tokens") for run in finished]
    same_text, same_tokens = _is_one([_text(run, "train") for run in finished]), _is_one(tokens)
    if not same_text:
        found.append("The runs were trained on different texts.")
    if not same_tokens:
        found.append(f"The runs were trained on different numbers of tokens, from {min(tokens):,} to {max(tokens):,}.")
    elif same_text and finished:
        passes = [run.fact("tokens") / run.fact("data")["splits"]["train"]["tokens"] for run in finished]
        if max(passes) > PASSES_MAY_DIFFER * min(passes):  # as words are beside subwords
            found.append(
                "The runs were trained on equally many tokens, but on different amounts of text: from "
                f"{min(passes):.3g} to {max(passes):.3g} passes over it."
            )
    return [*found, *_different_context_models(runs), *_different_settings(runs, tokens_named=not same_tokens)]


def _different_context_models(runs: Sequence[RunSummary]) -> list[str]:
    counts = {run.name: run.parameters["context"] for run in runs if run.parameters}
    if _is_one(list(counts.values())):
        return []
    most, fewest = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
    largest, smallest = f"{counts[most] / 1e6:.3f} M parameters in {most}", f"{counts[fewest] / 1e6:.3f} M in {fewest}"
    reason = ""
    recipes: list[Any] = [run.recipe for run in runs]
    if all(hasattr(recipe, "context") and hasattr(recipe.context, "output_dim") for recipe in recipes):
        widths = [
            recipe.context.output_dim or recipe.embedding.map_dim for recipe in recipes if recipe.output.tied == "table"
        ]
        left_open = any(recipe.context.output_dim is None for recipe in recipes)
        if len(widths) == len(recipes) and left_open and not _is_one(widths):
            reason = (
                ". The last layer of a tied LSTM is as wide as embedding.map_dim; to compare embeddings alone, give "
                f"all runs --context.output_dim {max(widths)}"
            )
    if not reason and any(name == "unit.embedding_dim" for name, *_ in differing_settings(recipes)):
        reason = ". Its size follows from the width of its input, unit.embedding_dim"
    return [f"The context models differ in size: {largest}, {smallest}{reason}."]


def _different_settings(runs: Sequence[RunSummary], *, tokens_named: bool) -> list[str]:
    """One sentence; steps and epochs are left out where the numbers of tokens are named already."""
    silent = IMMATERIAL | ({"train.steps", "train.epochs"} if tokens_named else set())
    computed = []
    for run in runs:  # on a CPU the precision is not always the one that was asked for
        precision = (run.result or {}).get("precision", run.recipe.train.precision)
        computed.append(replace(run.recipe, train=replace(run.recipe.train, precision=precision)))
    shown = [
        f"{name} ({', '.join(dict.fromkeys(values))})"
        for name, *values in differing_settings(computed)
        if (name.partition(".")[0] not in SPOKEN_OF_ELSEWHERE or name in WAYS_TO_TRAIN) and name not in silent
    ]
    named = listed(shown, MOST_SETTINGS_NAMED)
    return [f"Settings other than those of embedding and output differ: {named}."] if shown else []


def which_texts_are_short(runs: Sequence[RunSummary]) -> list[str]:
    """A sentence for each text of which a reader must know something about the perplexities, such as of a short one."""
    found: dict[str, str] = {}
    for run in runs:
        if run.result is not None:
            found |= find_task(run.recipe.task).caveats(run.result, run.recipe)
    return [f"{sentence} With it, another model may be the best." for sentence in found.values()]


def what_is_missing(runs: Sequence[RunSummary]) -> list[str]:
    """Which runs are unfinished, and which were never evaluated."""
    without: dict[str, list[str]] = {"valid or test": [], "valid": [], "test": []}
    for run in runs:
        missing = " or ".join(split for split in SPLITS if not run.evaluation(split))
        if run.result is not None and missing:
            without[missing].append(run.name)
    found = []
    for missing, names in without.items():
        if names:
            were, have = ("was", "it has") if len(names) == 1 else ("were", "they have")
            found.append(f"{' and '.join(names)} {were} not evaluated: {have} no {missing} text.")
    return found + [run.status for run in runs if run.status]


def _text(run: RunSummary, split: str) -> str | None:
    """The hash of a text as it is, whatever its tokens."""
    return run.fact("data")["splits"].get(split, {}).get("text_sha256")


def _is_one(values: Sequence[Any]) -> bool:
    """Whether all are the same; there may be none."""
    return all(value == values[0] for value in values)
