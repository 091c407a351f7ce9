"""Recipes: everything that decides how a run turns out, as dataclasses and as YAML."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

from torchdefine.errors import UserError
from torchdefine.recipe.sections import (
    ContextSettings,
    DataSettings,
    EmbeddingSettings,
    EvalSettings,
    OptimSettings,
    OutputSettings,
    ScheduleSettings,
    TrainSettings,
    require,
)
from torchdefine.recipe.settings import merge, read_settings, require_settings, to_plain
from torchdefine.recipe.translation_sections import BeamSettings, BitextSettings, TransformerSettings
from torchdefine.spelling import did_you_mean

FORMAT_VERSION = 1
FILE_ENDINGS = (".yaml", ".yml")
"""A recipe whose name has such an ending is a file; any other name is that of a shipped one."""
RUN_SETTINGS_FILE = "config.yaml"
"""The file with a run's recipe; a folder that has it is a run."""
SECTIONS_OF_THE_OTHER_TASK = {"language": ("bitext", "transformer", "beam"), "translation": ("context", "eval")}
SECTIONS_OF_THE_MODEL = {
    "embedding": EmbeddingSettings,
    "context": ContextSettings,
    "output": OutputSettings,
    "transformer": TransformerSettings,
}
"""The sections that a recipe's description is about."""


OF_STREAMS = ("batch_size", "length", "random_length")
"""Training settings that translators do not use."""


@dataclass(frozen=True)
class Recipe:
    """One row of a table, or your own."""

    name: str = ""
    description: str = ""
    published: dict[str, float] = field(default_factory=dict)
    """Numbers of the paper for this row: millions of parameters by part, perplexities, BLEU."""
    task: Literal["language", "translation"] = "language"
    data: DataSettings = field(default_factory=DataSettings)
    embedding: EmbeddingSettings = field(default_factory=EmbeddingSettings)
    context: ContextSettings = field(default_factory=ContextSettings)
    output: OutputSettings = field(default_factory=OutputSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    train: TrainSettings = field(default_factory=lambda: TrainSettings(epochs=1))
    eval: EvalSettings = field(default_factory=EvalSettings)
    bitext: BitextSettings = field(default_factory=BitextSettings)
    transformer: TransformerSettings = field(default_factory=TransformerSettings)
    beam: BeamSettings = field(default_factory=BeamSettings)

    def __post_init__(self) -> None:
        require(
            self.task != "language" or self.train.batch_size % self.train.accumulate == 0,
            f"train.batch_size {self.train.batch_size} cannot be cut into {self.train.accumulate} equal parts.",
        )
        self._check_sections()
        joint = self.bitext.joint or self.data.tokenizer is not None
        require(
            joint or self.transformer.share != "embedding",
            "A shared embedding needs one BPE for both languages: use bitext.joint true, or another transformer.share.",
        )
        if self.embedding.kind == "tokens" and self.embedding.map == "adaptive":
            require(
                not (self.output.tied and self.output.kind == "full"),
                "A tied full output does not fit the adaptive map: use output.kind adaptive, another embedding.map, or "
                "output.tied false.",
            )

    def _check_sections(self) -> None:
        """Refuse sections that have no effect: each task has its own."""
        defaults = {f.name: f.default_factory for f in dataclasses.fields(self) if f.name in SECTIONS}
        for section in SECTIONS_OF_THE_OTHER_TASK[self.task]:
            require(
                getattr(self, section) == defaults[section](),  # type: ignore[operator]
                f"The section {section} is not for the task {self.task}, so it would have no effect: leave it out"
                + (", and set layers and widths in the section transformer." if section == "context" else "."),
            )
        ours, default = self.train, TrainSettings(epochs=1)
        require(
            self.task != "translation" or all(getattr(ours, name) == getattr(default, name) for name in OF_STREAMS),
            f"train.{', '.join(OF_STREAMS)} are for streams of text: use bitext.batch_tokens.",
        )

    def used_sections(self) -> list[str]:
        """The sections that the recipe's task has; all others are at their defaults."""
        return [section for section in SECTIONS if section not in SECTIONS_OF_THE_OTHER_TASK[self.task]]

    def trains_by_validations(self) -> bool:
        """Whether validations decide how training goes on, so that more of them would change the run."""
        by_stalls = self.optim.averaging == "stalled" or self.train.stop_when_stalled
        return by_stalls or self.schedule.kind == "plateau"

    def to_plain(self) -> dict[str, Any]:
        """Plain values for YAML or JSON, of the sections that the task has."""
        return {k: v for k, v in to_plain(self).items() if k not in SECTIONS_OF_THE_OTHER_TASK[self.task]}

    def to_yaml(self) -> str:
        values = {"format_version": FORMAT_VERSION, **self.to_plain()}
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


SECTIONS = [f.name for f in dataclasses.fields(Recipe) if f.name not in ("name", "description", "published", "task")]


def recipe_names() -> list[str]:
    """The recipes that come with the package; those whose name starts with an underscore are only bases."""
    root = resources.files("torchdefine") / "recipes"
    with resources.as_file(root) as folder:
        found = [str(p.relative_to(folder).with_suffix("")) for p in folder.rglob("*.yaml")]
    return sorted(name for name in found if not name.rsplit("/", 1)[-1].startswith("_"))


def recipes_below(name: str) -> list[str]:
    """The shipped recipes whose names begin with that of a folder of them."""
    return [one for one in recipe_names() if name.rstrip("/") and one.startswith(f"{name.rstrip('/')}/")]


def short_name(name: str) -> str:
    """A recipe's name without the folders and the ending of a file."""
    return Path(name).stem if name.endswith(FILE_ENDINGS) else name


def load_recipe(name: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """A shipped recipe by name, or a YAML file by path, with overrides by section: ``{"optim": {"lr": 10}}``."""
    below, given = _read_recipe(str(name)), overrides or {}
    values = _choose_measure(merge(below, given), given)
    values.pop("format_version", None)
    values["description"] = _true_description(below, given)
    recipe = read_settings(Recipe, {"name": str(name), **values})
    return _validated_on_the_way(recipe, given.get("train") or {})


def _true_description(below: Mapping[str, Any], above: Mapping[str, Any]) -> Any:
    """The description of ``below`` with the changes that ``above`` makes to the model, or the latter's own."""
    if "description" in above:
        return above["description"]
    description, changed = below.get("description", ""), ", ".join(_changes_of_the_model(below, above))
    if not changed:
        return description
    return f"{description}, changed by {changed}" if description else f"Changed by {changed}"


def _changes_of_the_model(below: Mapping[str, Any], above: Mapping[str, Any]) -> list[str]:
    changed = []
    for section, kind in SECTIONS_OF_THE_MODEL.items():
        given, under = above.get(section), below.get(section) or {}
        if isinstance(given, Mapping) and isinstance(under, Mapping):  # others are refused when they are read
            before = {**vars(kind()), **under}
            texts = {name: (_as_text(before.get(name)), _as_text(value)) for name, value in given.items()}
            changed += [f"{section}.{name} {new}" for name, (old, new) in texts.items() if new != old]
    return changed


def _as_text(value: Any) -> str:
    """A value as a command line writes it, so that equal values compare equal wherever they were written."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return value.strip("[]() ").replace(" ", "") if isinstance(value, str) else str(value)


def _validated_on_the_way(recipe: Recipe, given: Mapping[str, Any]) -> Recipe:
    """At least five validations for a run whose caller set its steps but not ``eval_every``."""
    training = recipe.train
    if "steps" not in given or training.steps is None or "eval_every" in given or recipe.trains_by_validations():
        return recipe
    every = min(training.eval_every, for_five_validations(training.steps))
    return dataclasses.replace(recipe, train=dataclasses.replace(training, eval_every=every))


def for_five_validations(steps: int) -> int:
    """How many steps apart five validations are, the last of them at the end."""
    return -(-steps // 5)


def _choose_measure(values: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """An override of steps replaces a recipe's epochs, and the other way round."""
    given = overrides.get("train")
    if not isinstance(given, Mapping):  # refused when it is read
        return values
    chosen = {name for name in ("steps", "epochs") if str(given.get(name)).lower() not in ("none", "null")}
    if len(chosen) == 1:
        values = merge(values, {"train": {({"steps", "epochs"} - chosen).pop(): None}})
    return values


def _read_recipe(name: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    if name in above:
        raise UserError(f"The recipe {name} is its own base: {' → '.join([*above, name])}.")
    values = _parse(*_recipe_text(name))
    base = values.pop("base", None)
    bases = base if isinstance(base, list) else [base] if base is not None else []
    below: dict[str, Any] = {}
    for one in bases:  # each over those before it, and the recipe's own values over all
        require(isinstance(one, str), f"A base of the recipe {name} is {one!r}, but must be a name or a file.")
        if one.endswith(FILE_ENDINGS) and not Path(one).is_absolute():
            one = os.path.normpath(Path(name).parent / one)  # files refer to their neighbours
        inherited = _read_recipe(one, (*above, name))
        inherited.pop("published", None)  # the numbers of another row
        below = _choose_measure(merge(below, inherited), inherited)
    if below.get("description"):
        values["description"] = _true_description(below, values)
    return _choose_measure(merge(below, values), values)


def _recipe_text(name: str) -> tuple[str, str]:
    if name.endswith(FILE_ENDINGS):
        path = Path(name)
        if not path.is_file():
            raise UserError(f"The recipe file {name} does not exist.")
        try:
            return name, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise UserError(f"The recipe file {name} is not UTF-8 text: save it as such.") from None
    shipped = resources.files("torchdefine") / "recipes" / f"{name}.yaml"
    if not shipped.is_file():
        _refuse_run(Path(name))
        below = recipes_below(name)
        if below:
            shown = ", ".join(below[:8]) + (f" and {len(below) - 8} more" if len(below) > 8 else "")
            raise UserError(f"{name!r} is no recipe, but some begin so: name one of {shown}.")
        close = did_you_mean(name, recipe_names())
        way_out = close if "did you mean" in close else ": `torchdefine recipes` lists them all."
        raise UserError(f"The recipe {name!r} is unknown{way_out}")
    return name, shipped.read_text(encoding="utf-8")


def _refuse_run(path: Path) -> None:
    """A run is easily named in place of its recipe, or the other way round."""
    own = path / RUN_SETTINGS_FILE
    if own.is_file():
        resume = f"torchdefine train --out {shlex.quote(str(path))} --resume"
        raise UserError(f"{path} is a run and no recipe: go on with it by `{resume}`, or name its recipe, {own}.")


class _EachOnce(yaml.SafeLoader):
    """Refuses a setting that stands in a mapping twice, since only one would count."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        for (key, _), name in zip(node.value, names, strict=True):
            if names.count(name) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{name!r} is set twice", key.start_mark)
        return super().construct_mapping(node, deep)


def _parse(name: str, text: str) -> dict[str, Any]:
    try:
        values = _EachOnce(text).get_single_data()
    except yaml.YAMLError as error:
        raise UserError(f"The recipe {name} is not valid YAML{_yaml_problem(text, error)}.") from None
    if not isinstance(values, dict):
        raise UserError(f"The recipe {name} holds no settings: a mapping of sections was expected.")
    version = values.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise UserError(f"The recipe {name} has format version {version}; this torchdefine reads {FORMAT_VERSION}.")
    for section in values.keys() & set(SECTIONS):  # here, before values merged over them hide it
        if values[section] is None:  # all its lines are comments, say
            del values[section]
        else:
            require_settings(values[section], section)
    return values


def _yaml_problem(text: str, error: yaml.YAMLError) -> str:
    """The end of a sentence on where and why a text is not YAML."""
    if isinstance(error, yaml.reader.ReaderError):
        return f" in line {text.count(chr(10), 0, error.position) + 1}: {error.reason}"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f": {' '.join(str(error).split())}"
    row, column = error.problem_mark.line, error.problem_mark.column
    if text.split("\n")[row][column:].startswith("\t"):
        return f" in line {row + 1}, which has a tab: indent by spaces"
    return f" in line {row + 1}, column {column + 1}: {error.problem}"
