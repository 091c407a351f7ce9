"""Write tiny files of every format, once for each version: `python -m tests.released.write`."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.released.formats import FORMATS, HERE
from torchdefine import __version__

EXPECTED = "expected.safetensors"
MOST_BYTES = 1_000_000


def main() -> None:
    version = ".".join(__version__.split(".")[:2])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        room, expected = Path(made) / version, {}
        room.mkdir()
        for name, one in FORMATS.items():
            print(name, flush=True)
            torch.manual_seed(1)
            one.write(room / name)
            expected |= {f"{name}: {what}": values for what, values in one.numbers(room / name).items()}
        shutil.rmtree(room / "before", ignore_errors=True)
        save_file(expected, room / EXPECTED)
        size = sum(file.stat().st_size for file in room.rglob("*") if file.is_file())
        if size > MOST_BYTES:
            for name in FORMATS:
                print(name, sum(file.stat().st_size for file in (room / name).rglob("*") if file.is_file()))
            sys.exit(f"The files have {size:,} bytes, more than {MOST_BYTES:,}.")
        shutil.rmtree(HERE / version, ignore_errors=True)
        shutil.move(room, HERE / version)
    print(f"{size:,} bytes in {HERE / version}")


if __name__ == "__main__":
    main()
