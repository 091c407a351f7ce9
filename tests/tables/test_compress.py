import argparse
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.commands import command

from torchdefine import DeFINE, load_run, train
from torchdefine.adapt import FitOptions, fit
from torchdefine.cli.inference import _settings
from torchdefine.errors import UserError
from torchdefine.run.checkpoint_file import read_checkpoint, write_checkpoint
from torchdefine.tables import (
    METHODS,
    Budget,
    Candidate,
    CodeLearning,
    Entry,
    Method,
    UnitFitting,
    compress_embedding,
    dense_table,
)
from torchdefine.tables.codes import Codes
from torchdefine.tables.source import as_weights, lost_variance

TRAINING = {
    "codes": CodeLearning(steps=60, rounds=3),
    "define": UnitFitting(steps=60, batch_size=256),
    "mlp": UnitFitting(steps=60, batch_size=256),
}
SIZED = [name for name in METHODS if name not in ("int8", "int4")]


def quick(method: str) -> dict[str, Any]:
    return {"training": TRAINING[method]} if method in TRAINING else {}


@pytest.fixture(scope="module")
def run_folder(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compressed") / "run"
    train(recipe_file, out=out, train={"steps": 20})
    load_run(out).compress("int8")
    return out


@pytest.fixture
def run_copy(run_folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(run_folder, tmp_path / "run")
    return tmp_path / "run"


def test_compressed_evaluation_is_near_the_live_one_and_calls_no_unit(run_folder: Path) -> None:
    live, packed = load_run(run_folder), load_run(run_folder, compressed=True)
    packed.model.embedding.unit.forward = None  # whoever calls it now fails
    exact = live.evaluate("test").perplexity
    found = packed.evaluate("test").perplexity
    assert found != exact
    assert found == pytest.approx(exact, rel=1e-3)
    assert packed.generate("w1", 12, seed=3)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_keeps_within_its_bytes_and_most_of_the_vectors(method: str) -> None:
    torch.manual_seed(0)
    embedding = DeFINE(600, 32, map_dim=16, expand_dim=64)
    counts = [1000 // (i + 1) - 1 for i in range(600)]  # a sixth is not used
    budget = 26_000 if method in SIZED else None
    made = compress_embedding(embedding, method, budget, counts=counts, **quick(method))
    table = embedding.table()
    rebuilt = made.table(torch.arange(600))
    centred = table - table.mean(0)
    by_hand = float((rebuilt - table).square().sum() / centred.square().sum())
    assert made.lost == pytest.approx(by_hand, rel=1e-4)
    assert made.lost < 0.5
    assert made.vectors_bytes == 600 * 32 * 4
    assert made.map_bytes == 600 * 16 * 4
    assert made.bytes == made.table.stored_bytes
    assert budget is None or made.bytes <= budget


@pytest.mark.parametrize("method", METHODS)
def test_the_padding_token_stays_zero(method: str) -> None:
    embedding = DeFINE(200, 16, map_dim=8, expand_dim=32, padding_idx=3)
    budget = 6_000 if method in SIZED else None
    table = compress_embedding(embedding, method, budget, counts=list(range(200)), **quick(method)).table
    assert table.padding_idx == 3
    assert not table(torch.tensor([3])).any()


@pytest.mark.parametrize("method", [name for name in METHODS if name != "used"])
def test_every_method_does_without_counts(method: str) -> None:
    embedding = DeFINE(200, 16, map_dim=8, expand_dim=32)
    made = compress_embedding(embedding, method, 6_000 if method in SIZED else None, **quick(method))
    assert made.lost < 1
    assert made.lost_by_frequency is None


@dataclass(frozen=True)
class Halves(Method):
    """A method of somebody else's: float16."""

    dtype: str = "float16"

    def within(self, rows: int, width: int, budget: Budget) -> Iterator[Candidate]:
        yield Candidate(self.dtype, partial(dense_table, dtype=self.dtype))


def test_a_new_method_is_an_object_and_a_line(run_copy: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setitem(METHODS, "halves", Entry(Halves, "half of the bytes"))
    embedding = DeFINE(600, 32, map_dim=16, expand_dim=64)
    assert compress_embedding(embedding, "halves", 40_000).label == "float16"
    fitted = fit(embedding.table(), torch.ones(600), 40_000, options=FitOptions(methods=("halves", "int")))
    assert fitted.chosen.method == "halves"
    assert command("compress", str(run_copy), "--method", "halves") == 0
    assert "as float16" in capsys.readouterr().out


def test_from_the_command_line(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compress", str(run_copy), "--method", "codes", "--codebooks", "8", "--entries", "4", "--steps", "30"]
    assert command(*arguments) == 0
    assert "as codes 8 × 4" in capsys.readouterr().out
    assert command("compress", str(run_copy), "--method", "svd", "--budget", "3KB", "--json") == 0
    (facts,) = json.loads(capsys.readouterr().out)["files"].values()
    assert facts["method"] == "svd"
    assert 0 < facts["lost"] < 1
    assert 0 < facts["lost_by_frequency"] < 1
    assert command("eval", str(run_copy), "--compressed", "--json") == 0
    assert json.loads(capsys.readouterr().out)["perplexity"] > 1
    assert command("generate", str(run_copy), "--compressed", "--length", "5") == 0


def test_the_command_packs_as_it_was_asked_to() -> None:
    options = {"method": "codes", "budget": "20KB", "codebooks": None, "entries": 8, "steps": 30, "seed": 7}
    expected = {"entries": 8, "training": CodeLearning(steps=30, seed=7)}
    assert _settings(argparse.Namespace(**options)) == expected
    options |= {"method": "mlp", "entries": None}
    assert _settings(argparse.Namespace(**options)) == {"training": UnitFitting(steps=30, seed=7)}


def test_one_changed_weight_makes_it_stale(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = run_copy / "best" / "checkpoint.safetensors"
    checkpoint = read_checkpoint(best)
    name = next(name for name in checkpoint.tensors if ".unit." in name)
    checkpoint.tensors[name].view(-1)[0] += 1e-3
    write_checkpoint(best, checkpoint.tensors, checkpoint.facts)
    assert command("eval", str(run_copy), "--compressed") == 2
    assert "was made for weights" in capsys.readouterr().err


def test_missing_cut_and_foreign_files_are_refused(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = load_run(run_copy).beside_weights("compressed")
    whole = file.read_bytes()
    for content, message in (
        (None, "does not exist: write it with `torchdefine compress` first"),
        (whole[:-100], "is damaged or cut short"),
        ((run_copy / "best" / "checkpoint.safetensors").read_bytes(), "is not a torchdefine compact table"),
    ):
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        assert command("eval", str(run_copy), "--compressed") == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "codes", "--entries", "10"], "cannot be packed"),
        (["--method", "codes", "--codebooks", "0"], "use 1 to 512 codebooks"),
        (["--method", "codes", "--steps", "0"], "must be at least 1"),
        (["--method", "zip"], "zip"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_changes(
    run_copy: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    before = {path: path.read_bytes() for path in run_copy.rglob("*") if path.is_file()}
    assert command("compress", str(run_copy), *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert {path: path.read_bytes() for path in run_copy.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("method", ["codes", "svd", "bits", "int", "frequent", "group-reduce", "slim"])
def test_a_budget_is_kept_and_mostly_spent(method: str) -> None:
    torch.manual_seed(0)
    embedding = DeFINE(600, 32, map_dim=16, expand_dim=64)
    made = compress_embedding(embedding, method, "14KB", counts=[1] * 600, **quick(method))
    assert 9_000 < made.bytes <= 14_000
    for wrong, sentence in ((10, "fits into 10 bytes|are too few"), (10**6, "take only 76,800: allow less")):
        with pytest.raises(UserError, match=sentence):
            compress_embedding(embedding, method, wrong, counts=[1] * 600)


@pytest.mark.parametrize("method", ["codes", "svd", "bits", "frequent"])
def test_counts_put_precision_where_it_is_read(method: str) -> None:
    torch.manual_seed(0)
    embedding = DeFINE(600, 32, map_dim=16, expand_dim=64)
    counts = torch.tensor([1] * 570 + [10_000] * 30)
    plain, weighted = (
        compress_embedding(embedding, method, 10_900, counts=given, **quick(method)) for given in (None, counts)
    )
    matrix = embedding.table()
    assert weighted.lost_by_frequency is not None
    assert weighted.lost_by_frequency < 0.9 * lost_variance(plain.table, matrix, as_weights(counts, matrix, power=1.0))


def test_codes_learn_as_long_as_they_are_told_to() -> None:
    torch.manual_seed(0)
    embedding = DeFINE(600, 32, map_dim=16, expand_dim=64)
    hasty, quick = (
        compress_embedding(embedding, "codes", codebooks=8, training=training).lost
        for training in (CodeLearning(steps=1, rounds=1), TRAINING["codes"])
    )
    assert quick < hasty


def test_without_a_size_bits_take_what_codes_would_but_an_eighth_of_the_vectors_at_most() -> None:
    small, large = (DeFINE(rows, 32, map_dim=16, expand_dim=64) for rows in (600, 20_000))
    assert 0.5 < compress_embedding(small).bytes / (600 * 32 * 4 / 8) <= 1
    assert 0.9 < compress_embedding(large).bytes / Codes().usual_bytes(20_000, 32) <= 1


def test_a_method_and_a_budget_are_checked() -> None:
    with pytest.raises(UserError, match="'bit' is unknown: did you mean 'bits'"):
        compress_embedding(DeFINE(50, 24, 16, 64), "bit")
    with pytest.raises(UserError, match="is not a size"):
        compress_embedding(DeFINE(50, 24, 16, 64), "bits", 0)


def test_cached_and_compressed_at_once_are_refused(run_folder: Path) -> None:
    with pytest.raises(UserError, match="choose one of them"):
        load_run(run_folder, cached=True, compressed=True)


def test_a_packed_table_moves_with_the_model_and_is_no_weight_of_it() -> None:
    embedding = DeFINE(50, 24, map_dim=16, expand_dim=64).eval()
    names = list(embedding.state_dict())
    embedding.look_up(compress_embedding(embedding, "int8").table)
    assert list(embedding.state_dict()) == names
    assert sum(p.numel() for p in embedding.parameters()) == sum(p.numel() for p in DeFINE(50, 24, 16, 64).parameters())
    embedding.double()
    assert embedding.looked_up.mean.dtype == torch.float64
    assert embedding(torch.tensor([3])).dtype == torch.float64
    embedding.train()
    assert embedding.looked_up is None


def test_the_loss_by_frequency_weighs_tokens_as_often_as_they_occur() -> None:
    torch.manual_seed(0)
    embedding = DeFINE(600, 32, map_dim=16, expand_dim=64)
    counts = torch.tensor([1000 // (i + 1) for i in range(600)])
    made = compress_embedding(embedding, "int4", counts=counts)
    mass = (counts + 1) / (counts + 1).sum()
    table = embedding.table()
    centred = table - mass @ table
    error = made.table(torch.arange(600)) - table
    by_hand = (error.square().sum(1) * mass).sum() / (centred.square().sum(1) * mass).sum()
    assert made.lost_by_frequency == pytest.approx(float(by_hand), rel=1e-3)


def test_codes_larger_than_the_vectors_are_refused() -> None:
    embedding = DeFINE(20, 24, map_dim=16, expand_dim=64)
    with pytest.raises(UserError, match="the vectors themselves take only 1,920"):
        compress_embedding(embedding, "codes")
    assert compress_embedding(embedding, "int8").bytes < 1920


@pytest.mark.parametrize(
    "arguments", [{"codebooks": 2.5}, {"codebooks": 0}, {"codebooks": 100, "entries": 256}], ids=str
)
def test_impossible_sizes_are_one_sentence(arguments: dict) -> None:
    with pytest.raises(UserError):
        compress_embedding(DeFINE(50, 24, 16, 64), "codes", **arguments)


def test_what_an_embedding_looked_up_before_it_looks_up_afterwards() -> None:
    embedding = DeFINE(50, 24, map_dim=16, expand_dim=64).eval()
    table = compress_embedding(embedding, "int8").table
    embedding.look_up(table)
    compress_embedding(embedding, "int4")
    assert embedding.looked_up is table


def test_one_flipped_bit_is_noticed(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = load_run(run_copy).beside_weights("compressed")
    content = bytearray(file.read_bytes())
    content[-50] ^= 4
    file.write_bytes(bytes(content))
    assert command("eval", str(run_copy), "--compressed") == 2
    assert "is not what was written" in capsys.readouterr().err


def test_the_next_command_names_the_checkpoint(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("compress", str(run_copy), "--method", "int8", "--checkpoint", "last") == 0
    assert capsys.readouterr().out.rstrip().endswith("--compressed --checkpoint last")
