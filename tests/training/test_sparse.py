"""Sparse gradients of the embedding's tables: what dense ones give, wherever the two mean the same."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from torchdefine import AdaptiveMap, DeFINE, ProjectiveMap, StandardMap, train
from torchdefine.context import LSTM
from torchdefine.errors import UserError
from torchdefine.output import FullSoftmax
from torchdefine.recipe import load_recipe
from torchdefine.run import RunFolder
from torchdefine.tasks.language import LanguageModel
from torchdefine.training import OPTIMIZERS, Trainer
from torchdefine.training.averaging import WeightAverage
from torchdefine.training.optimizers import RowwiseAdagrad, clip_gradients
from torchdefine.training.precision import Precision
from torchdefine.training.progress import Reporter
from torchdefine.training.step import Batch, Part, TrainingStep

V = 40
CPU = torch.device("cpu")
MAPS = {
    "standard": lambda: StandardMap(V, 8, padding_idx=3),
    "projective": lambda: ProjectiveMap(V, 8, 8),
    "adaptive": lambda: AdaptiveMap(V, 8, (5, 20), 2, padding_idx=7, counts=range(V)),
}


class NaiveAdagrad(torch.optim.Optimizer):
    """Row by row over dense gradients."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for table in group["params"]:
                sums = self.state[table].setdefault("sum", [0.0] * len(table))
                for row, gradient in enumerate(table.grad):
                    sums[row] += float((gradient**2).sum()) / len(gradient)
                    if sums[row]:
                        table[row] -= group["lr"] * gradient / (sums[row] ** 0.5 + 1e-10)


def model_of(kind: str) -> LanguageModel:
    torch.manual_seed(1)
    return LanguageModel(
        DeFINE.over(MAPS[kind](), 8, expand_dim=16), LSTM(8, output_dim=8), FullSoftmax(8, num_embeddings=V)
    ).double()


def tables_of(model: LanguageModel) -> list[nn.Parameter]:
    return [module.weight for module in model.embedding.map.modules() if isinstance(module, nn.Embedding)]


def batch(step: int, parts: int, most: int = V) -> Batch:
    ids = torch.from_numpy(np.random.default_rng(step).integers(0, most, (parts, 2, 41)))
    return Batch([Part((row[:, :-1], row[:, 1:]), row[:, 1:].numpy(), 1 / parts) for row in ids], 80)


def stepped(model: LanguageModel, optimizer: Any, *, clip: float | None, parts: int, scaled: bool) -> list[float]:
    """The losses and the norms of some steps; and the average of the weights, put into the model."""
    precision = Precision("fp32", CPU)
    if scaled:
        precision.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    step = TrainingStep(model, model, optimizer, precision, [2] * parts, clip, recorded=False)
    average, seen = WeightAverage(dict(model.named_parameters())), []
    average.start()
    for number in range(4):
        step(batch(number, parts, V // 2), 0.05)
        average.update()
        seen += [float(step.summed_loss), float(step.gradient_norm)]
    average._swap()
    return seen


@pytest.mark.parametrize(
    "options",
    [
        {"clip": None, "parts": 1, "scaled": False},
        {"clip": 0.1, "parts": 2, "scaled": False},
        {"clip": 0.1, "parts": 1, "scaled": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", MAPS)
def test_rowwise_adagrad_gives_what_dense_gradients_give(kind: str, options: dict) -> None:
    config = OPTIMIZERS.read({"kind": "adam", "lr": 0.05, "sparse": "rowwise-adagrad"})
    ours, naive = model_of(kind), model_of(kind)
    ours.embedding.map.sparse = True
    optimizer = config.build_with_tables(ours.parameters(), tables_of(ours), CPU)
    found = stepped(ours, optimizer, **options)
    rest = [p for p in naive.parameters() if all(p is not table for table in tables_of(naive))]
    pair = config.build(rest, CPU), NaiveAdagrad(tables_of(naive), 0.05)
    both = torch.optim.SGD(naive.parameters(), lr=0.05)
    both.step = lambda: [part.step() for part in pair]  # type: ignore[method-assign]
    expected = stepped(naive, both, **options)
    assert found == pytest.approx(expected, rel=1e-9)
    assert all(table.grad.is_sparse for table in tables_of(ours))
    for name, value in naive.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, msg=name)


@pytest.mark.parametrize("kind", MAPS)
def test_sparse_adam_is_adam_where_every_row_is_used_and_leaves_the_others_alone(kind: str) -> None:
    def after(sparse: str, rows: list[int]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        layer = MAPS[kind]().double()
        layer.sparse = sparse != "none"
        before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        config = OPTIMIZERS.read({"kind": "adam", "lr": 0.01, "beta1": 0.7, "beta2": 0.9, "sparse": sparse})
        tables = [m.weight for m in layer.modules() if isinstance(m, nn.Embedding)] if layer.sparse else []
        unused = nn.Parameter(torch.zeros(1))  # a standard map has nothing but its table
        optimizer = config.build_with_tables([*layer.parameters(), unused], tables, CPU)
        for number in range(3):
            optimizer.zero_grad()
            ids = torch.tensor(rows)
            (layer(ids) * torch.linspace(-1, 2 + number, len(rows) * 8).view(-1, 8)).sum().backward()
            optimizer.step()
        return before, layer.state_dict()

    torch.manual_seed(2)
    _, dense = after("none", list(range(V)))
    torch.manual_seed(2)
    _, sparse = after("sparse-adam", list(range(V)))
    for name, value in dense.items():
        # torch's two differ in where epsilon stands
        torch.testing.assert_close(sparse[name], value, rtol=1e-4, atol=1e-4, msg=name)
    before, later = after("sparse-adam", [1, 1, 30])
    changed = sum(
        int((before[name] != later[name]).any(1).sum()) for name in before if "weight" in name and "proj" not in name
    )
    assert changed == 2


def test_clipping_counts_a_row_that_occurs_twice_once() -> None:
    norms = []
    for sparse in (False, True):
        torch.manual_seed(0)
        table, other = nn.Embedding(9, 4, sparse=sparse), nn.Linear(4, 4)
        other(table(torch.tensor([2, 5, 2, 2]))).square().sum().backward()
        parameters = [*table.parameters(), *other.parameters()]
        norms.append((clip_gradients if sparse else clip_grad_norm_)(parameters, 0.5))
        norms += [parameter.grad.to_dense() for parameter in parameters]  # type: ignore[union-attr]
    for dense, sparse in zip(norms[:4], norms[4:], strict=True):
        torch.testing.assert_close(dense, sparse)


def test_rowwise_adagrad_refuses_a_dense_gradient() -> None:
    table = nn.Embedding(9, 4)
    table(torch.tensor([2])).sum().backward()
    with pytest.raises(UserError, match="takes sparse gradients, but a table has a dense one"):
        RowwiseAdagrad(table.parameters()).step()


def test_a_tied_output_layer_makes_the_gradient_dense_and_right() -> None:
    gradients = []
    for sparse in (False, True):
        torch.manual_seed(0)
        table = StandardMap(V, 8, sparse=sparse)
        output = FullSoftmax(8, table)
        ids = torch.tensor([1, 7, 7])
        output.loss(table(ids), ids).backward()
        gradients.append(table.table.weight.grad)
    torch.testing.assert_close(*gradients)
    with pytest.raises(UserError, match="takes sparse gradients, but a table has a dense one"):
        RowwiseAdagrad(table.parameters()).step()


@pytest.mark.parametrize(
    ("processes", "cuda_graphs", "sentence"),
    [
        (1, True, r"which a CUDA graph cannot hold: set train\.cuda_graphs to false"),
        (2, False, "average gradients by NCCL, which has no sparse ones"),
    ],
)
def test_a_gpus_limits_are_named(processes: int, cuda_graphs: bool, sentence: str) -> None:
    recipe = SimpleNamespace(optim=OPTIMIZERS.read({"kind": "adam", "sparse": "sparse-adam"}))
    config, group = SimpleNamespace(cuda_graphs=cuda_graphs), SimpleNamespace(count=processes)
    trainer: Any = SimpleNamespace(recipe=recipe, device=torch.device("cuda"), config=config, processes=group)
    with pytest.raises(UserError, match=sentence):
        Trainer._sparse_tables(trainer)


class Stops(Reporter):
    def trained(self, record: dict) -> None:
        if record["step"] >= 14:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("sparse", "features"),
    [("sparse-adam", []), ("rowwise-adagrad", []), ("sparse-adam", ["bigrams:64x8:concat", "characters:40x8"])],
)
def test_a_recipe_trains_with_sparse_tables_and_resumes_bit_for_bit(
    recipe_file: Path, tmp_path: Path, sparse: str, features: list[str]
) -> None:
    settings: dict[str, Any] = {
        "embedding": {"features": features},
        "optim": {"sparse": sparse, "sparse_lr": 0.02},
        "output": {"tied": "none"},
        "averaging": {"kind": "always"},
        "train": {"steps": 21, "accumulate": 2, "eval_every": 10},
    }
    run = train(recipe_file, out=tmp_path / "whole", **settings)
    assert run.result["settings"]["optim"]["sparse"] == sparse
    with pytest.raises(KeyboardInterrupt):
        train(recipe_file, out=tmp_path / "cut", reporter=Stops(), **settings)
    train(out=tmp_path / "cut", resume=True)
    whole, cut = ([r["loss"] for r in RunFolder(tmp_path / n).records("train")] for n in ("whole", "cut"))
    assert cut == whole
    assert (
        RunFolder(tmp_path / "cut").records("valid")[-1]["loss"]
        == RunFolder(tmp_path / "whole").records("valid")[-1]["loss"]
    )


def test_what_does_not_go_with_sparse_tables_is_refused_by_name(recipe_file: Path, tmp_path: Path) -> None:
    on, untied = {"sparse": "sparse-adam"}, {"tied": "none"}
    refused: dict[str, dict[str, Any]] = {
        "optim.sparse sparse-adam needs tables that are only looked up, but a tied output layer": {"optim": on},
        "optim.weight_decay changes every row": {"optim": {**on, "weight_decay": 0.1}, "output": untied},
        "which torch.compile does not have": {"optim": on, "output": untied, "train": {"compile": True}},
        "optim.sparse_lr is set, but sparse is none": {"optim": {"sparse_lr": 0.1}},
    }
    for sentence, settings in refused.items():
        with pytest.raises(UserError, match=sentence):
            load_recipe(recipe_file, settings)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_gpu_trains_sparse_tables_without_cuda_graphs(recipe_file: Path, tmp_path: Path, precision: str) -> None:
    settings: dict[str, Any] = {"optim": {"sparse": "rowwise-adagrad"}, "output": {"tied": "none"}, "device": "cuda"}
    with pytest.raises(UserError, match=r"which a CUDA graph cannot hold: set train\.cuda_graphs to false"):
        train(recipe_file, out=tmp_path / "recorded", **settings)
    run = train(recipe_file, out=tmp_path / "run", **settings, train={"cuda_graphs": False, "precision": precision})
    assert run.result["best_step"] > 0
