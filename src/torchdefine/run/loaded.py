"""A run with its weights, and what can be done with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchdefine.context import TransformerXL
from torchdefine.data import TokenFile, corpus_names, encode_corpus, resolve_corpus
from torchdefine.data.sources import SPLITS
from torchdefine.data.vocabulary import UNK
from torchdefine.decoding import (
    LongLine,
    NeuralCache,
    SamplingOptions,
    Translation,
    TranslationOptions,
    generate,
    tune_neural_cache,
)
from torchdefine.embedding import TokenEmbedding
from torchdefine.errors import UserError
from torchdefine.files import Progress, check_writable
from torchdefine.inference.cache import use_cache, write_cache
from torchdefine.inference.compress import (
    Compressed,
    Compression,
    compress_embedding,
    use_compressed,
    write_compressed,
)
from torchdefine.models import LanguageModel
from torchdefine.recipe import Recipe, short_name
from torchdefine.run.translation import TranslationEvaluation, evaluate_translator, translate_text
from torchdefine.spelling import option
from torchdefine.training import Evaluation, RunFolder, evaluate
from torchdefine.training.evaluate import unigram_perplexity


@dataclass(repr=False)
class Run:
    """A trained model with its vocabulary, settings and result."""

    folder: RunFolder
    recipe: Recipe
    tokenization: Any
    """A ``Vocabulary`` or ``SubwordTokenizer``; the ``TokenizerPair`` of a translator."""
    model: Any
    """A ``LanguageModel`` or a ``Translator``."""
    weights: Path
    """The checkpoint that the model's weights came from."""

    def __repr__(self) -> str:
        measured = "not finished"
        if self.folder.result.exists():
            scores = {split: self.result.get(f"{split}_perplexity") for split in ("test", "valid")}
            found = [f"{split} perplexity {score:,.2f}" for split, score in scores.items() if score is not None]
            measured = found[0] if found else "nothing measured"
        parameters = self.model.parameters_by_part()["total"]
        return f"Run({self.folder.path}: {short_name(self.recipe.name)}, {parameters:,} parameters, {measured})"

    @property
    def embedding(self) -> TokenEmbedding:
        """The embedding that pictures and neighbours show; for a translator, that of the target side."""
        found: TokenEmbedding = list(self.model.embeddings().values())[-1]
        return found

    def cache(self, dtype: str = "fp32", progress: Progress | None = None) -> dict[Path, int]:
        """Write the finished vectors of every embedding beside the weights; returns the files and their bytes."""
        files = self.cache_files()
        for file in files:
            check_writable(file)
        return {file: write_cache(file, embedding, dtype, progress) for file, embedding in files.items()}

    def use_cache(self) -> None:
        """Look up the vectors that ``cache`` wrote, instead of computing them; refuses those of other weights."""
        for file, embedding in self.cache_files().items():
            use_cache(file, embedding)

    def cache_files(self) -> dict[Path, TokenEmbedding]:
        """Where the finished vectors of each embedding go."""
        return self._beside_weights("cache")

    def compress(self, how: Compression | None = None, progress: Progress | None = None) -> dict[Path, Compressed]:
        """Pack the finished vectors of every embedding into a file beside the weights; returns the files and sizes."""
        if how is not None and not isinstance(how, Compression):
            raise TypeError(f"How vectors are packed is a Compression, not {how!r}: use Compression('bits'), say.")
        files, counts = self.compressed_files(), self.token_counts()
        for file in files:
            check_writable(file)
        made = {file: compress_embedding(e, how, counts=counts, progress=progress) for file, e in files.items()}
        for file, one in made.items():
            write_compressed(file, files[file], one, self._vocabulary_facts())
        return made

    def use_compressed(self) -> None:
        """Look up the vectors that ``compress`` packed, instead of computing them; refuses those of other weights."""
        for file, embedding in self.compressed_files().items():
            use_compressed(file, embedding, self._vocabulary_facts())

    def compressed_files(self) -> dict[Path, TokenEmbedding]:
        """Where the packed vectors of each embedding go."""
        return self._beside_weights("compressed")

    def token_counts(self) -> list[int] | None:
        """How often each token occurs in the training text, if the vocabulary or the run's folder has counts."""
        counts: list[int] | None = getattr(self.tokenization, "counts", None)
        return self.folder.read_token_counts() if counts is None else counts

    def _vocabulary_facts(self) -> dict[str, Any]:
        return {"vocabulary_sha256": self.tokenization.sha256}

    def _beside_weights(self, what: str) -> dict[Path, TokenEmbedding]:
        folder = self.weights.parent
        return {
            folder / f"{'-'.join([what, *name.split()])}.safetensors": embedding
            for name, embedding in self.model.embeddings().items()
        }

    def export(
        self,
        folder: str | Path,
        format: str = "torch-export",
        *,
        license: str | None = None,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Write the model into a new folder as programs that run without torchdefine; returns export.json's contents.

        ``format`` is "torch-export" or "onnx". Every program is compared with the model before the folder appears.
        """
        from torchdefine.run.exporting import export_run

        return export_run(self, folder, format, license, progress)

    @property
    def result(self) -> dict[str, Any]:
        return self.folder.read_result()

    def evaluate(
        self,
        split: str = "test",
        *,
        data: str | Path | None = None,
        batch_size: int | None = None,
        length: int | None = None,
        memory: int | None = None,
        clamp: int | None = None,
        cache: NeuralCache | None = None,
        progress: Progress | None = None,
    ) -> Evaluation:
        """Perplexity on a split of the run's own corpus, or of another one encoded with the run's vocabulary.

        ``data`` is a folder, a named corpus, or a single text file, which is a test text.
        Settings that are None are as in the recipe; ``memory`` and ``clamp`` are how far back a Transformer-XL looks.
        ``cache`` adds a neural cache, which learns from the text while it reads it.
        """
        if self.recipe.task != "language":
            settings = {"batch_size": batch_size, "length": length, "memory": memory, "clamp": clamp, "cache": cache}
            for name, value in settings.items():
                if value is not None:
                    raise UserError(f"{name} is for language models, and this is a translator: leave it out.")
            return self.evaluate_translations(split, data=data, progress=progress).predicted
        with _remembering(self.model, memory, clamp):
            return evaluate(
                self.model,
                self._text(split, data),
                self.tokenization.eos_id,
                batch_size=self.recipe.eval.batch_size if batch_size is None else batch_size,
                length=self.recipe.eval.length if length is None else length,
                predict=None if cache is None else cache.predict(self.model),
                note="" if cache is None else f", {cache}",
                progress=progress,
            )

    def tune_cache(
        self,
        *,
        data: str | Path | None = None,
        batch_size: int | None = None,
        length: int | None = None,
        memory: int | None = None,
        clamp: int | None = None,
        progress: Progress | None = None,
    ) -> NeuralCache:
        """The neural cache that does best on the validation text under the settings of an evaluation."""
        self.check_generates()
        with _remembering(self.model, memory, clamp):
            best, _ = tune_neural_cache(
                self.model,
                self._text("valid", data),
                self.tokenization.eos_id,
                batch_size=self.recipe.eval.batch_size if batch_size is None else batch_size,
                length=self.recipe.eval.length if length is None else length,
                progress=progress,
            )
        return best

    def unigram_perplexity(self, split: str = "test", *, data: str | Path | None = None) -> float | None:
        """The perplexity of a model that only counts the words, or subwords, of the training text.

        None for a run from before subwords were counted, unless the text is its own and its result has the number.
        """
        counts, text = self.token_counts(), self._text(split, data)
        return self._unigram_in_result(text) if counts is None else unigram_perplexity(counts, np.asarray(text.tokens))

    def _unigram_in_result(self, text: TokenFile) -> float | None:
        if not self.folder.result.exists():
            return None
        result = self.result
        splits = result["data"].get("splits", {})
        same = [name for name, own in splits.items() if own.get("tokens_sha256") == text.tokens_sha256]
        known = (result.get(f"{name}_unigram_perplexity") for name in same)
        return next((perplexity for perplexity in known if perplexity is not None), None)

    def _text(self, split: str, data: str | Path | None) -> TokenFile:
        _check_split(split)
        if data is not None and (file := Path(data).expanduser()).is_file():
            if split != "test":
                raise UserError(f"{data} is a single file, which is a test text and no {split} text: name a folder.")
            source = file
        else:
            if data is not None:
                _check_is_there(data)
            source = resolve_corpus(self.recipe.data.corpus if data is None else data)
        return encode_corpus(source, vocabulary=self.tokenization, split=split).splits[split]

    def generate(
        self,
        prompt: str = "",
        length: int = 100,
        options: SamplingOptions | None = None,
        *,
        seed: int | None = None,
    ) -> str:
        """Continue a text, after a newline with a new line; unknown words are read as <unk>, which is never drawn."""
        self.check_generates()
        if not isinstance(prompt, str):
            raise UserError(f"The prompt is {prompt!r}, but must be text; how many tokens to draw is the length.")
        if seed is not None and not -(2**63) <= seed < 2**63:
            raise UserError(f"The seed is {seed}, but must fit into 64 bits: use a smaller one.")
        words = self.tokenization
        read = words.encode(prompt)  # ends the last line, whether the prompt does or not
        ids = [words.eos_id, *(read if prompt.endswith("\n") else read[:-1])]
        if options is None:
            options = SamplingOptions(forbidden=() if words.unk_id is None else (words.unk_id,))
        generator = torch.Generator().manual_seed(seed) if seed is not None else None
        continuation = generate(self.model, ids, length, options, generator=generator)
        return words.decode(continuation)

    def unknown_words(self, text: str) -> list[str]:
        """The words of a text that are read as <unk>; a subword tokenizer splits such words instead."""
        words = self.tokenization
        if words.kind != "words":
            return []
        return [word for word in dict.fromkeys(text.split()) if words.id(word) == words.unk_id and word != UNK]

    def translate(
        self,
        lines: Sequence[str],
        options: TranslationOptions | None = None,
        *,
        progress: Progress | None = None,
        on_long_line: Callable[[LongLine], None] | None = None,
    ) -> list[list[Translation]]:
        """The best translations of every line, as many lists as lines; without options, by the recipe's beam."""
        self.check_translates()
        return translate_text(
            self.recipe, self.model, self.tokenization, lines, options, progress=progress, on_long_line=on_long_line
        )

    def evaluate_translations(
        self, split: str = "test", *, data: str | Path | None = None, progress: Progress | None = None
    ) -> TranslationEvaluation:
        """Perplexity, BLEU and chrF on a split of the run's own bitext, or of another one."""
        self.check_translates()
        _check_split(split)
        return evaluate_translator(
            self.recipe, self.model, self.tokenization, split=split, data=data, progress=progress
        )

    def check_generates(self) -> None:
        """Refuse a translator, which cannot continue a text."""
        check_generates(self.folder, self.recipe)

    def check_translates(self) -> None:
        """Refuse a language model, which translates nothing."""
        if self.recipe.task != "translation":
            raise UserError(
                f"The run in {self.folder.path} is a language model, which does not translate: use `torchdefine "
                "generate`."
            )


def check_generates(folder: RunFolder, recipe: Recipe) -> None:
    """Refuse the run of a translator, which may have no weights yet."""
    if recipe.task != "language":
        raise UserError(
            f"The run in {folder.path} is a translator, which continues no text: use `torchdefine translate`."
        )


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise UserError(
            f"The split {split!r} is unknown: use {', '.join(SPLITS[:-1])} or {SPLITS[-1]}, and name a text of your "
            f"own by {option('data')}."
        )


def _check_is_there(data: str | Path) -> None:
    """Refuse a path that does not exist; a plain name may be that of a corpus."""
    path = Path(data).expanduser()
    if (len(path.parts) > 1 or path.suffix) and not path.exists():
        raise UserError(
            f"There is no file or folder {data}: an evaluation takes a folder with texts, a text file, or one of the "
            f"corpora {', '.join(corpus_names())}."
        )


def _remembering(model: LanguageModel, memory: int | None, clamp: int | None) -> AbstractContextManager[None]:
    if memory is None and clamp is None:
        return nullcontext()
    if not isinstance(model.context, TransformerXL):
        raise UserError("Only a Transformer-XL can be evaluated with another memory or clamp: leave them out.")
    return model.context.remembering(memory, clamp)
