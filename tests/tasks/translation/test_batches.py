import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers")

from torchdefine.data import Bitext, BitextBatches
from torchdefine.recipe import load_recipe
from torchdefine.run import RunFolder
from torchdefine.task import find_task
from torchdefine.tasks.translation import PairData, TranslationRecipe, Translator, evaluate_pairs
from torchdefine.training.distributed import Processes
from torchdefine.training.precision import Precision
from torchdefine.training.step import TrainingStep


@pytest.fixture(scope="module")
def recipe(translation_recipe: Path) -> TranslationRecipe:
    return load_recipe(str(translation_recipe), {"train": {"epochs": 2}})


@pytest.fixture(scope="module")
def bitext(recipe: TranslationRecipe) -> Bitext:
    return find_task("translation").open_data(recipe, None)


def data(recipe: TranslationRecipe, bitext: Bitext, rank: int = 0, count: int = 1, parts: int = 2) -> PairData:
    batches = BitextBatches(bitext.splits["train"], bitext.tokenization, 150, "cpu", seed=1)
    return PairData(batches, replace(recipe.train, accumulate=parts), Processes(rank, count))


def build(recipe: TranslationRecipe, bitext: Bitext) -> Translator:
    return find_task("translation").build(recipe, bitext.tokenization, bitext)


def test_processes_share_what_one_would_take(recipe: TranslationRecipe, bitext: Bitext) -> None:
    alone = data(recipe, bitext, parts=4)
    shared = [data(recipe, bitext, rank, 2, parts=2) for rank in (0, 1)]
    assert {one.total_steps for one in shared} == {alone.total_steps}
    for step in (0, 3, alone.total_steps - 1):
        whole, halves = alone.batch(step), [one.batch(step) for one in shared]
        parts = [part for half in halves for part in half.parts]
        for mine, theirs in zip(whole.parts, parts, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine.inputs, theirs.inputs, strict=True))
            assert theirs.weight == pytest.approx(2 * mine.weight)  # processes are averaged, parts added up
        assert sum(part.weight for part in whole.parts) == pytest.approx(1)
        assert whole.tokens == sum(half.tokens for half in halves)


def test_batches_come_in_the_order_of_the_seed(recipe: TranslationRecipe, bitext: Bitext) -> None:
    def sources(seed: int) -> list[list[list[int]]]:
        seeded = replace(recipe, train=replace(recipe.train, seed=seed))
        found = find_task("translation").batches(seeded, bitext, torch.device("cpu"), Processes()).batch(0)
        return [part.inputs[0].tolist() for part in found.parts]

    assert sources(1) == sources(1)
    assert sources(1) != sources(2)


def test_a_whole_number_of_steps_is_not_rounded_up(recipe: TranslationRecipe) -> None:
    batches = SimpleNamespace(per_epoch=7)  # of which three make a step: 27 epochs are 63 steps
    settings = replace(recipe.train, accumulate=3, epochs=27.0)
    assert PairData(batches, settings, Processes(0, 1)).total_steps == 63  # type: ignore[arg-type]


def test_an_epoch_ends_where_its_batches_do(recipe: TranslationRecipe, bitext: Bitext) -> None:
    pairs = data(recipe, bitext, parts=1)
    assert pairs.total_steps == 2 * pairs.batches.per_epoch
    assert pairs.epoch_after(pairs.batches.per_epoch) == 1.0
    assert pairs.epoch_after(1) == pytest.approx(1 / pairs.steps_per_epoch)
    assert "of the" in pairs.batch(3).place
    for parts in (1, 2, 3, 4):  # a pass may end within a step, and is noticed once
        several = data(recipe, bitext, parts=parts)
        passes = [several.epoch_after(step) for step in range(1, several.total_steps + 1)]
        assert [p for p in passes if p.is_integer()] == [1.0, 2.0]
        assert passes == sorted(passes)


def test_a_step_weighs_every_target_token_alike(recipe: TranslationRecipe, bitext: Bitext) -> None:
    """The gradient of a step in two parts is that of the mean over all tokens of both."""
    still = replace(
        recipe,
        context=replace(recipe.context, dropout=0.0),
        embedding=replace(recipe.embedding, row_dropout=0.0),
        unit=replace(recipe.unit, dropout=0.0),
    )
    model = build(still, bitext).double()
    batch = data(recipe, bitext).batch(0)
    total = sum(model(*part.inputs, reduction="sum")[0].objective for part in batch.parts) / batch.tokens
    total.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    step = TrainingStep(model, model, optimizer, Precision("fp32", torch.device("cpu")), [0, 0], None, recorded=False)
    step(batch, 0.0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name])
    assert float(step.summed_loss) == pytest.approx(float(total.detach()), rel=1e-5)


def test_perplexity_counts_every_target_token_once(
    recipe: TranslationRecipe, bitext: Bitext, bitext_folder: Path
) -> None:
    model = build(recipe, bitext).double()
    pairs, tokenization = bitext.splits["valid"], bitext.tokenization
    found = evaluate_pairs(model, pairs, tokenization, batch_tokens=64)
    assert model.training
    model.eval()
    total, tokens = 0.0, 0
    ends = [np.concatenate(([0], e)) for e in (pairs.source_ends, pairs.target_ends)]
    for index in range(len(pairs)):
        source, target = (
            torch.from_numpy(np.array(file.tokens[e[index] : e[index + 1]], dtype=np.int64))[None]
            for file, e in ((pairs.source, ends[0]), (pairs.target, ends[1]))
        )
        inputs = torch.cat((torch.tensor([[tokenization.target.bos_id]]), target[:, :-1]), 1)
        total += float(model(source, inputs, target, reduction="sum")[0].objective.detach())
        tokens += target.shape[1]
    assert found.tokens == tokens
    assert found.loss == pytest.approx(total / tokens)
    assert found.bits_per_byte == pytest.approx(total / math.log(2) / (bitext_folder / "valid.de").stat().st_size)


@pytest.mark.slow
def test_two_processes_reproduce_one_with_the_doubled_batch(translation_recipe: Path, tmp_path: Path) -> None:
    still = ["--unit.dropout", "0", "--embedding.row_dropout", "0", "--context.dropout", "0"]
    still += ["--train.steps", "20", "--train.log_every", "1"]
    processes = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    processes += ["--rdzv-endpoint", "localhost:0"]
    losses = []
    for start, parts in (([], "4"), (processes, "2")):
        out = tmp_path / parts
        arguments = [sys.executable, *start, "-m", "torchdefine", "train", str(translation_recipe), "--out", str(out)]
        done = subprocess.run(
            [*arguments, *still, "--train.accumulate", parts],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        losses.append([record["loss"] for record in RunFolder(out).records("train")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_learned_subwords_are_counted(bitext_folder: Path) -> None:
    def sentence(**settings: int | bool) -> str:
        data = {"corpus": str(bitext_folder), **settings}
        few = load_recipe("tatoeba/laptop", {"data": data, "source": {"share": "nothing"}})
        return find_task("translation").about_data(few, find_task("translation").open_data(few, None))[0]

    assert sentence(bpe_size=300) == "300 subwords were learned from the training text."
    assert sentence(bpe_size=280, joint=False) == "280 and 280 subwords were learned from the training text."
    few = sentence(bpe_size=5000)
    assert few.endswith("subwords were learned from the training text, which has no more: data.bpe_size is 5,000.")
