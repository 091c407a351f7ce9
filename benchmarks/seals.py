"""What it costs to compare a text's ids with their seal before it is evaluated."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.measuring import Contestant, Goal, Group, Prepared, Setting
from benchmarks.records import Benchmark
from torchdefine.data import encode_corpus, resolve_corpus
from torchdefine.data.token_file import TokenFile
from torchdefine.embedding import VocabularyFacts
from torchdefine.recipe import load_recipe
from torchdefine.tasks.language import build_language_model, evaluate

RECIPE = "demo/adaptive-define"
EVALUATED, COMPARED = "the evaluation", "its ids are compared"


def evaluation(text: TokenFile, size: int, setting: Setting) -> Prepared:
    recipe = load_recipe(RECIPE)
    torch.manual_seed(1)
    with setting.device:
        model = build_language_model(recipe, VocabularyFacts(size)).eval()
    streams, length = recipe.eval.batch_size, recipe.eval.length
    return Prepared(lambda: evaluate(model, text, 0, batch_size=streams, length=length))


def comparison(text: TokenFile) -> Prepared:
    """Anew in every call, where an evaluation does it once for each file that it opens."""

    def work() -> None:
        TokenFile.open(text.path, text.header, text.vocabulary_size).verify()

    return Prepared(work)


def groups(setting: Setting) -> Iterator[Group]:
    corpus = encode_corpus(resolve_corpus(setting.data))
    text = corpus.splits["valid"]
    contestants = [
        Contestant(EVALUATED, lambda: evaluation(text, len(corpus.tokenization), setting)),
        Contestant(COMPARED, lambda: comparison(text)),
    ]
    share = Goal(
        "the comparison: share of the evaluation's time",
        lambda rows: rows[COMPARED].ms / rows[EVALUATED].ms,
        0.02,
        at_most=True,
        gpu_only=False,
    )
    yield Group("seals", contestants, [share], f"{len(text):,} ids, {RECIPE}")


BENCHMARK = Benchmark("seals", "what it costs to compare a text's ids with their seal before an evaluation", groups)
