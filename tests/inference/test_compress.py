import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torchdefine import DeFINE, load_run, train
from torchdefine.cli import main
from torchdefine.cli.inference import METHODS as OFFERED
from torchdefine.cli.inference import _compression
from torchdefine.embedding import StandardMap, TokenEmbedding
from torchdefine.errors import UserError
from torchdefine.inference import CodeLearning, Compression, compress_embedding
from torchdefine.inference.compress import METHODS, codes_bytes
from torchdefine.inference.tables import as_weights, lost_variance
from torchdefine.training.checkpoint import read_checkpoint, write_checkpoint

QUICK = CodeLearning(steps=60, rounds=3)


@pytest.fixture(scope="module")
def run_folder(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compressed") / "run"
    train(recipe_file, out=out, train={"steps": 20})
    load_run(out).compress(Compression("int8"))
    return out


@pytest.fixture
def run_copy(run_folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(run_folder, tmp_path / "run")
    return tmp_path / "run"


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as done:
        main([*arguments])
    return int(done.value.code or 0)


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
    how = Compression(method, codebooks=16, entries=16, learning=QUICK)
    counts = [1000 // (i + 1) for i in range(600)]
    made = compress_embedding(embedding, how, counts=counts)
    table = embedding.table()
    rebuilt = made.table(torch.arange(600))
    centred = table - table.mean(0)
    by_hand = float((rebuilt - table).square().sum() / centred.square().sum())
    assert made.lost == pytest.approx(by_hand, rel=1e-4)
    assert made.lost < 0.5
    assert made.finished_bytes == 600 * 32 * 4
    assert made.map_bytes == 600 * 16 * 4
    assert made.bytes == made.table.stored_bytes
    if not method.startswith("int"):
        assert made.bytes <= codes_bytes(embedding, how)


@pytest.mark.parametrize("method", METHODS)
def test_the_padding_token_stays_zero(method: str) -> None:
    embedding = DeFINE(200, 16, map_dim=8, expand_dim=32, padding_idx=3)
    how = Compression(method, codebooks=4, entries=16, learning=QUICK)
    table = compress_embedding(embedding, how, counts=list(range(200))).table
    assert table.padding_idx == 3
    assert not table(torch.tensor([3])).any()


@pytest.mark.parametrize("method", METHODS)
def test_every_method_does_without_counts(method: str) -> None:
    embedding = DeFINE(200, 16, map_dim=8, expand_dim=32)
    made = compress_embedding(embedding, Compression(method, codebooks=4, entries=16, learning=QUICK))
    assert made.lost < 1
    assert made.lost_by_frequency is None


def test_codes_lose_less_than_product_codes_of_as_many_bytes() -> None:
    torch.manual_seed(0)
    directions = torch.randn(12, 64)
    map_layer = StandardMap(4000, 64)
    map_layer.table.weight.data = torch.randn(4000, 12) @ directions + 0.1 * torch.randn(4000, 64)
    embedding = TokenEmbedding(map_layer)
    learning = CodeLearning(steps=300, rounds=8)
    lost = {m: compress_embedding(embedding, Compression(m, 16, 16, learning)).lost for m in ("codes", "product-codes")}
    assert lost["codes"] < lost["product-codes"]


def test_the_command_offers_every_method() -> None:
    assert list(METHODS) == OFFERED


def test_from_the_command_line(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compress", str(run_copy), "--codebooks", "8", "--entries", "4", "--steps", "30"]
    assert command(*arguments) == 0
    assert "as codes 8 × 4" in capsys.readouterr().out
    assert command(*arguments[:-2], "--method", "svd", "--json") == 0
    (facts,) = json.loads(capsys.readouterr().out)["files"].values()
    assert facts["method"] == "svd"
    assert 0 < facts["lost"] < 1
    assert 0 < facts["lost_by_frequency"] < 1
    assert command("eval", str(run_copy), "--compressed", "--json") == 0
    assert json.loads(capsys.readouterr().out)["perplexity"] > 1
    assert command("generate", str(run_copy), "--compressed", "--length", "5") == 0


def test_the_command_packs_as_it_was_asked_to() -> None:
    options = {"method": "codes", "budget": "20KB", "codebooks": None, "entries": 8, "steps": 30, "seed": 7}
    expected = Compression("codes", entries=8, learning=CodeLearning(steps=30, seed=7), budget=20_000)
    assert _compression(argparse.Namespace(**options)) == expected


def test_one_changed_weight_makes_it_stale(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = run_copy / "best" / "checkpoint.safetensors"
    checkpoint = read_checkpoint(best)
    name = next(name for name in checkpoint.tensors if ".unit." in name)
    checkpoint.tensors[name].view(-1)[0] += 1e-3
    write_checkpoint(best, checkpoint.tensors, checkpoint.facts)
    assert command("eval", str(run_copy), "--compressed") == 2
    assert "was made for weights" in capsys.readouterr().err


def test_missing_cut_and_foreign_files_are_refused(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = load_run(run_copy).compressed_files()
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
        (["--entries", "10"], "cannot be packed"),
        (["--codebooks", "0"], "a whole number of at least 1"),
        (["--steps", "0"], "must be at least 1"),
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


@pytest.mark.parametrize("method", ["codes", "product-codes", "svd", "bits"])
def test_a_budget_is_kept_and_mostly_spent(method: str) -> None:
    torch.manual_seed(0)
    embedding = DeFINE(600, 32, map_dim=16, expand_dim=64)
    how = Compression(method, learning=QUICK, budget=14_000)
    made = compress_embedding(embedding, how, counts=[1] * 600)
    assert 9_000 < made.bytes <= 14_000
    for wrong, sentence in ((10, "fits? 10 bytes|are too few"), (10**6, "take 76,800: ask for less")):
        with pytest.raises(UserError, match=sentence):
            compress_embedding(embedding, replace(how, budget=wrong), counts=[1] * 600)


@pytest.mark.parametrize("method", ["codes", "product-codes", "svd", "bits"])
def test_counts_put_precision_where_it_is_read(method: str) -> None:
    torch.manual_seed(0)
    embedding = DeFINE(600, 32, map_dim=16, expand_dim=64)
    how = Compression(method, codebooks=8, learning=QUICK)
    counts = torch.tensor([10_000] * 30 + [1] * 570)
    plain, weighted = (compress_embedding(embedding, how, counts=given) for given in (None, counts))
    matrix = embedding.table()
    assert weighted.lost_by_frequency is not None
    assert weighted.lost_by_frequency < 0.9 * lost_variance(plain.table, matrix, as_weights(counts, matrix, power=1.0))


def test_codes_learn_as_long_as_they_are_told_to() -> None:
    torch.manual_seed(0)
    embedding = DeFINE(600, 32, map_dim=16, expand_dim=64)
    hasty, quick = (
        compress_embedding(embedding, Compression("codes", 8, learning=learning)).lost
        for learning in (CodeLearning(steps=1, rounds=1), QUICK)
    )
    assert quick < hasty


def test_product_codes_are_those_that_lose_less_of_the_ways_that_fit() -> None:
    torch.manual_seed(0)
    embedding = DeFINE(600, 32, map_dim=16, expand_dim=64)
    few, many = (compress_embedding(embedding, Compression("product-codes", budget=size)) for size in (14_000, 60_000))
    assert many.lost < few.lost / 2  # 256 entries a codebook fit as well, not only 16


def test_how_is_a_compression_and_a_budget_a_size(run_folder: Path) -> None:
    with pytest.raises(TypeError, match=r"use Compression\('bits'\), say"):
        load_run(run_folder).compress("bits")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="must be at least 1"):
        Compression("bits", budget=0)


def test_cached_and_compressed_at_once_are_refused(run_folder: Path) -> None:
    with pytest.raises(UserError, match="choose one of them"):
        load_run(run_folder, cached=True, compressed=True)


def test_a_packed_table_moves_with_the_model_and_is_no_weight_of_it() -> None:
    embedding = DeFINE(50, 24, map_dim=16, expand_dim=64).eval()
    names = list(embedding.state_dict())
    embedding.look_up(compress_embedding(embedding, Compression("int8")).table)
    assert list(embedding.state_dict()) == names
    assert sum(p.numel() for p in embedding.parameters()) == sum(p.numel() for p in DeFINE(50, 24, 16, 64).parameters())
    embedding.double()
    assert embedding.packed.mean.dtype == torch.float64
    assert embedding(torch.tensor([3])).dtype == torch.float64
    embedding.train()
    assert embedding.packed is None


def test_the_loss_by_frequency_weighs_tokens_as_often_as_they_occur() -> None:
    torch.manual_seed(0)
    embedding = DeFINE(600, 32, map_dim=16, expand_dim=64)
    counts = torch.tensor([1000 // (i + 1) for i in range(600)])
    made = compress_embedding(embedding, Compression("int4"), counts=counts)
    mass = (counts + 1) / (counts + 1).sum()
    table = embedding.table()
    centred = table - mass @ table
    error = made.table(torch.arange(600)) - table
    by_hand = (error.square().sum(1) * mass).sum() / (centred.square().sum(1) * mass).sum()
    assert made.lost_by_frequency == pytest.approx(float(by_hand), rel=1e-3)


def test_codes_larger_than_the_vectors_are_refused() -> None:
    embedding = DeFINE(20, 24, map_dim=16, expand_dim=64)
    with pytest.raises(UserError, match="the vectors themselves take 1,920"):
        compress_embedding(embedding, Compression("codes"))
    assert compress_embedding(embedding, Compression("int8")).bytes < 1920


@pytest.mark.parametrize(
    "arguments", [{"codebooks": 2.5}, {"codebooks": 0}, {"codebooks": 100, "entries": 256}], ids=str
)
def test_impossible_sizes_are_one_sentence(arguments: dict) -> None:
    with pytest.raises(UserError):
        Compression("codes", **arguments)


def test_what_an_embedding_looked_up_before_it_looks_up_afterwards() -> None:
    embedding = DeFINE(50, 24, map_dim=16, expand_dim=64).eval()
    table = compress_embedding(embedding, Compression("int8")).table
    embedding.look_up(table)
    compress_embedding(embedding, Compression("int4"))
    assert embedding.packed is table


def test_one_flipped_bit_is_noticed(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = load_run(run_copy).compressed_files()
    content = bytearray(file.read_bytes())
    content[-50] ^= 4
    file.write_bytes(bytes(content))
    assert command("eval", str(run_copy), "--compressed") == 2
    assert "not those that were written" in capsys.readouterr().err


def test_the_next_command_names_the_checkpoint(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("compress", str(run_copy), "--method", "int8", "--checkpoint", "last") == 0
    assert capsys.readouterr().out.rstrip().endswith("--compressed --checkpoint last")
