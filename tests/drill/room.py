"""What a drill needs before it begins: a small text, and runs that are whole."""

from __future__ import annotations

import random
from pathlib import Path

from torchdefine import load_run, train
from torchdefine.export.formats import check_torch

RECIPE = """data: {{corpus: {corpus}}}
embedding: {{kind: adaptive, map_dim: 16, cutoffs: [10, 30], division: 2, row_dropout: 0.1}}
unit: {{kind: define, expand_dim: 32, depth: 3, dropout: 0.1}}
context: {{layers: 2, hidden_dim: 24, input_dropout: 0.2, hidden_dropout: 0.2}}
output: {{kind: adaptive}}
optim: {{kind: adam, lr: 5.0e-3, clip: 1.0}}
train: {{batch_size: 4, length: 10, steps: {steps}, log_every: 5, eval_every: 20, checkpoint_every: 10, keep: 2}}
eval: {{batch_size: 2, length: 16}}
"""


class Room:
    """Everything here is only read; whoever changes something makes a copy."""

    def __init__(self, path: Path) -> None:
        self.path, self.corpus, self.export = path, path / "corpus", path / "export"
        self.short, self.long = path / "short.yaml", path / "long.yaml"
        self.run, self.other, self.long_run = path / "run", path / "other", path / "long-run"
        """A finished run of the short recipe, another one, and a run of the long one."""

    def make(self) -> Room:
        random_ = random.Random(0)
        self.corpus.mkdir(parents=True)
        for split, lines in (("train", 400), ("valid", 60), ("test", 60)):
            rows = (" ".join(f"w{int(60 * random_.random() ** 3)}" for _ in range(8)) for _ in range(lines))
            (self.corpus / f"{split}.txt").write_text("\n".join(rows) + "\n")
        for recipe, steps in ((self.short, 40), (self.long, 300)):
            recipe.write_text(RECIPE.format(corpus=self.corpus, steps=steps))
        for run, recipe in ((self.run, self.short), (self.other, self.short), (self.long_run, self.long)):
            train(recipe, out=run)
        if exports():
            load_run(self.run).export(self.export)
        return self


def exports() -> bool:
    """Whether this torch can export."""
    try:
        check_torch()
    except ValueError:
        return False
    return True
