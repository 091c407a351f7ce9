"""Japanese word vectors, 20,000 × 300, from the wheel of ja_ginza (PyPI). They come without counts."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import torch

from leaderboard.tables.vectors import Vectors, package_facts
from torchdefine.tables.source import Source


def opened(package: Path) -> Vectors:
    with zipfile.ZipFile(package) as wheel:
        name = next(one for one in wheel.namelist() if one.endswith("/vocab/vectors"))
        matrix = torch.from_numpy(np.load(io.BytesIO(wheel.read(name)), allow_pickle=False))
    facts = {"title": "Word vectors of ja_ginza 5.3.0 (PyPI)", **package_facts(package)}
    return Vectors(Source(matrix.float()), facts)
