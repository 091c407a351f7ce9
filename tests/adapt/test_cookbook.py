"""The programs of the quickstart and of the cookbook run as they stand there."""

import contextlib
import json
import re
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from tests.adapt.test_shrink import save_with_tokenizer
from tests.adapt.tiny_models import bert

DOCS = Path(__file__).parents[2] / "docs"


def programs(page: str) -> dict[str, str]:
    """The Python of each section that has some, its blocks one after the other."""
    sections = re.split(r"^## ", (DOCS / page).read_text(), flags=re.MULTILINE)[1:]
    found = {
        section.splitlines()[0]: "\n".join(re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE))
        for section in sections
    }
    return {heading: code for heading, code in found.items() if code}


COOKBOOK = programs("cookbook.md")


def run(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "docs"}
    exec(compile(code, "docs", "exec"), names)
    return names


def test_the_quickstart_runs() -> None:
    names = run("\n".join(programs("quickstart.md").values()))
    torch.testing.assert_close(names["vectors"], names["table"](torch.tensor([[1, 2, 3]])), rtol=0, atol=1.0)


@pytest.fixture
def _one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    torch.distributed.init_process_group("gloo")
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("heading", ["A plain training loop", "Trainer of transformers", "accelerate"])
def test_a_loop_leaves_a_model_that_has_learned(heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    model = run(COOKBOOK[heading])["model"]
    assert any(parameter.grad is not None for parameter in model.parameters()) or list(tmp_path.rglob("*.safetensors"))


def test_lightning_trains_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    assert run(COOKBOOK["Lightning"])["trainer"].global_step == 2


@pytest.mark.usefixtures("_one_process")
def test_the_table_is_a_unit_of_fsdp2() -> None:
    assert run(COOKBOOK["FSDP2"])["model"][0].map.table.weight.grad is not None


def test_sentence_transformers_encodes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentence_transformers")
    from torchdefine.adapt.huggingface import with_table
    from torchdefine.tables import transform_table

    model = bert(tied=False).base_model
    table = model.get_input_embeddings()
    save_with_tokenizer(with_table(model, transform_table(table, 2 * table.weight.numel())), tmp_path / "smaller")
    monkeypatch.chdir(tmp_path)
    assert run(COOKBOOK["sentence-transformers"])["vectors"].shape == (2, table.embedding_dim)


def test_onnxruntime_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    names = run(COOKBOOK["ONNX"])
    session = onnxruntime.InferenceSession("model.onnx")
    ids = torch.randint(0, 20_000, (3, 7))
    (found,) = session.run(None, {session.get_inputs()[0].name: ids.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), names["model"](ids).detach(), rtol=1e-4, atol=1e-5)


def test_the_service_answers_with_the_table_s_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run(next(code for heading, code in COOKBOOK.items() if heading.startswith("A service")))
    server: ThreadingHTTPServer = names["server"]
    Thread(target=server.serve_forever, daemon=True).start()
    with contextlib.closing(HTTPConnection("127.0.0.1", server.server_port, timeout=30)) as connection:
        connection.request("POST", "/", body="[3, 5]")
        answer = json.loads(connection.getresponse().read())
    server.shutdown()
    server.server_close()
    torch.testing.assert_close(torch.tensor(answer), names["table"](torch.tensor([3, 5])))


def test_every_program_is_tried_here() -> None:
    tried = {"A plain training loop", "Trainer of transformers", "accelerate", "Lightning", "FSDP2", "ONNX"}
    assert COOKBOOK.keys() == tried | {"sentence-transformers", "A service that looks up packed vectors"}
