"""Files of released versions are read today, and give the numbers that they gave then."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.released.formats import COPIES, FORMATS, HERE
from tests.released.write import EXPECTED, MOST_BYTES

VERSIONS = sorted(folder for folder in HERE.iterdir() if (folder / EXPECTED).exists())
NEEDS = {"adapted": "transformers", "with-define": "transformers", "export": "onnxruntime"}
NEEDS |= {"masked-run": "tokenizers", "translation-run": "sacrebleu"}
RELEASED = [
    pytest.param(version, name, id=f"{version.name} {name}")
    for version in VERSIONS
    for name in FORMATS
    if (version / name).exists()
]


@pytest.mark.parametrize(("version", "name"), RELEASED)
def test_a_released_file_gives_the_numbers_that_it_gave(version: Path, name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    found = FORMATS[name].numbers(version / name)
    with safe_open(version / EXPECTED, "pt") as file:
        wanted = {key: file.get_tensor(key) for key in file.keys() if key.startswith(f"{name}: ")}  # noqa: SIM118
    assert {f"{name}: {what}" for what in found} == set(wanted)
    near = {"rtol": 0.0, "atol": 0.0} if name in COPIES else {"rtol": 1e-5, "atol": 1e-5}
    for what, values in found.items():
        torch.testing.assert_close(values, wanted[f"{name}: {what}"], **near)


def test_every_format_has_a_released_file() -> None:
    """A new format, or a new table method, needs `python -m tests.released.write`."""
    assert set(FORMATS) == {path.name for version in VERSIONS for path in version.iterdir() if path.is_dir()}


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
def test_the_released_files_are_small_and_name_no_place_of_the_machine_that_wrote_them(version: Path) -> None:
    files = [file for file in version.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= MOST_BYTES
    for file in files:
        content = file.read_bytes()
        assert not any(place in content for place in (b"/tmp/", b"/home/", b"/root/", b"/work/")), file
