"""The model card of an export: what the model is, what it learned from, how good it is, how to run it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from torchdefine.context import LSTM, TransformerXL
from torchdefine.data import Tokenization, TokenizerPair
from torchdefine.embedding import TokenEmbedding
from torchdefine.inference.card_code import code_for
from torchdefine.inference.export_check import TOLERANCE
from torchdefine.inference.export_programs import Port, Program
from torchdefine.inference.export_record import ExportedFrom, WrittenProgram
from torchdefine.tasks.language.model import LanguageModel
from torchdefine.tasks.translation.model import Translator

PARTS = {
    "define": "unit of the embedding",
    "context": "context model",
    "input_output": "input and output tables",
    "total": "total",
}

IN_WORDS = {
    "StandardMap": "a standard table",
    "ProjectiveMap": "a projected table",
    "AdaptiveMap": "a table in bands by frequency",
    "DefineUnit": "a DeFINE unit",
    "DenseProjection": "a dense projection",
    "DenseMLP": "a dense MLP",
    "FullSoftmax": "one softmax over all tokens",
    "AdaptiveSoftmax": "an adaptive softmax",
    "AdaptiveTableSoftmax": "an adaptive softmax over one table",
    "MixtureSoftmax": "a mixture of softmaxes",
}


def model_card(
    model: LanguageModel | Translator,
    tokenization: Tokenization | TokenizerPair,
    about: ExportedFrom,
    format: str,
    written: Sequence[WrittenProgram],
) -> str:
    """The text of ``README.md``."""
    runs_in = {"onnx": "onnxruntime", "torch-export": "torch"}[format]
    sections = [
        f"# {about.name}",
        about.description,
        _what_it_is(model, tokenization),
        "## Parameters",
        _table(["part", "parameters"], [[PARTS[k], f"{n:,}"] for k, n in model.parameters_by_part().items()]),
        "## Data and licence",
        _data(about),
        _licence(about),
        "## Results",
        _results(about, any(_is_rounded(embedding) for embedding in model.embeddings().values())),
        "## Programs",
        f"Each runs in {runs_in}, without torchdefine; the code below runs in this folder. A name in a shape is a size "
        "that each call may choose. Every program was compared with the model itself on "
        f"{len(written[0].checks)} batches of other sizes than it was traced at; a difference above {TOLERANCE:.0e}, "
        "in proportion for numbers above 1, would have stopped the export.",
        *(part for one in written for part in _program(one, tokenization)),
        "## Limits",
        _limits(model, tokenization, [one.program for one in written]),
    ]
    return "\n\n".join(sections) + "\n"


def _what_it_is(model: LanguageModel | Translator, tokenization: Tokenization | TokenizerPair) -> str:
    units = "words" if tokenization.kind == "words" else "subwords"
    if isinstance(model, Translator):
        shape = model.transformer.shape
        layers = f"{shape.encoder_layers} + {shape.decoder_layers} layers"
        what = f"A translator: a Transformer of {layers}, {shape.width} wide."
        named = {"source": "the source", "target": "the target"}
        sides = [f"The embedding of {named.get(s, s)} is {_embedding(e)}." for s, e in model.embeddings().items()]
        return " ".join([what, *sides, f"It writes {len(tokenization):,} different {units}."])
    if isinstance(model.context, LSTM):
        count = len(model.context.layers)
        context = f"an LSTM of {count} layer{'s' if count > 1 else ''}"
    elif isinstance(model.context, TransformerXL):
        context = f"a Transformer-XL of {len(model.context.layers)} layers with {model.context.carried}"
    else:
        context = _in_words(model.context)
    return (
        f"A language model of {len(tokenization):,} {units}: {context}. "
        f"The embedding is {_embedding(model.embedding)}. The output layer is {_in_words(model.output)}."
    )


def _embedding(embedding: TokenEmbedding) -> str:
    table = f"{_in_words(embedding.map)}, {embedding.num_embeddings:,} × {embedding.map_dim}"
    unit = f", and {_in_words(embedding.unit)} behind it" if embedding.unit is not None else ""
    kept = "" if embedding.looked_up is None else ", whose finished vectors are unpacked from a compressed table"
    kept = ", whose finished vectors are looked up" if embedding.cached_vectors is not None else kept
    return f"{table}{unit}, giving vectors {embedding.embedding_dim} wide{kept}"


def _is_rounded(embedding: TokenEmbedding) -> bool:
    table = embedding.cached_vectors
    return embedding.looked_up is not None and (table is None or table.dtype != torch.float32)


def _in_words(part: object) -> str:
    name = type(part).__name__
    return IN_WORDS.get(name, f"a part of the kind {name}")


def _data(about: ExportedFrom) -> str:
    facts = [f"Trained on `{about.corpus}`."]
    splits = {} if about.result is None else about.result["data"]["splits"]
    if splits:
        rows = [[name, f"{split['tokens']:,}", f"`{split['text_sha256']}`"] for name, split in splits.items()]
        facts.append(_table(["text", "tokens", "SHA-256 of the text"], rows))
    else:
        facts.append("The run has no result, so the hash of its text is not known.")
    return "\n\n".join(facts)


def _licence(about: ExportedFrom) -> str:
    of_data = about.data_licence or "The text is the user's own, and its licence is the user's to name."
    of_model = (
        f"Licence, as named at the export: {about.licence}"
        if about.licence
        else "No licence was named for this model: whoever passes it on names one (`torchdefine export --license`)."
    )
    return f"{of_data}\n\n{of_model}"


def _results(about: ExportedFrom, rounded: bool) -> str:
    if about.result is None:
        return "The run has no result: it was not finished when it was exported."
    rows = []
    for split, evaluation in about.result["evaluation"].items():
        perplexity = evaluation["perplexity"]
        shown = f"{perplexity:.2f}" if math.isfinite(perplexity) else "not finite"
        rows.append([split, "perplexity", shown, evaluation.get("protocol", "")])
        for name, signature in (("bleu", "bleu_signature"), ("chrf", "chrf_signature")):
            if name in evaluation:
                shown = {"bleu": "BLEU", "chrf": "chrF"}[name]
                rows.append([split, shown, f"{evaluation[name]:.2f}", evaluation.get(signature, "")])
    sentences = [_table(["text", "measure", "value", "how"], rows)]
    if about.checkpoint != "best":
        sentences.append(
            f"These are the numbers of the run's best weights; the ones here are its {about.checkpoint} ones."
        )
    if rounded:
        sentences.append(
            "They were measured with vectors computed in float32, not with the rounded ones that are here."
        )
    return "\n\n".join(sentences)


def _program(one: WrittenProgram, tokenization: Tokenization | TokenizerPair) -> list[str]:
    program = one.program
    return [
        f"### `{one.file}`",
        program.summary,
        _table(
            ["", "name", "shape", "type"],
            [
                *(["in", *_port(port)] for port in program.inputs),
                *(["out", *_port(port)] for port in program.outputs),
            ],
        ),
        f"Largest difference to the model: {one.largest_difference:.1e}.",
        f"```python\n{code_for(program, one.file, tokenization)}\n```",
    ]


def _port(port: Port) -> list[str]:
    return [f"`{port.name}`", f"({', '.join(map(str, port.shape))}{',' if len(port.shape) == 1 else ''})", port.dtype]


def _limits(
    model: LanguageModel | Translator, tokenization: Tokenization | TokenizerPair, programs: Sequence[Program]
) -> str:
    limits = [
        "Ids outside the vocabulary are not checked by the programs; whoever calls them must.",
        "The programs were traced and compared on a CPU, in float32.",
        "A model knows what its text knew, with all its errors and prejudices; it was not tested for any use.",
    ]
    tables = {e.looked_up: e.cached_vectors for e in model.embeddings().values() if e.looked_up is not None}
    kept_as = {vectors.dtype for vectors in tables.values() if vectors is not None}
    for dtype in kept_as - {torch.float32}:
        rounded = str(dtype).removeprefix("torch.")
        limits.append(f"Finished vectors are kept in {rounded}; the comparison was with the model that looks them up.")
    if any(vectors is None for vectors in tables.values()):
        limits.append(
            "The vectors are compressed, with some loss; the comparison was with the model that unpacks them."
        )
    if tokenization.kind == "words":
        limits.append(
            "Words outside the vocabulary are `<unk>`; text must be split into words as the training text was."
        )
    if isinstance(model, Translator):
        limits.append("Every source needs one token that is no padding. A beam repeats what the encoder gave.")
    elif isinstance(model.context, TransformerXL) and not model.context.evaluation.same_length:
        limits.append(
            "Once the memory is full, the later tokens of a long `ids` see more of the past than they would in steps "
            "of one: lengths matter, as they do in the model."
        )
    if [program.name for program in programs] == ["embedding"]:
        limits.append("Only the embedding is exported: there is no step for this context model.")
    return "\n".join(f"- {limit}" for limit in limits)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '&#124;') for cell in line)} |" for line in lines)
