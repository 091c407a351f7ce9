"""Writes results/benchmarks/README.md and its figures from the rows beside it: `make results`."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from marked import write_between_marks
from provenance import short_commit

HERE = Path(__file__).parent
ROWS, FIGURES = HERE / "benchmarks", HERE / "figures"
COMPILED = "plain loop, its model compiled"
FORMAT, FORMAT_VERSION = "torchdefine benchmark", 1
COLOURS = {"nn.Embedding": "tab:blue", "table and projection": "tab:orange", "DeFINE": "tab:green"}
UNITS = {"vocabulary": "words in the vocabulary", "depth": "depth of the unit", "tokens": "tokens at once"}

RECORDED = ("attention", "kernels", "output", "unit")
COUNTED_SINCE = "2026-11-20"
"""Before, what a recording on a GPU takes was not counted, nor its weights, so that its peak was far too small."""

INTRODUCTION = """# Benchmarks

`make results` writes this page from the rows in this folder; no number is typed by hand. `python -m benchmarks` appends
a row, with date, commit, versions and hardware. The page shows the newest row of each benchmark on each hardware, with
small shapes apart from full ones. The rows of a table ran in one process on the same tensors. "× as fast" is relative
to the table's first row. "eager" runs without CUDA graphs. Times are medians with quartiles; wide quartiles mean that
the machine had other work. Until 2026-11-19 the memory of CUDA graphs was not counted: a dash stands for those peaks.
[How speed is measured](../../docs/benchmarks.md) explains the benchmarks.
"""

WORDS = {
    "eager twin, layer by layer": "plain torch, eager",
    "eager twin": "plain torch",
    ", kernel by kernel": ", eager",
    ", recorded where there is a GPU": ", CUDA graphs on a GPU",
    ", recorded": ", CUDA graph",
    "what is recorded is forward and backward together": "a CUDA graph has forward and backward together",
    "kinds of steps recorded": "CUDA graphs",
    "share of time over": "extra time over",
    "share of matrix": "fraction of matrix",
    "the profiler's own time among them": "with the time of the profiler",
    "shares over": "fractions of the time of",
    "what matrix products and LSTM take of as many steps": "that of matrix products and LSTM in as many steps",
    " types": " words",
}
"""What stored rows call things, and what the page calls them."""


def read(path: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [r for r in records if (r.get("format"), r.get("version")) == (FORMAT, FORMAT_VERSION)]


def hardware(record: dict[str, Any]) -> str:
    facts = record["hardware"]
    threads = "1 thread" if facts["cpu_threads"] == 1 else f"{facts['cpu_threads']} threads"
    name = facts.get("gpu") or f"{facts['cpu']}, {threads}"
    return f"{name}, small shapes" if record["small"] else str(name)


def newest(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The last row of each hardware, which is the newest, since rows are appended; those of one commit together."""
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        before = found.get(place := hardware(record))
        found[place] = together(before, record) if before and before["commit"] == record["commit"] else record
    return found


def together(before: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """A benchmark that was measured part by part (``--only``)."""
    groups = dict(before["groups"])
    for name, group in record["groups"].items():
        merged = groups.get(name, group)
        groups[name] = group | {part: merged[part] | group[part] for part in ("rows", "not_run")}
    return {**record, "groups": groups}


def section(record: dict[str, Any]) -> list[str]:
    versions, commit = record["versions"], short_commit(record["commit"])
    lines = [
        f"### {hardware(record)}",
        "",
        f"{record['date']}, torch {versions['torch']}, Python {versions['python']}, commit {commit}.",
        "",
    ]
    pictures = {"growth": ("Growth", draw_growth), "step-profile": ("Steps by kind of kernel", draw_profile)}
    if record["benchmark"] in pictures:
        says, draw = pictures[record["benchmark"]]
        lines += [f"![{says}](../{draw(record).relative_to(HERE)})", ""]
    for name, group in record["groups"].items():
        leave_out_uncounted(record, group)
        lines += [f"**{name}**" + (f" ({group['note']})" if group["note"] else ""), "", *table(group), ""]
        lines += [f"- Goal: {judged(goal)}" for goal in group["goals"]]
        if group["not_run"]:
            lines.append(f"- Not run: {not_run(group['not_run'])}.")
        if lines[-1]:
            lines.append("")
    return lines


def leave_out_uncounted(record: dict[str, Any], group: dict[str, Any]) -> None:
    """Peaks of recordings from before they were counted, and what was judged by them."""
    if "gpu" not in record["hardware"] or record["benchmark"] not in RECORDED or record["date"] >= COUNTED_SINCE:
        return
    all_of_them = record["benchmark"] == "kernels" or "recorded" in group["note"]
    for name, row in group["rows"].items():
        if all_of_them or name.endswith("recorded"):
            row["peak_mib"] = None
    for goal in group["goals"]:
        if "recorded: times the peak memory" in goal["goal"]:
            goal |= {"value": None, "met": None}


def table(group: dict[str, Any]) -> list[str]:
    rows = group["rows"]
    if not rows:
        return ["None of it ran."]
    first = rows.get(group["reference"]) or next(iter(rows.values()))
    lines = ["| | × as fast | ms | quartiles | peak MiB | |", "|---|---:|---:|---:|---:|---|"]
    for name, row in rows.items():
        peak = "–" if row["peak_mib"] is None else f"{row['peak_mib']:,.0f}"
        quartiles = "–" if row["q1_ms"] is None else f"{row['q1_ms']:.3f}–{row['q3_ms']:.3f}"
        cells = [name, f"{first['ms'] / row['ms']:.2f}", f"{row['ms']:.3f}", quartiles, peak, said(row["facts"])]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def said(facts: dict[str, Any]) -> str:
    """What else is known of a row, as far as its name and the goals do not say it."""
    parts = []
    for name, value in facts.items():
        if name == "parameters":
            parts.append(f"{value / 1e6:.2f} M parameters")
        elif name == "shares":
            parts += [f"{100 * share:.0f}% {kind}" for kind, share in value.items()]
        elif name not in ("line", "axis", "at", "undisturbed"):
            parts.append(f"{name} {value}")
    return ", ".join(parts)


def judged(goal: dict[str, Any]) -> str:
    if goal["met"] is None:
        return f"{goal['goal']}: not measured."
    return f"{goal['goal']}: **{'met' if goal['met'] else 'missed'}** with {goal['value']:.3f}."


def not_run(reasons: dict[str, str]) -> str:
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())


def plotter() -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "torchdefine"  # the same file for the same numbers
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, record: dict[str, Any]) -> Path:
    slug = re.sub(r"[^a-z0-9]+", "-", hardware(record).lower()).strip("-")
    path = FIGURES / f"{record['benchmark']}-{slug}.svg"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plotter().close(figure)
    return path


def draw_profile(record: dict[str, Any]) -> Path:
    """A bar for each recipe, as long as its step takes, divided by kind of kernel."""
    rows = {name: row for group in record["groups"].values() for name, row in group["rows"].items()}
    largest: Counter[str] = Counter()
    for row in rows.values():
        largest.update({kind: share * row["ms"] for kind, share in row["facts"]["shares"].items()})
    figure, axes = plotter().subplots(figsize=(9, 1.4 + 0.36 * len(rows)), layout="constrained")
    reached = dict.fromkeys(rows, 0.0)
    for place, kind in enumerate(kind for kind, _ in largest.most_common()):
        parts = [row["facts"]["shares"].get(kind, 0.0) * row["ms"] for row in rows.values()]
        axes.barh(
            list(rows), parts, left=list(reached.values()), label=kind, color=f"C{place}" if place < 10 else "black"
        )
        reached = {name: left + part for (name, left), part in zip(reached.items(), parts, strict=True)}
    axes.invert_yaxis()
    axes.set(xlabel="ms of a training step")
    figure.legend(fontsize=8, ncols=4, loc="outside lower center")
    return save(figure, record)


def draw_growth(record: dict[str, Any]) -> Path:
    """Time and peak memory of training, and time of looking up, against each axis: log–log."""
    pictures = (("forward", "ms"), ("forward and backward", "ms"), ("forward and backward", "peak_mib"))
    figure, grid = plotter().subplots(len(UNITS), len(pictures), figsize=(11, 9), layout="constrained", sharex="row")
    for axis, panels in zip(UNITS, grid, strict=True):
        for (passes, measure), panel in zip(pictures, panels, strict=True):
            draw_lines(panel, record["groups"].get(f"{axis}, {passes}", {"rows": {}}), measure)
            panel.set(xlabel=UNITS[axis], ylabel={"ms": "ms", "peak_mib": "peak MiB"}[measure], title=passes)
            panel.set(xscale="log", yscale="log")
            panel.grid(alpha=0.3, which="both")
    grid[0][0].legend(fontsize=8)
    return save(figure, record)


def draw_lines(panel: Any, group: dict[str, Any], measure: str) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in group["rows"].values():
        if row[measure]:
            lines.setdefault(row["facts"]["line"], []).append((row["facts"]["at"], row[measure]))
    for line, points in lines.items():
        if len(points) == 1:  # what does not depend on the axis
            panel.axhline(points[0][1], linestyle=":", linewidth=1, color=COLOURS[line])
            panel.annotate(line, (0.02, points[0][1]), xycoords=("axes fraction", "data"), fontsize=7)
        else:
            panel.plot(
                *zip(*points, strict=True), marker="o", markersize=3, linewidth=1, label=line, color=COLOURS[line]
            )


def write_front_page(records: list[dict[str, Any]]) -> None:
    """The part of the project's README that speaks of speed, between its two marks."""
    parts = []
    on_gpu = [record for record in records if record["hardware"].get("gpu")]
    if on_gpu:
        parts.append(f"{said_of_gpu(on_gpu[-1])}\n\n{step_table(on_gpu[-1])}")
    on_cpu = [record for record in records if not record["hardware"].get("gpu") and is_compiled(record)]
    if on_cpu:
        parts.append(f"{said_of_cpu(on_cpu[-1])}\n\n{step_table(on_cpu[-1])}")
    if parts:
        write_between_marks(HERE.parent / "README.md", "speed", "\n\n".join(parts))


def said_of_gpu(record: dict[str, Any]) -> str:
    compiled = "" if is_compiled(record) else " torch.compile was not run on this GPU."
    return (
        f"Times of whole training steps on one {hardware(record)} in bfloat16: forward, backward, clipping, optimiser. "
        "Our steps run as CUDA graphs. Plain torch is a loop over modules of torch ([details]"
        "(docs/benchmarks.md#what-the-plain-loops-are)). If it has another number of parameters, the table shows "
        "that in brackets."
        f"{compiled} The last column compares our step with and without DeFINE. "
        "[Quartiles](results/benchmarks/README.md#steps)."
    )


def said_of_cpu(record: dict[str, Any]) -> str:
    """Where compiling gains more than we do, the page says so."""
    slower = [f"`{recipe_of(group)}`" for group in record["groups"].values() if lead_over_compiled(group) < 1]
    judged = f" Compiled torch is faster than ours for {' and '.join(slower)}." if slower else ""
    return (
        f"The same on {record['hardware']['cpu_threads']} cores of a CPU, in float32, with smaller layers and batches. "
        "A CPU has no CUDA graphs, so the gain is small. Differences of 10 % are noise. torch.compile does not change "
        f"`nn.LSTM`.{judged} `ptb/awd-lstm` is faster with DeFINE because its output layer is narrower then."
    )


def is_compiled(record: dict[str, Any]) -> bool:
    return all(COMPILED in group["rows"] for group in record["groups"].values())


def recipe_of(group: dict[str, Any]) -> str:
    """The recipe that the plain loop of a group computes."""
    return str(group["reference"].removeprefix("plain loop, "))


def ours_of(group: dict[str, Any]) -> dict[str, Any]:
    """The rows of our own steps, by recipe, as CUDA graphs where they ran."""
    rows: dict[str, Any] = {}
    for name, row in group["rows"].items():
        recipe, _, way = name.partition(", ")
        if way in ("kernel by kernel", "recorded"):
            rows[recipe] = row  # the recorded one comes second
    return rows


def lead_over_compiled(group: dict[str, Any]) -> float:
    return float(group["rows"][COMPILED]["ms"] / ours_of(group)[recipe_of(group)]["ms"])


def step_table(record: dict[str, Any]) -> str:
    compiled = is_compiled(record)
    header = [
        "training step of",
        "parameters",
        "batch",
        "plain torch",
        *["compiled torch"] * compiled,
        "ours",
        "plain ÷ ours",
    ]
    header += [*["compiled ÷ ours"] * compiled, "time added by DeFINE"]
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(step_cells(g, compiled)) + " |" for g in record["groups"].values())])


def step_cells(group: dict[str, Any], compiled: bool) -> list[str]:
    rows, recipe, both = group["rows"], recipe_of(group), ours_of(group)
    plain, ours = rows[group["reference"]], both[recipe]
    plain_size = plain["facts"]["parameters"]
    other_size = f" ({plain_size / 1e6:.1f} M)" if plain_size != ours["facts"]["parameters"] else ""
    without, with_define = (row["ms"] for row in both.values())
    return [
        f"`{recipe}`",
        f"{ours['facts']['parameters'] / 1e6:.1f} M",
        group["note"].split()[1],
        f"{plain['ms']:.1f} ms{other_size}",
        *([f"{rows[COMPILED]['ms']:.1f} ms"] if compiled else []),
        f"{ours['ms']:.1f} ms",
        f"{plain['ms'] / ours['ms']:.1f}",
        *([f"{lead_over_compiled(group):.1f}"] if compiled else []),
        f"{with_define / without - 1:+.1%}",
    ]


def in_words(text: str) -> str:
    """The page with the names that other pages use."""
    for stored, word in WORDS.items():
        text = text.replace(stored, word)
    return text


def main() -> None:
    page = [INTRODUCTION]
    for path in sorted(ROWS.glob("*.jsonl")):
        records = newest(read(path))
        if not records:
            continue
        page += [f"## {path.stem}", ""]
        for record in records.values():
            page += section(record)
    (ROWS / "README.md").write_text(in_words("\n".join(page).rstrip()) + "\n", encoding="utf-8")
    steps = ROWS / "steps.jsonl"
    if steps.exists():
        write_front_page(read(steps))


if __name__ == "__main__":
    main()
