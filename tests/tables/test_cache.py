import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.commands import command

from torchdefine import AdaptiveMap, DeFINE, StandardMap, UnitConfig, load_run, train
from torchdefine.embedding import TokenEmbedding, table
from torchdefine.errors import UserError
from torchdefine.run.checkpoint_file import read_checkpoint, write_checkpoint
from torchdefine.tables.cache import use_cache, weights_sha256, write_cache


@pytest.fixture(scope="module")
def run_folder(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cached") / "run"
    train(recipe_file, out=out, train={"steps": 20})
    load_run(out).cache()
    return out


@pytest.fixture
def run_copy(run_folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(run_folder, tmp_path / "run")
    return tmp_path / "run"


def test_cached_and_live_evaluation_agree_and_the_unit_is_not_called(run_folder: Path) -> None:
    live, cached = load_run(run_folder), load_run(run_folder, cached=True)
    cached.model.embedding.unit.forward = None  # whoever calls it now fails
    assert cached.evaluate("test").perplexity == pytest.approx(live.evaluate("test").perplexity, rel=1e-6)
    assert cached.generate("w1", 12, seed=3) == live.generate("w1", 12, seed=3)


@pytest.mark.parametrize(("dtype", "close"), [("fp32", 1e-5), ("bf16", 1e-2), ("fp16", 1e-3)])
def test_the_file_holds_the_finished_table(tmp_path: Path, dtype: str, close: float, monkeypatch) -> None:
    monkeypatch.setattr(table, "TOKENS_AT_ONCE", 7)
    bands = AdaptiveMap(50, 16, (10, 30), division=2)
    embedding = DeFINE.over(bands, 24, expand_dim=64)
    seen = []
    size = write_cache(tmp_path / "a" / "cache.safetensors", embedding, dtype, lambda done, of: seen.append((done, of)))
    assert seen[-1] == (50, 50)
    assert len(seen) == 8
    stored = load_file(tmp_path / "a" / "cache.safetensors")["table"]
    assert stored.shape == (50, 24)
    assert size >= stored.numel() * stored.element_size()
    torch.testing.assert_close(stored.float(), embedding.table(), rtol=close, atol=close)
    use_cache(tmp_path / "a" / "cache.safetensors", embedding)
    assert embedding(torch.tensor([[3, 49]])).dtype == torch.float32
    embedding.train()
    assert embedding.looked_up is None


def test_one_changed_weight_makes_it_stale(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = run_copy / "best" / "checkpoint.safetensors"
    checkpoint = read_checkpoint(best)
    name = next(name for name in checkpoint.tensors if ".unit." in name)
    checkpoint.tensors[name].view(-1)[0] += 1e-3
    write_checkpoint(best, checkpoint.tensors, checkpoint.facts)
    for arguments in (["eval", str(run_copy)], ["generate", str(run_copy)]):
        assert command(*arguments, "--cached") == 2
        assert "was made from other weights than the run's" in capsys.readouterr().err
    assert command("cache", str(run_copy), "--dtype", "fp16") == 0
    assert "cache.safetensors" in capsys.readouterr().out
    assert load_file(run_copy / "best" / "cache.safetensors")["table"].dtype == torch.float16
    assert command("eval", str(run_copy), "--cached", "--json") == 0
    assert json.loads(capsys.readouterr().out)["perplexity"] > 1


def test_every_checkpoint_has_a_cache_of_its_own(run_copy: Path) -> None:
    (run_copy / "best" / "cache.safetensors").unlink()
    assert command("cache", str(run_copy), "--checkpoint", "last") == 0
    assert [path.parent.name for path in run_copy.glob("*/cache.safetensors")] == ["last"]
    assert command("eval", str(run_copy), "--checkpoint", "last", "--cached") == 0


def test_missing_cut_and_foreign_files_are_refused(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = load_run(run_copy).beside_weights("cache")
    whole = file.read_bytes()
    for content, message in (
        (None, "does not exist: write it with `torchdefine cache` first"),
        (whole[:-100], "is damaged or cut short"),
        (whole[:5], "is damaged or cut short"),
        ((run_copy / "best" / "checkpoint.safetensors").read_bytes(), "is not a cache of version 1"),
    ):
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        assert command("eval", str(run_copy), "--cached") == 2
        assert message in capsys.readouterr().err


def test_the_hash_sees_map_unit_and_a_shared_unit() -> None:
    one, other = (AdaptiveMap(50, 16, (10, 30), division=2) for _ in range(2))
    embedding = DeFINE.over(one, 24, expand_dim=64)
    beside = TokenEmbedding.beside(other, embedding)
    before = weights_sha256(embedding), weights_sha256(beside)
    with torch.no_grad():
        next(embedding.unit.parameters()).view(-1)[0] += 1
    after = weights_sha256(embedding), weights_sha256(beside)
    assert before[0] != after[0]
    assert before[1] != after[1]
    with torch.no_grad():
        one.bands[2].weight[-1, -1] += 1
    assert weights_sha256(embedding) != after[0]
    assert weights_sha256(beside) == after[1]


def test_writing_a_cache_computes_anew_and_leaves_a_look_up_in_place(tmp_path: Path) -> None:
    unit = UnitConfig(dropout=0.5)
    lender = DeFINE(50, 24, map_dim=16, expand_dim=64, unit=unit)
    embedding = TokenEmbedding.beside(StandardMap(50, 16), lender)
    lender.eval()
    exact = embedding.eval().table()
    for name in ("of training", "of evaluation"):
        lender.train(name == "of training")
        write_cache(tmp_path / name, embedding)
        assert torch.equal(load_file(tmp_path / name)["table"], exact)
    rounded = exact.bfloat16()
    embedding.look_up(rounded)
    write_cache(tmp_path / "again", embedding)
    assert torch.equal(load_file(tmp_path / "again")["table"], exact)
    assert embedding.cached_vectors.data_ptr() == rounded.data_ptr()


def test_a_table_of_another_size_is_refused() -> None:
    embedding = DeFINE(50, 24, map_dim=16, expand_dim=64)
    with pytest.raises(UserError, match=r"The table is \(49, 24\)"):
        embedding.eval().look_up(torch.zeros(49, 24))


@pytest.mark.parametrize("packed", [False, True])
def test_other_weights_end_a_look_up(packed: bool) -> None:
    embedding, other = (DeFINE(50, 24, map_dim=16, expand_dim=64).eval() for _ in range(2))
    ids = torch.arange(50)
    embedding.look_up(embedding.cached() if packed else embedding.table())
    torch.nn.ModuleDict({"inside": embedding}).load_state_dict(torch.nn.ModuleDict({"inside": other}).state_dict())
    assert torch.equal(embedding(ids), other(ids))
    embedding.look_up(embedding.cached() if packed else embedding.table())
    embedding.reset_parameters()
    assert not torch.equal(embedding(ids), other(ids))
    embedding.look_up(embedding.cached() if packed else embedding.table())
    embedding.resize(53)
    assert embedding(torch.tensor([52])).any()


@pytest.mark.slow
def test_ten_million_tokens_need_no_more_memory_than_their_map_and_a_gibibyte(tmp_path: Path) -> None:
    code = """
import resource, sys
from pathlib import Path
from torchdefine import StandardMap
from torchdefine.embedding import DenseMLP, TokenEmbedding
from torchdefine.tables.cache import write_cache
embedding = TokenEmbedding(StandardMap(10_000_000, 8), DenseMLP(8, 16, 64), 64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_cache(Path(sys.argv[1]), embedding)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    path = tmp_path / "cache.safetensors"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert path.stat().st_size > 10_000_000 * 64 * 4
    assert int(done.stdout) * 1024 < 1 << 30


@pytest.mark.parametrize("packed", [False, True])
def test_a_table_is_not_looked_up_where_something_should_learn(packed: bool) -> None:
    embedding = DeFINE(50, 24, map_dim=8, expand_dim=32)
    table = embedding.cached() if packed else embedding.table()
    with pytest.raises(UserError, match=r"call eval\(\) first"):
        embedding.train().look_up(table)
    assert embedding(torch.tensor([1])).requires_grad
