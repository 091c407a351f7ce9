"""From runs of recipes/maps, and DeFINE's without a scale, to results/maps/*.json and the pictures of docs/maps.md.

for n in standard projective-64 … define-256; do torchdefine train maps/$n --out RUNS/$n; done
for n in 64 128 256; do torchdefine train maps/define-$n --embedding.scale none --out RUNS/define-$n-unscaled; done
python results/look_at_maps.py RUNS
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from PIL import Image
from torch import nn

from torchdefine.analysis.correlation import CorrelationMap, embedding_maps
from torchdefine.analysis.report import draw
from torchdefine.files import read_json, write_json
from torchdefine.run import Run, load_run
from torchdefine.task import find_task

HERE = Path(__file__).parent
FIGURES = HERE.parent / "docs" / "figures"
DRAWN = ["standard", *(f"{kind}-{n}" for kind in ("projective", "define") for n in (64, 128, 256))]
NAMES = [*DRAWN, *(f"define-{n}-unscaled" for n in (64, 128, 256))]


def untrained(run: Run) -> nn.Module:
    """The run's model as it was before its first step."""
    torch.manual_seed(run.recipe.train.seed)
    return find_task(run.recipe.task).build(run.recipe, run.tokenization)


def main(runs: Path) -> None:
    reference: dict[str, CorrelationMap] = {}
    for name in NAMES:
        run = load_run(runs / name)
        found = {}
        for state, model in (("trained", run.model), ("untrained", untrained(run))):
            for centred in (False, True):
                kind = f"{state}{', centred' if centred else ''}"
                maps = embedding_maps(model.embedding, centred=centred)
                reference.setdefault(kind, maps["finished"])  # the standard table comes first
                found[kind] = {stage: correlation.numbers() for stage, correlation in maps.items()}
                found[kind]["finished"]["distance_to_standard"] = maps["finished"].distance(reference[kind])
                for stage, correlation in maps.items():
                    if correlation.groups > 1:
                        between = correlation.between_groups()
                        away = ~torch.eye(correlation.groups, dtype=torch.bool)
                        found[kind][stage]["mean_between_groups"] = float(between[away].mean())
                        found[kind][stage]["mean_within_groups"] = float(between.diagonal().mean())
        result = read_json(runs / name / "result.json")
        write_json(HERE / "maps" / f"{name}.json", {**result, "correlation": found})
        print(name, {k: round(v["finished"]["mean_off_diagonal"], 4) for k, v in found.items()})
    folders = [runs / name for name in DRAWN]
    draw("maps", folders, FIGURES / "maps.png")
    draw("maps", folders, FIGURES / "maps-centred.png", centred=True)
    for n in (64, 128, 256):
        draw("layers", [runs / f"define-{n}"], FIGURES / f"maps-layers-{n}.png")
        draw("groups", [runs / f"define-{n}"], FIGURES / f"maps-groups-{n}.png")
    draw("curves", folders, FIGURES / "maps-curves.svg")
    for picture in FIGURES.glob("maps*.png"):
        shrink(picture)


def shrink(path: Path) -> None:
    """Half the size in pixels and a palette of colours: enough for a page, and a tenth of the bytes."""
    with Image.open(path) as picture:
        small = picture.convert("RGB").resize((picture.width // 2, picture.height // 2), Image.Resampling.BOX)
    small.quantize(128, method=Image.Quantize.MAXCOVERAGE).save(path, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
