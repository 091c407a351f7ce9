"""What can be done with a trained language model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchdefine.data import UNK, TokenFile, Tokenization, corpus_names, encode_corpus, resolve_corpus
from torchdefine.errors import UserError
from torchdefine.export import Exportable
from torchdefine.files import Progress
from torchdefine.run.run import Measured, Run, Sample, check_split
from torchdefine.tasks.language.about_data import MANY_UNKNOWN
from torchdefine.tasks.language.evaluate import PUBLIC_STREAMS, evaluate, short_stream_warning, unigram_perplexity
from torchdefine.tasks.language.generate import generate
from torchdefine.tasks.language.model import LanguageModel
from torchdefine.tasks.language.neural_cache import NeuralCache, tune_neural_cache
from torchdefine.tasks.language.programs import exportable
from torchdefine.tasks.language.recipe import LanguageRecipe
from torchdefine.tasks.sampling import SamplingOptions
from torchdefine.training.evaluation import Evaluation


class LanguageRun(Run):
    """A trained language model with its vocabulary, settings and result."""

    model: LanguageModel
    recipe: LanguageRecipe

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
        streams, steps = self._streams(batch_size, length)
        with self._remembering(memory, clamp):
            return evaluate(
                self.model,
                self._text(split, data),
                self.tokenization.eos_id,
                batch_size=streams,
                length=steps,
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
        text, start = self._text("valid", data), self.tokenization.eos_id
        streams, steps = self._streams(batch_size, length)
        with self._remembering(memory, clamp):
            best, _ = tune_neural_cache(self.model, text, start, batch_size=streams, length=steps, progress=progress)
        return best

    def unigram_perplexity(self, split: str = "test", *, data: str | Path | None = None) -> float:
        """The perplexity of a model that only counts the words, or subwords, of the training text."""
        counts = self.token_counts()
        assert counts is not None  # every run of a language model keeps them
        return unigram_perplexity(counts, np.asarray(self._text(split, data).tokens))

    def exportable(self, model: LanguageModel) -> Exportable:
        return exportable(model, self.tokenization)

    def measure(
        self,
        split: str = "test",
        *,
        data: str | Path | None = None,
        progress: Progress | None = None,
        batch_size: int | None = None,
        length: int | None = None,
        memory: int | None = None,
        clamp: int | None = None,
        neural_cache: NeuralCache | None = None,
        tune_cache: bool = False,
    ) -> Measured:
        """Perplexities, bits per byte and the protocol, in lines and as facts."""
        settings: dict[str, Any] = {"data": data, "length": length, "memory": memory, "clamp": clamp}
        unigram, cache = self.unigram_perplexity(split, data=data), neural_cache
        lines = []
        if tune_cache:
            cache = self.tune_cache(batch_size=batch_size, progress=progress, **settings)
            lines.append(f"Best on the validation text: --neural-cache {cache.window},{cache.theta:g},{cache.weight:g}")
        settings["cache"] = cache
        found = self.evaluate(split, batch_size=batch_size, progress=progress, **settings)
        public = None
        if self.recipe.eval.public and batch_size is None:
            public = self.evaluate(split, batch_size=PUBLIC_STREAMS, progress=progress, **settings)
        streams = self.recipe.eval.batch_size if batch_size is None else batch_size
        facts: dict[str, Any] = {**found.to_dict(), "unigram_perplexity": unigram}
        facts |= {} if cache is None else {"neural_cache": asdict(cache)}
        facts |= {} if public is None else {"public": public.to_dict()}
        return Measured([*lines, *_lines(split, found, unigram, streams), *_public_lines(public)], facts)

    def generate(
        self,
        prompt: str = "",
        length: int = 100,
        options: SamplingOptions | None = None,
        *,
        seed: int | None = None,
    ) -> str:
        """Continue a text, after a newline with a new line; unknown words are read as <unk>, which is never drawn."""
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
        return str(words.decode(generate(self.model, ids, length, options, generator=generator)))

    def unknown_words(self, text: str) -> list[str]:
        """The words of a text that are read as <unk>; a subword tokenizer splits such words instead."""
        words = self.tokenization
        if words.kind != "words":
            return []
        return [word for word in dict.fromkeys(text.split()) if words.id(word) == words.unk_id and word != UNK]

    @property
    def names_of_tokens(self) -> Tokenization:
        return self.tokenization

    def sample(self, prompt: str, length: int, seed: int) -> Sample:
        between = " " if self.tokenization.kind == "words" else ""
        text = f"{prompt}{between}{self.generate(prompt, length, seed=seed)}".strip()
        outside = ", ".join(self.unknown_words(prompt))
        note = f"Outside its vocabulary, so read as {UNK}: {outside}." if outside else ""
        return Sample(f"Continuations of “{prompt}”, drawn with seed {seed}.", text, note=note)

    def token_counts(self) -> Sequence[int] | None:
        counts: Sequence[int] | None = self.tokenization.counts
        return super().token_counts() if counts is None else counts

    def _streams(self, batch_size: int | None, length: int | None) -> tuple[int, int]:
        """How many streams of how many tokens a step, by default those of the recipe."""
        own = self.recipe.eval
        return own.batch_size if batch_size is None else batch_size, own.length if length is None else length

    def _text(self, split: str, data: str | Path | None) -> TokenFile:
        check_split(split)
        if data is not None and (file := Path(data).expanduser()).is_file():
            if split != "test":
                raise UserError(f"{data} is a single file, which is a test text and no {split} text: name a folder.")
            source = file
        else:
            if data is not None:
                _check_is_there(data)
            source = resolve_corpus(self.recipe.data.corpus if data is None else data)
        return encode_corpus(source, vocabulary=self.tokenization, split=split).splits[split]

    @contextmanager
    def _remembering(self, memory: int | None, clamp: int | None) -> Iterator[None]:
        """Let a context model that can look back farther or less far for a while."""
        remembering = getattr(self.model.context, "remembering", None)
        if memory is None and clamp is None:
            yield
        elif remembering is None:
            raise UserError("Only a Transformer-XL can be evaluated with another memory or clamp: leave them out.")
        else:
            with remembering(memory, clamp):
                yield


def _lines(split: str, found: Evaluation, unigram: float, streams: int) -> list[str]:
    bits = f", {found.bits_per_byte:.4f} bits per byte" if found.bits_per_byte else ""
    lines = [
        f"{split} perplexity {found.perplexity:,.4f} (unigram {unigram:,.1f}, loss {found.loss:.5f} nats{bits})",
        f"{found.tokens:,} tokens, {found.unknown_share:.2%} of them outside the vocabulary",
        found.protocol,
    ]
    if found.unknown_share > MANY_UNKNOWN:
        lines.append("So many unknown words flatter a model: compare with the same vocabulary only.")
    if short := short_stream_warning(found.tokens, streams):
        lines.append(f"{short} --batch-size 1 is exact.")
    return lines


def _public_lines(public: Evaluation | None) -> list[str]:
    if public is None:
        return []
    return [f"public protocol: perplexity {public.perplexity:,.4f} (loss {public.loss:.5f} nats)", public.protocol]


def _check_is_there(data: str | Path) -> None:
    """Refuse a path that does not exist; a plain name may be that of a corpus."""
    path = Path(data).expanduser()
    if (len(path.parts) > 1 or path.suffix) and not path.exists():
        raise UserError(
            f"There is no file or folder {data}: an evaluation takes a folder with texts, a text file, or one of the "
            f"corpora {', '.join(corpus_names())}."
        )
