"""The Hub's mixin, with local folders and with what a download would give."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdefine
from torchdefine import DeFINE, UserError

pytest.importorskip("huggingface_hub")
import huggingface_hub

from torchdefine.embedding.hub import _hub_model

pytestmark = pytest.mark.filterwarnings("ignore:DeFINE has")  # the tables are tiny


@pytest.fixture
def embedding() -> DeFINE:
    return DeFINE(500, 16, 8, 16, depth=2, padding_idx=0)


def test_saved_and_loaded(embedding: DeFINE, tmp_path: Path) -> None:
    embedding.save_pretrained(tmp_path / "mine")
    loaded = DeFINE.from_pretrained(tmp_path / "mine")
    assert type(loaded) is DeFINE
    assert torch.equal(loaded.table(), embedding.table())
    config = json.loads((tmp_path / "mine" / "config.json").read_text())
    assert config["torchdefine_version"] == torchdefine.__version__
    assert "library_name: torchdefine" in (tmp_path / "mine" / "README.md").read_text()
    assert torch.equal(DeFINE.load(tmp_path / "mine").table(), embedding.table())

    class Mine(DeFINE):
        pass

    assert type(Mine.from_pretrained(tmp_path / "mine")) is Mine


def test_what_save_wrote_is_loaded_too(embedding: DeFINE, tmp_path: Path) -> None:
    embedding.save(tmp_path)
    assert torch.equal(DeFINE.from_pretrained(tmp_path).table(), embedding.table())
    assert json.loads((tmp_path / "embedding.json").read_text())["torchdefine_version"] == torchdefine.__version__


def test_downloads_and_uploads_go_through_the_hub(
    embedding: DeFINE, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def upload(self: Any, *, folder_path: Path, **options: Any) -> str:
        asked.update(files={path.name for path in Path(folder_path).iterdir()}, repo=options["repo_id"])
        return "address"

    created = type("Created", (), {"repo_id": "someone/table"})
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda self, **options: created)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload)
    assert embedding.push_to_hub("someone/table") == "address"
    assert asked["repo"] == "someone/table"
    assert asked["files"] == {"config.json", "embedding.json", "embedding.safetensors", "README.md"}

    embedding.save(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: asked.update(options) or tmp_path)
    monkeypatch.setattr(huggingface_hub.hub_mixin, "hf_hub_download", lambda **options: tmp_path / "embedding.json")
    _hub_model.cache_clear()
    assert torch.equal(DeFINE.from_pretrained("someone/table", revision="v1").table(), embedding.table())
    assert asked["revision"] == "v1"
    _hub_model.cache_clear()


def test_it_is_imported_when_it_is_used() -> None:
    code = "import sys, torchdefine; torchdefine.DeFINE(9, 16, 8); assert 'huggingface_hub' not in sys.modules"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_without_the_hub(embedding: DeFINE, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _hub_model.cache_clear()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"pip install 'torchdefine\[hf\]'"):
        embedding.save_pretrained(tmp_path)
    _hub_model.cache_clear()
