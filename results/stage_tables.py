"""The tables and figures of the stages, from the JSON of their rows: `make results`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from curves import draw_curves
from old_names import published_row, read_run, settings_of
from provenance import short_commit
from run_stage import agrees, best_settings, own_settings, read_stage
from speed import training_speed

from torchdefine.errors import UserError
from torchdefine.files import read_json
from torchdefine.recipe import load_recipe, merged

HERE = Path(__file__).parent
COMPARISONS = ("decisive", "depth", "ablation-clean", "ablation", "decisive-rate-10")
SEARCHES = (
    *("higher-rates", "still-higher-rates", "table-scales", "unit-choices"),
    *("unit-rates", "projection-rates", "tuning", "long-rates"),
)
"""As a reader asks for them; they run in another order."""
HEADER = (
    *("row", "unit", "context", "tables", "total M", "seeds", "valid", "test", "range", "against reference"),
    *("input RMS", "clipped", "ms/step", "tokens/s", "M tokens", "other text", "paper's test"),
)


EXPLAINED = """\
A stage is a set of runs on wiki78m that are compared. [Does DeFINE deliver?](../docs/evidence.md)
explains the names of the rows and draws the conclusions. "unit", "context", "tables" and "total" are
millions of parameters. "valid" and "test" are perplexities, "range" the highest minus the lowest test
perplexity of two seeds. "input RMS" is the root mean square of the LSTM's input after training. "clipped"
is the fraction of steps whose gradient was clipped. "other text" is the perplexity on the official test
text of WikiText-103."""

STEPS_TO_TELL = 2000
"""Shorter runs spend too much of their time on their start for their speed to mean anything."""


def stages_page(title: str, folder: Path, stages: Sequence[str]) -> str:
    """Those of the stages that have run on one text, and the names of those that have not."""
    run = [stage for stage in stages if any((folder / stage).glob("*.json"))]
    waiting = [f"`{stage}`" for stage in stages if stage not in run]
    said = f"Stages of `results/run_stage.py` that have not been run: {', '.join(waiting)}." if waiting else ""
    parts = [f"# {title}", EXPLAINED, *(stage_section(folder / stage) for stage in run), said]
    return "\n\n".join(part for part in parts if part) + "\n"


def stage_section(folder: Path) -> str:
    """All rows of a stage, those that have not run too."""
    described = yaml.safe_load((HERE / "stages" / f"{folder.name}.yaml").read_text())
    by_row = read_rows(folder)
    reference = by_row.get(described.get("reference", ""))
    lines = [
        f"## {described['title']}",
        "",
        "| " + " | ".join(HEADER) + " |",
        "|---" + "|---:" * (len(HEADER) - 1) + "|",
    ]
    for row in described["rows"]:
        lines.append("| " + " | ".join([row["name"], *row_cells(by_row.get(row["name"]), reference)]) + " |")
    said = [*taken(described, by_row), how_timed(folder)]
    lines += [f"\n{sentence}" for sentence in said if sentence]
    finished = finished_in_order(described, by_row)
    if gaps := gaps_of(folder):
        lines += ["", gaps]
    if finished:
        lines += ["", origin([run for runs in finished.values() for run in runs])]
        picture = draw_curves(f"stage-{folder.name}", {name: runs[0] for name, runs in finished.items()})
        lines += ["", f"![Validation perplexity]({picture})"]
    return "\n".join(lines)


def compact_table(folder: Path) -> str:
    """What a reader in a hurry wants of a stage: sizes, perplexities and distances."""
    described = yaml.safe_load((HERE / "stages" / f"{folder.name}.yaml").read_text())
    by_row = read_rows(folder)
    wanted = ("total M", "seeds", "valid", "test", "range", "against reference", "other text")
    lines = ["| row | " + " | ".join(wanted) + " |", "|---" + "|---:" * len(wanted) + "|"]
    for row in described["rows"]:
        cells = row_cells(by_row.get(row["name"]), by_row.get(described["reference"]))
        by_name = dict(zip(HEADER[1:], cells, strict=True))
        lines.append("| " + " | ".join([row["name"], *(by_name[name] for name in wanted)]) + " |")
    return "\n".join(lines)


def gaps_of(folder: Path) -> str:
    """How far the rows of a stage were from its reference while training went on; empty where that has not run."""
    described = read_stage(folder.name)
    finished, reference = finished_in_order(described, read_rows(folder)), described.get("reference")
    return gap_table(finished, reference) if reference in finished else ""


def finished_in_order(
    described: dict[str, Any], by_row: dict[str, list[dict[str, Any]]]
) -> dict[str, list[dict[str, Any]]]:
    """The rows that ran to their end, as their stage lists them."""
    names = [row["name"] for row in described["rows"]]
    return {name: by_row[name] for name in names if name in by_row and not diverged(by_row[name])}


def gap_table(rows: dict[str, list[dict[str, Any]]], reference: str) -> str:
    """How far every row was from the reference while training went on: means over seeds, on the validation text."""
    of_reference = mean_curve(rows[reference])
    tokens = list(of_reference)[1::2]
    lines = [
        f"Validation perplexity during training, relative to *{reference}*, means over seeds:",
        "",
        "| row | " + " | ".join(f"{count / 1e6:.0f} M tokens" for count in tokens) + " |",
        "|---" + "|---:" * len(tokens) + "|",
    ]
    for name, runs in rows.items():
        if name != reference:
            own = mean_curve(runs)
            cells = [f"{own[count] / of_reference[count] - 1:+.1%}" if count in own else "–" for count in tokens]
            lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines)


def mean_curve(runs: list[dict[str, Any]]) -> dict[int, float]:
    """The validation perplexity by tokens, where all seeds have one."""
    curves = [{point["tokens"]: point["perplexity"] for point in run["curve"]} for run in runs]
    return {
        tokens: mean(curve[tokens] for curve in curves)
        for tokens in curves[0]
        if all(tokens in curve for curve in curves)
    }


def read_rows(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The runs of every row, by its name, and how fast a step is alone where `time_rows.py` has measured it."""
    alone = timed_alone(folder).get("rows", {})
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        run = read_run(path)
        if not is_stale(run, folder):
            found.setdefault(run["row"], []).append({**run, "alone": alone.get(run["row"])})
    return found


def timed_alone(folder: Path) -> dict[str, Any]:
    """What `time_rows.py` has written of a stage; empty where it has not."""
    speeds = folder.parent / "speeds.json"
    found: dict[str, Any] = read_json(speeds)["stages"].get(folder.name, {}) if speeds.exists() else {}
    return found


def how_timed(folder: Path) -> str:
    """A sentence on the speeds of rows that trained beside others; empty where there are none."""
    timed = timed_alone(folder)
    if not timed:
        return ""
    return (
        "The rows were trained in parallel, so ms/step and tokens/s were timed separately, one row at a time. The "
        f"timed steps read words of {timed['text']}, mapped to a vocabulary of {timed['vocabulary']:,}: "
        f"{timed['hardware']['gpu']}, torch "
        f"{timed['versions']['torch']}, commit {short_commit(timed['commit'])}."
    )


def is_stale(run: dict[str, Any], folder: Path) -> bool:
    """Whether a run has not the settings that its stage takes now, as far as the stages that it takes have run."""
    described = read_stage(folder.name)
    row = next((row for row in described["rows"] if row["name"] == run["row"]), None)
    if row is None:
        return True
    said: dict[str, Any] = {}
    for stage in [*described.get("takes", ()), *row.get("takes", ())]:
        with suppress(UserError):  # it has not run to its end
            said = merged(said, best_settings([stage], folder.parent))
    return not agrees({"recipe": row["recipe"], **merged(said, own_settings(row))}, run["settings"])


def taken(described: dict[str, Any], by_row: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Which rows ran with the settings of which rows of other stages."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in described["rows"]:
        for stage in [*described.get("takes", ()), *row.get("takes", ())]:
            for run in by_row.get(row["name"], ()):
                names = found.setdefault((stage, taken_row(stage, run)), [])
                if row["name"] not in names:
                    names.append(row["name"])
    everybody = [row["name"] for row in described["rows"] if row["name"] in by_row]
    return [
        f"Settings taken from the row *{name}* of the stage `{stage}`: "
        + ("all rows." if names == everybody else ", ".join(f"*{each}*" for each in names) + ".")
        for (stage, name), names in found.items()
    ]


def taken_row(stage: str, run: dict[str, Any]) -> str:
    """The row of a stage that a run has the settings of: of several that agree, the one that says most."""
    agreeing = [row for row in read_stage(stage)["rows"] if agrees(row, run["settings"])]
    most = max(agreeing, key=lambda row: sum(map(len, own_settings(row).values())), default={"name": "unknown"})
    return str(most["name"])


def row_cells(runs: list[dict[str, Any]] | None, reference: list[dict[str, Any]] | None) -> list[str]:
    """Everything behind a row's name; a row of which one seed diverged has no numbers."""
    if runs is None:
        return ["not run"] * (len(HEADER) - 1)
    if diverged(runs):
        return ["diverged"] * (len(HEADER) - 1)
    return cells_of(runs, None if reference is None or diverged(reference) else reference)


def diverged(runs: list[dict[str, Any]]) -> bool:
    """Whether one of a row's seeds did."""
    return any("diverged" in run for run in runs)


def cells_of(runs: list[dict[str, Any]], reference: list[dict[str, Any]] | None) -> list[str]:
    parameters = runs[0]["parameters"]
    tests = [run["test_perplexity"] for run in runs]
    published = published_test(runs[0])
    other = [run["also"]["test"]["perplexity"] for run in runs if "test" in run.get("also", {})]
    return [
        *(f"{parameters[part] / 1e6:.2f}" for part in ("define", "context", "input_output", "total")),
        str(len(runs)),
        f"{mean(run['valid_perplexity'] for run in runs):.2f}",
        f"{mean(tests):.2f}",
        f"{max(tests) - min(tests):.2f}" if len(runs) > 1 else "–",
        "–" if reference is None else f"{mean(tests) / mean(r['test_perplexity'] for r in reference) - 1:+.1%}",
        mean_of("input_rms", runs),
        clipped(runs),
        *speed_cells(runs),
        f"{runs[0]['tokens'] / 1e6:.1f}",
        f"{mean(other):.2f}" if other else "–",
        "–" if published is None else f"{published}",
    ]


def mean_of(name: str, runs: list[dict[str, Any]]) -> str:
    """Over those that have it: some are older than the question."""
    known = [run[name] for run in runs if name in run]
    return f"{mean(known):.2f}" if known else "–"


def clipped(runs: list[dict[str, Any]]) -> str:
    share = clipped_share(runs)
    return "–" if share is None else f"{share:.0%}"


def clipped_share(runs: list[dict[str, Any]]) -> float | None:
    """In how many of the logged steps after the first tenth the gradient was cut down; None where nobody looked."""
    norms = [
        (point["gradient_norm"], run["settings"]["optim"]["clip"])
        for run in runs
        for point in run.get("train_curve", ())
        if "gradient_norm" in point and point["step"] > run["steps"] / 10
    ]
    return mean(norm > clip for norm, clip in norms) if norms else None


def speed_cells(runs: list[dict[str, Any]]) -> list[str]:
    """Milliseconds a step and tokens a second, of the runs that had a device to themselves, or of steps timed alone."""
    own = [run for run in runs if not run.get("shared_device")]
    if own and own[0]["steps"] < STEPS_TO_TELL:
        return ["–", "–"]
    if own:
        step = mean(1e3 * run["tokens"] / training_speed(run) / run["steps"] for run in own)
        return [f"{step:.1f}", f"{mean(training_speed(run) for run in own):,.0f}"]
    if alone := runs[0].get("alone"):
        return [f"{alone['ms']:.1f}", f"{1e3 * alone['tokens'] / alone['ms']:,.0f}"]
    return ["–", "–"]


def published_test(run: dict[str, Any]) -> float | None:
    """The paper's test perplexity, where a row's model is the paper's.

    What the paper does not say of its unit may differ, norms, the scale of what comes in and how weights are kept, and
    so may `state_dropout`, which all rows of a stage have.
    """
    unsaid = {"context": {"state_dropout": 0.0}}
    if run["parameters"]["define"]:
        unsaid |= {"embedding": {"scale": "none"}, "unit": {"norm": "", "weight_scaling": False}}
    row = load_recipe(published_row(run["recipe"]))
    papers = settings_of(row)
    for section in ("embedding", "unit", "context", "output", "loss"):
        one, other = ({**each[section], **unsaid.get(section, {})} for each in (run["settings"], papers))
        if one != other:
            return None
    return row.published.get("test_perplexity")


def origin(runs: list[dict[str, Any]]) -> str:
    """What all runs of a stage have in common, and a warning where they do not."""
    facts = {
        "text": {run["data"]["corpus"] for run in runs},
        "steps": {f"{run['steps']:,}" for run in runs},
        "rate": {f"{run['settings']['optim']['lr']:g}" for run in runs},
        "precision": {run["precision"] for run in runs},
        "hardware": {run["hardware"].get("gpu") or run["hardware"]["cpu"] for run in runs},
        "commit": {short_commit(run["commit"]) for run in runs},
        "SHA-256 of the training text": {run["data"]["splits"]["train"]["text_sha256"] for run in runs},
        "SHA-256 of its tokens": {run["data"]["splits"]["train"]["tokens_sha256"] for run in runs},
        "other text": {run["also"]["corpus"] for run in runs if "also" in run} or {"none"},
    }
    return "; ".join(f"{name} {', '.join(sorted(values))}" for name, values in facts.items()) + "."
