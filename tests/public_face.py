"""The public face as a project uses it that is checked by ``mypy --strict``; nothing here is run."""

from pathlib import Path
from typing import Any, assert_type

import torch
from torch import Tensor, nn

import torchdefine
from torchdefine import (
    AdaptiveMap,
    DeFINE,
    DeFINEBag,
    DefineUnit,
    Diverged,
    GroupLinear,
    HostMap,
    MachineError,
    ProjectiveMap,
    ReplacementReport,
    Run,
    SlimMap,
    StandardMap,
    TorchRecMap,
    UnitConfig,
    UserError,
    load_recipe,
    load_run,
    make_plan,
    register_context,
    register_embedding,
    register_output,
    register_task,
    register_unit,
    replace_embeddings,
    restore,
    train,
)
from torchdefine.adapt import FitOptions, Fitted, ShrinkOptions, Shrunk, fit, shrink_model
from torchdefine.adapt.huggingface import with_define, with_table
from torchdefine.context import LSTM, ContextModel, LSTMConfig
from torchdefine.data import Corpus, Vocabulary
from torchdefine.embedding import MapLayer, Plan, TokenEmbedding, VocabularyFacts
from torchdefine.export import LoadedExport, load_export
from torchdefine.output import AdaptiveSoftmax, FullSoftmax
from torchdefine.run import RunFolder, average_run
from torchdefine.tables import CompactTable, Compressed, compress_embedding, load_table, transform_table
from torchdefine.task import Recipe, Task


def embeddings(ids: Tensor) -> Tensor:
    embedding = DeFINE(1000, 64, map_dim=16, depth=3, padding_idx=0)
    assert_type(embedding.cached(), nn.Embedding)
    assert_type(embedding.table(), Tensor)
    assert_type(embedding.plan, Plan)
    assert_type(embedding.resize(2000), DeFINE)
    embedding.save("folder")
    assert_type(DeFINE.load("folder"), DeFINE)
    assert_type(DeFINE.from_pretrained("folder"), DeFINE)
    assert_type(DeFINEBag(embedding, mode="sum").cached(), nn.EmbeddingBag)
    assert_type(make_plan(16, UnitConfig(depth=3)), Plan)
    maps: list[MapLayer] = [StandardMap(1000, 64), ProjectiveMap(1000, 16, 64), AdaptiveMap(1000, 64, [100])]
    maps += [HostMap(StandardMap(1000, 64), cache_rows=100), SlimMap(1000, 64, parts=2, pool=50)]
    known: list[type[TokenEmbedding] | type[nn.Module]] = [DeFINE, DefineUnit, GroupLinear, TorchRecMap]
    assert_type(DeFINE.over(maps[2], 32), DeFINE)
    print(maps, known, VocabularyFacts(1000))
    vectors: Tensor = embedding(ids)  # nn.Module has no type for what a call gives
    return vectors


def adapted(model: nn.Module, folder: Path) -> None:
    report = replace_embeddings(model, map_dim=32)
    assert_type(report, ReplacementReport)
    assert_type(report.parameters_after, int)
    restore(model, report)
    table = transform_table(nn.Embedding(1000, 64), 20_000)
    assert_type(table, CompactTable)
    assert_type(table.stored_bytes, int)
    assert_type(load_table(folder / "table.safetensors").logits(torch.ones(2, 64)), Tensor)
    assert_type(compress_embedding(DeFINE(1000, 64), "bits", "20kB"), Compressed)
    assert_type(fit(nn.Embedding(1000, 64), [3] * 1000, "20kB", options=FitOptions()), Fitted)
    shrunk = shrink_model("model", "corpus.txt", folder, "3MB", options=ShrinkOptions(thorough=True))
    assert_type(shrunk, Shrunk)
    print(with_define(model, map_dim=32), with_table(model, table))


def runs(folder: Path) -> None:
    run: Run = train("demo/standard", out=folder, train={"steps": 10})
    assert_type(run.result, dict[str, Any])
    assert_type(run.compress(), dict[Path, Compressed])
    opened: Run = load_run(folder, compressed=True)
    recipe: Recipe = load_recipe("demo/standard")
    assert_type(average_run(folder), tuple[RunFolder, list[int]])
    assert_type(load_export(folder), LoadedExport)
    assert_type(torchdefine.__version__, str)
    print(opened, recipe, Corpus, Vocabulary)


def parts(task: type[Task]) -> ContextModel:
    try:
        assert_type(register_task(task), type[Task])
        register_unit(UnitConfig, "mine")
        print(register_context, register_embedding, register_output, AdaptiveSoftmax, FullSoftmax)
    except (UserError, MachineError, Diverged) as error:
        print(error)
    return LSTM(16, LSTMConfig())
