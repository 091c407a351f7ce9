"""Every format that the package writes and reads back: how a tiny file of it is made, and what is read from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchdefine import AdaptiveMap, DeFINE, DeFINEBag, UnitConfig, load_run, train
from torchdefine.adapt import ShrinkOptions, shrink_model
from torchdefine.analysis.comparison import compare_runs
from torchdefine.data import Corpus, encode_corpus
from torchdefine.export import load_export
from torchdefine.export.program import sampled
from torchdefine.run import average_run
from torchdefine.run.checkpoint_file import read_checkpoint
from torchdefine.tables import (
    METHODS,
    Budget,
    CodeLearning,
    CompactTable,
    Source,
    UnitFitting,
    load_table,
    table_method,
)

HERE = Path(__file__).parent
TEXT, PAIRS = HERE / "text", HERE / "pairs"
Numbers = dict[str, Tensor]
COPIES = {"int8", "int4", "encoded-text"}
"""Formats whose numbers are read without arithmetic that processors round in ways of their own."""


@dataclass(frozen=True)
class Format:
    write: Callable[[Path], Any]
    """Into a new folder."""
    read: Callable[[Path], Numbers]

    def numbers(self, folder: Path) -> Numbers:
        """The first of all numbers that are read: enough to tell, in a small file."""
        return {what: values.detach().flatten()[:500].contiguous() for what, values in self.read(folder).items()}


def number(value: float | int) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


# Tables

ROWS, WIDTH = 96, 16
SHORT = {
    "define": {"training": UnitFitting(steps=20)},
    "mlp": {"training": UnitFitting(steps=20)},
    "codes": {"codebooks": 8, "training": CodeLearning(steps=20, rounds=1)},
}
"""Settings of methods that would learn for minutes."""
BYTES = {"bits": 900, "used": 900}


def write_table(method: str, folder: Path) -> None:
    matrix = torch.randn(ROWS, WIDTH) @ torch.randn(WIDTH, WIDTH).mul(torch.logspace(0, -1, WIDTH))
    counts = (1000 / torch.arange(1, ROWS + 1)).long() * (torch.arange(ROWS) < 80)
    packing = table_method(method, **SHORT.get(method, {}))
    best = next(packing.within(ROWS, WIDTH, Budget(BYTES.get(method, 3_000))))
    folder.mkdir()
    best.build(Source(matrix, counts, padding_idx=0)).save(folder / "table.safetensors", {"method": method})


def read_table(folder: Path) -> Numbers:
    return vectors(load_table(folder / "table.safetensors"))


def vectors(table: CompactTable) -> Numbers:
    with torch.no_grad():
        return {"vectors": table(torch.arange(table.num_embeddings)), "logits": table.logits(torch.ones(1, WIDTH))}


# Embeddings


def write_embedding(folder: Path) -> None:
    bands = AdaptiveMap(90, 8, cutoffs=[20, 50], division=2, padding_idx=0)
    DeFINE.over(bands, 16, unit=UnitConfig(expand_dim=32, depth=3, weight_scaling=True)).save(folder)


def read_embedding(folder: Path, kind: Any = DeFINE) -> Numbers:
    embedding, ids = kind.load(folder).eval(), torch.arange(90).reshape(9, 10)
    with torch.no_grad():
        return {"vectors": embedding(ids), **dict(embedding.named_parameters())}


# Runs

SMALL = {"lr": 0.01}, {"steps": 8, "eval_every": 4, "log_every": 2, "checkpoint_every": 4, "batch_size": 4}
UNIT = {"kind": "define", "embedding_dim": 16, "expand_dim": 24, "depth": 2}


def write_language_run(folder: Path) -> None:
    optim, training = SMALL
    settings = {"data": {"max_size": 200}, "embedding": {"map_dim": 8, "cutoffs": [50, 100]}, "unit": UNIT}
    settings |= {"context": {"hidden_dim": 16, "output_dim": 16}, "optim": optim}
    training = training | {"length": 8, "keep": 2}
    run = train("demo/adaptive-define", out=folder, verbose=False, train=training, **settings)
    run.cache()
    run.compress("int8")
    average_run(folder)


def write_masked_run(folder: Path) -> None:
    optim, training = SMALL
    settings = {"data": {"bpe_size": 300}, "embedding": {"map_dim": 8}, "unit": UNIT, "optim": optim}
    context = {"layers": 1, "heads": 2, "hidden_dim": 24, "most_places": 32}
    train("masked/laptop", out=folder, verbose=False, context=context, train=training | {"length": 24}, **settings)


def write_translation_run(folder: Path) -> None:
    optim, training = SMALL
    context = {"encoder_layers": 1, "decoder_layers": 1, "heads": 2, "hidden_dim": 24}
    training = {**training, "batch_tokens": 100}
    del training["batch_size"]
    settings = {"data": {"bpe_size": 300}, "embedding": {"map_dim": 8}, "unit": UNIT, "beam": {"size": 2}}
    train("tatoeba/laptop-define", out=folder, verbose=False, context=context, optim=optim, train=training, **settings)


def read_run(folder: Path, data: Path = TEXT) -> Numbers:
    """Its result, the model that its weights make, and the state that training would go on from."""
    run = load_run(folder)
    scores = run.measure("test", data=data).facts
    last = read_checkpoint(folder / "last" / "checkpoint.safetensors")
    [row] = compare_runs([folder]).to_dict()["runs"]
    return {
        "stored perplexity": number(run.result["test_perplexity"]),
        "perplexity": number(scores["perplexity"]),
        "compared": number(row["test_perplexity"]),
        "step": number(last.facts["position"]["step"]),
        "tensors of the state": number(len(last.tensors)),
        "vectors": run.embedding.table(),
    }


def read_language_run(folder: Path) -> Numbers:
    looked_up = {how: load_run(folder, **{how: True}).embedding(torch.arange(200)) for how in ("cached", "compressed")}
    average = load_run(folder, checkpoint="average").embedding.table()
    return read_run(folder) | looked_up | {"average": average}


# Exports and folders of transformers


def write_export(folder: Path) -> None:
    load_run(folder.parent / "run").export(folder, "onnx", license="CC0 1.0")


def read_export(folder: Path) -> Numbers:
    found: Numbers = {}
    for name, program in load_export(folder).programs.items():
        given = program.runner(sampled(program.inputs, {"batch": 2, "length": 3}, 0))
        found |= {f"{name} {place}": tensor for place, tensor in enumerate(given)}
    return found


def write_adapted(folder: Path) -> None:
    from tests.adapt.test_shrink import save_with_tokenizer
    from tests.adapt.tiny_models import bert

    lines = torch.randint(3, 97, (100, 8)).tolist()
    (made := folder.with_name("before")).mkdir()
    (made / "text.txt").write_text("\n".join(" ".join(f"w{word}" for word in line) for line in lines))
    save_with_tokenizer(bert(True), made / "model")
    shrink_model(made / "model", made / "text.txt", folder, "3KB", options=ShrinkOptions(choosing=10, held_out=10))


def write_with_define(folder: Path) -> None:
    from tests.adapt.tiny_models import gpt2
    from torchdefine.adapt.huggingface import with_define

    with_define(gpt2(True), map_dim=8, expand_dim=32).save_pretrained(folder)


def read_transformers(auto: str, folder: Path) -> Numbers:
    from torchdefine.adapt.huggingface import transformers

    model = getattr(transformers, auto).from_pretrained(folder).eval()
    with torch.no_grad():
        return {"logits": model(input_ids=torch.arange(3, 23).reshape(2, 10)).logits}


# Encoded text


def read_tokens(folder: Path) -> Numbers:
    corpus = Corpus.open(folder)
    return {split: torch.tensor(text.tokens.tolist()) for split, text in corpus.splits.items()} | {
        "counts": torch.tensor(list(corpus.tokenization.counts))
    }


FORMATS = {name: Format(partial(write_table, name), read_table) for name in METHODS.names()} | {
    "encoded-text": Format(lambda folder: encode_corpus(TEXT, out=folder), read_tokens),
    "embedding": Format(write_embedding, read_embedding),
    "bag": Format(lambda folder: DeFINEBag(DeFINE(90, 16, 8)).save(folder), partial(read_embedding, kind=DeFINEBag)),
    "run": Format(write_language_run, read_language_run),
    "masked-run": Format(write_masked_run, read_run),
    "translation-run": Format(write_translation_run, partial(read_run, data=PAIRS)),
    "export": Format(write_export, read_export),
    "adapted": Format(write_adapted, partial(read_transformers, "AutoModelForMaskedLM")),
    "with-define": Format(write_with_define, partial(read_transformers, "AutoModelForCausalLM")),
}
