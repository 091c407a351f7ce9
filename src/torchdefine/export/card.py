"""The model card of an export: what the model is, what it learned from, how good it is, how to run it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Template
from typing import Any

import torch

from torchdefine.data import Tokenization, TokenizerPair
from torchdefine.embedding.token_embedding import PART_NAMES, TokenEmbedding
from torchdefine.export.formats import ProgramFormat
from torchdefine.export.program import CHECKED_AT, TOLERANCE, Exportable
from torchdefine.plain import escaped

IN_WORDS = {
    "StandardMap": "a standard table",
    "ProjectiveMap": "a projected table",
    "AdaptiveMap": "a table in bands by frequency",
    "SlimMap": "rows made of shared sub-vectors",
    "DefineUnit": "a DeFINE unit",
    "DenseProjection": "a dense projection",
    "DenseMLP": "a dense MLP",
    "FullSoftmax": "one softmax over all tokens",
    "AdaptiveSoftmax": "an adaptive softmax",
    "AdaptiveTableSoftmax": "an adaptive softmax over one table",
    "MixtureSoftmax": "a mixture of softmaxes",
}


@dataclass(frozen=True)
class ExportedFrom:
    """What an export says about the run that it was made from."""

    name: str
    description: str
    task: str
    config: str
    """The run's settings as YAML."""
    checkpoint: str
    """Which weights these are: best, last or average."""
    result: Mapping[str, Any] | None
    """What result.json says, if the run has finished."""
    corpus: str
    data_licence: str | None
    """A sentence on the licence of the text, where it is known."""
    licence: str | None = None
    """The licence that the exporting user names."""


def model_card(
    exportable: Exportable,
    tokenization: Tokenization | TokenizerPair,
    about: ExportedFrom,
    kind: ProgramFormat,
    written: Mapping[str, Mapping[str, Any]],
) -> str:
    """The text of ``README.md``; ``written`` are the programs as ``export.json`` has them."""
    counts, embeddings = exportable.model.parameters_by_part(), list(exportable.model.embeddings().values())
    splits = {} if about.result is None else about.result["data"]["splits"]
    texts = [[name, f"{split['tokens']:,}", f"`{split['text_sha256']}`"] for name, split in splits.items()]
    sections = [
        f"# {one_line(about.name)}",
        one_line(about.description),
        exportable.description,
        "## Parameters",
        _table(["part", "parameters"], [[PART_NAMES[part], f"{count:,}"] for part, count in counts.items()]),
        "## Data and licence",
        f"Trained on `{one_line(about.corpus)}`.",
        _table(["text", "tokens", "SHA-256 of the text"], texts)
        if texts
        else "The run has no result, so the hash of its text is not known.",
        about.data_licence or "The text is the user's own. Its licence is not known here.",
        f"Licence: {one_line(about.licence)}"
        if about.licence
        else "No licence was named for this model. Name one before you share it (`torchdefine export --license`).",
        "## Results",
        *_results(about, any(map(is_rounded, embeddings))),
        "## Programs",
        f"The programs run in {kind.runs_in}, without torchdefine. Run the code below in this folder. Named sizes in a "
        "shape can change from call to call. torchdefine compared every program with the model, on "
        f"{len(CHECKED_AT)} batches of other sizes than in the trace. A difference above {TOLERANCE:.0e} (relative for "
        "numbers above 1) stops an export.",
        f"```python\n{kind.opening}\n```",
        *(part for one in exportable.programs for part in _program(one.code, written[one.name], kind)),
        "## Limits",
        "\n".join(f"- {limit}" for limit in (*_limits(embeddings, tokenization.kind == "words"), *exportable.limits)),
    ]
    return "\n\n".join(sections) + "\n"


def one_line(text: str) -> str:
    """Somebody's text as a sentence: no mark-up, and no line that begins something else."""
    return escaped(" ".join(text.split()))


def embedding_in_words(embedding: TokenEmbedding) -> str:
    table = f"{in_words(embedding.map)}, {embedding.num_embeddings:,} × {embedding.map_dim}"
    unit = f", followed by {in_words(embedding.unit)}" if embedding.unit is not None else ""
    cached = ", looked up in a cache" if embedding.cached_vectors is not None else ""
    packed = ", unpacked from a compressed table" if is_packed(embedding) else ""
    shared = "" if embedding.features is None else f", with {', '.join(embedding.features.texts)}"
    return f"{table}{unit}{shared}, with vectors {embedding.embedding_dim} wide{cached}{packed}"


def in_words(part: object) -> str:
    """What a part of a model is; the class of one that is not ours."""
    name = type(part).__name__
    return IN_WORDS.get(name, f"a part of class {name}")


def is_packed(embedding: TokenEmbedding) -> bool:
    """Whether its vectors are unpacked from a compressed table."""
    return embedding.looked_up is not None and embedding.cached_vectors is None


def is_rounded(embedding: TokenEmbedding) -> bool:
    """Whether an embedding looks up other vectors than it was trained with."""
    table = embedding.cached_vectors
    return is_packed(embedding) or (table is not None and table.dtype != torch.float32)


def _results(about: ExportedFrom, rounded: bool) -> Iterator[str]:
    if about.result is None:
        yield "The run has no result, because it was exported before it had finished."
        return
    rows = []
    for split, evaluation in about.result["evaluation"].items():
        perplexity = evaluation["perplexity"]
        shown = f"{perplexity:.2f}" if math.isfinite(perplexity) else "not finite"
        rows.append([one_line(split), "perplexity", shown, one_line(evaluation.get("protocol", ""))])
        for name, title in (("bleu", "BLEU"), ("chrf", "chrF")):
            if name in evaluation:
                rows.append(
                    [one_line(split), title, f"{evaluation[name]:.2f}", one_line(evaluation[f"{name}_signature"])]
                )
    yield _table(["text", "measure", "value", "how"], rows)
    if about.checkpoint != "best":
        yield f"These are the numbers of the run's best weights, but this export has its {about.checkpoint} weights."
    if rounded:
        yield "They were measured with float32 vectors. This export has rounded vectors."


def _program(code: str, written: Mapping[str, Any], kind: ProgramFormat) -> list[str]:
    rows = []
    for way, ports in (("in", written["inputs"]), ("out", written["outputs"])):
        for port in ports:
            shape = f"({', '.join(map(str, port['shape']))}{',' if len(port['shape']) == 1 else ''})"
            rows.append([way, f"`{port['name']}`", shape, port["dtype"]])
    return [
        f"### `{written['file']}`",
        written["summary"],
        _table(["", "name", "shape", "type"], rows),
        f"Largest difference from the model: {written['largest_difference']:.1e}.",
        f"```python\n{Template(code).substitute(lib=kind.library)}\n```",
    ]


def _limits(embeddings: Sequence[TokenEmbedding], of_words: bool) -> Iterator[str]:
    yield "The programs do not check ids. Ids outside the vocabulary give errors or wrong numbers."
    yield "The programs were traced and compared on a CPU, in float32."
    yield "The model repeats the errors and biases of its training text. It was not tested for any use."
    dtypes = {table.dtype for one in embeddings if (table := one.cached_vectors) is not None}
    for dtype in dtypes - {torch.float32}:
        rounded = str(dtype).removeprefix("torch.")
        yield f"Cached vectors are in {rounded}. The programs were compared with the model that uses them."
    if any(map(is_packed, embeddings)):
        yield "The vectors are packed, with some loss. The programs were compared with the model that uses them."
    if of_words:
        yield "Words outside the vocabulary are `<unk>`. Split text into words as in the training text."


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
