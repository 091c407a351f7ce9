import os
from pathlib import Path

# Some virtual machines announce bfloat16 instructions that they then refuse; oneDNN must be told before its first use.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import numpy as np
import pytest
import torch
from hypothesis import settings

if os.environ.get("PYTEST_XDIST_WORKER"):
    torch.set_num_threads(1)


settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="session")
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Encoded texts go to a folder of the tests' own."""
    os.environ["TORCHDEFINE_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 60 words in which each word half decides the next: small, and there is something to learn."""
    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(0)
    for split, lines in (("train", 400), ("valid", 60), ("test", 60)):
        text, word = [], 0
        for _ in range(lines):
            row = []
            for _ in range(int(random.integers(3, 12))):
                word = (word * 7 + 3) % 60 if random.random() < 0.6 else int(random.zipf(1.5)) % 60
                row.append(f"w{word}")
            text.append(" ".join(row))
        (folder / f"{split}.txt").write_text("\n".join(text) + "\n")
    return folder


@pytest.fixture(scope="session")
def recipe_file(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A recipe that trains in a second, with every kind of randomness in it."""
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(f"""description: A tiny model for tests
data: {{corpus: {corpus}}}
embedding: {{kind: adaptive, map_dim: 16, cutoffs: [10, 30], division: 2, row_dropout: 0.1}}
unit: {{kind: define, expand_dim: 32, depth: 3, dropout: 0.1}}
context: {{layers: 2, hidden_dim: 24, input_dropout: 0.2, hidden_dropout: 0.2}}
output: {{kind: adaptive}}
loss: {{output_dropout: 0.2}}
optim: {{kind: adam, lr: 5.0e-3, clip: 1.0}}
train: {{batch_size: 4, length: 10, steps: 60, log_every: 7, eval_every: 25, checkpoint_every: 10}}
eval: {{batch_size: 2, length: 16}}
""")
    return path


@pytest.fixture(scope="session")
def bitext_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences of ten words and their translations word by word, in which numbers stand for numbers."""
    folder = tmp_path_factory.mktemp("bitext")
    random = np.random.default_rng(0)
    english = ["one", "two", "three", "four", "five", "six", "red", "blue", "house", "tree"]
    german = ["eins", "zwei", "drei", "vier", "fünf", "sechs", "rot", "blau", "Haus", "Baum"]
    for split, count in (("train", 400), ("valid", 30), ("test", 30)):
        rows = [random.integers(0, 10, int(random.integers(1, 6))) for _ in range(count)]
        for language, words in (("en", english), ("de", german)):
            lines = [" ".join(words[index] for index in row) + "." for row in rows]
            (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def translation_recipe(tmp_path_factory: pytest.TempPathFactory, bitext_folder: Path) -> Path:
    """A recipe for translation that trains in seconds, with every kind of randomness in it."""
    path = tmp_path_factory.mktemp("recipe") / "translate.yaml"
    path.write_text(f"""description: A tiny translator for tests
task: translation
data: {{corpus: {bitext_folder}, bpe_size: 330, max_length: 20}}
embedding: {{map_dim: 16, row_dropout: 0.02}}
unit: {{kind: define, embedding_dim: 32, expand_dim: 32, depth: 3, dropout: 0.1}}
source: {{share: unit}}
context: {{encoder_layers: 1, decoder_layers: 1, heads: 2, hidden_dim: 48, dropout: 0.02}}
output: {{tied: table}}
loss: {{label_smoothing: 0.05}}
optim: {{kind: adam, lr: 0.6, clip: 1.0, beta2: 0.98}}
schedule: {{kind: noam, warmup: 40, noam_width: 32}}
train: {{batch_tokens: 150, steps: 200, log_every: 10, eval_every: 50, checkpoint_every: 15, accumulate: 2, keep: 3}}
beam: {{size: 2, batch_size: 16}}
""")
    return path
