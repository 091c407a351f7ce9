"""Draws the pictures that the docs show: `make figures`."""

from pathlib import Path

from torchdefine.analysis.plan_picture import draw_plan
from torchdefine.embedding import make_plan

FIGURES = Path(__file__).parent / "figures"


def main() -> None:
    FIGURES.mkdir(exist_ok=True)
    figure = draw_plan(make_plan(map_dim=128, expand_dim=1024, embedding_dim=384, depth=4))
    figure.savefig(FIGURES / "unit.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
