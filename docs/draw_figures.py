"""Draws the pictures that the docs show: `make figures`."""

from pathlib import Path

from torchdefine.analysis.pictures import save_figure
from torchdefine.analysis.plan_picture import draw_plan
from torchdefine.embedding import make_plan

FIGURES = Path(__file__).parent / "figures"


def main() -> None:
    figure = draw_plan(make_plan(map_dim=128, expand_dim=1024, embedding_dim=384, depth=4))
    save_figure(figure, FIGURES / "unit.svg")


if __name__ == "__main__":
    main()
