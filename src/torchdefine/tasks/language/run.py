"""What can be done with a trained language model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import product
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from torchdefine.data import UNK, TokenFile, Tokenization
from torchdefine.errors import UserError
from torchdefine.export import Exportable
from torchdefine.files import Progress
from torchdefine.modes import prepared_twin, reading
from torchdefine.run.run import Measured, Run, Sample, text_of
from torchdefine.tasks.language.evaluate import PUBLIC_STREAMS, evaluate, short_stream_warning, unigram_perplexity
from torchdefine.tasks.language.model import LanguageModel
from torchdefine.tasks.language.neural_cache import THETAS, WEIGHTS, WINDOWS, CachedModel, NeuralCache
from torchdefine.tasks.language.programs import exportable
from torchdefine.tasks.language.recipe import LanguageRecipe
from torchdefine.tasks.sampling import SamplingOptions, draw
from torchdefine.training.evaluation import Evaluation

MANY_UNKNOWN = 0.05
"""Fraction of <unk> in a text above which a reader must know of it."""


class LanguageRun(Run):
    """A trained language model with its vocabulary, settings and result."""

    model: LanguageModel
    recipe: LanguageRecipe
    tokenization: Tokenization

    def evaluate(
        self,
        split: str = "test",
        *,
        data: str | Path | TokenFile | None = None,
        batch_size: int | None = None,
        length: int | None = None,
        memory: int | None = None,
        clamp: int | None = None,
        cache: NeuralCache | CachedModel | None = None,
        progress: Progress | None = None,
    ) -> Evaluation:
        """Perplexity on a split of the run's own corpus, or of another one encoded with the run's vocabulary.

        ``data`` is a folder, a named corpus, or a single text file, which is a test text.
        Settings that are None are as in the recipe; ``memory`` and ``clamp`` are how far back a Transformer-XL looks.
        ``cache`` adds a neural cache, which learns from the text while it reads it; a ``CachedModel`` has several.
        """
        own, note = self.recipe.eval, ""
        context: Any = self.model.context
        model: LanguageModel | CachedModel = self.model
        if cache is not None:
            model = cached = cache if isinstance(cache, CachedModel) else CachedModel(self.model, [cache])
            note = f", {cached.choices[0]}"
        remembers = memory is not None or clamp is not None
        if remembers and not hasattr(context, "remembering"):
            raise UserError("Only a Transformer-XL has a memory and a clamp: leave them out.")
        with context.remembering(memory, clamp) if remembers else nullcontext():
            return evaluate(
                model,
                text_of(self, split, data),
                self.tokenization.eos_id,
                batch_size=own.batch_size if batch_size is None else batch_size,
                length=own.length if length is None else length,
                note=note,
                progress=progress,
            )

    def tune_cache(self, *, choices: Sequence[NeuralCache] | None = None, **settings: Any) -> NeuralCache:
        """The neural cache that does best on the validation text, in one pass, with settings of ``evaluate``."""
        choices = choices or [NeuralCache(*values) for values in product(WINDOWS, THETAS, WEIGHTS)]
        cached = CachedModel(self.model, choices)
        self.evaluate("valid", cache=cached, **settings)
        return cached.best

    def unigram_perplexity(self, split: str = "test", *, data: str | Path | None = None) -> float:
        """The perplexity of a model that only counts the words, or subwords, of the training text."""
        counts = self.token_counts()
        assert counts is not None  # every run of a language model keeps them
        return unigram_perplexity(counts, text_of(self, split, data).tokens)

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
        neural_cache: NeuralCache | str | None = None,
        tune_cache: bool = False,
    ) -> Measured:
        """Perplexities, bits per byte and the protocol, in lines and as facts."""
        cache = NeuralCache.of(neural_cache) if isinstance(neural_cache, str) else neural_cache
        how: dict[str, Any] = {"data": data, "length": length, "memory": memory, "clamp": clamp, "progress": progress}
        unigram, lines = self.unigram_perplexity(split, data=data), []
        if tune_cache:
            cache = self.tune_cache(batch_size=batch_size, **how)
            lines.append(f"Best on the validation text: --neural-cache {cache.window},{cache.theta:g},{cache.weight:g}")
        found = self.evaluate(split, batch_size=batch_size, cache=cache, **how)
        bits = f", {found.bits_per_byte:.4f} bits per byte" if found.bits_per_byte else ""
        lines += [
            f"{split} perplexity {found.perplexity:,.4f} (unigram {unigram:,.1f}, loss {found.loss:.5f} nats{bits})",
            f"{found.tokens:,} tokens, {found.unknown_share:.2%} of them outside the vocabulary",
            found.protocol,
        ]
        if found.unknown_share > MANY_UNKNOWN:
            lines.append(
                "With so many unknown words the perplexity is too low: compare only models with the same vocabulary."
            )
        if short := short_stream_warning(found.tokens, batch_size or self.recipe.eval.batch_size):
            lines.append(f"{short} --batch-size 1 is exact.")
        facts = {**found.to_dict(), "unigram_perplexity": unigram}
        if cache is not None:
            facts["neural_cache"] = asdict(cache)
        if self.recipe.eval.public and batch_size is None:
            public = self.evaluate(split, batch_size=PUBLIC_STREAMS, cache=cache, **how)
            facts["public"] = public.to_dict()
            lines.append(f"public protocol: perplexity {public.perplexity:,.4f} (loss {public.loss:.5f} nats)")
            lines.append(public.protocol)
        return Measured(lines, facts)

    def generate(
        self, prompt: str = "", length: int = 100, options: SamplingOptions | None = None, *, seed: int | None = None
    ) -> str:
        """Continue a text, after a newline with a new line; unknown words are read as <unk>, which is never drawn."""
        if not isinstance(prompt, str):
            raise UserError(f"The prompt is {prompt!r}, but must be text; the length sets how many tokens to draw.")
        if seed is not None and not -(2**63) <= seed < 2**63:
            raise UserError(f"The seed is {seed}, but must fit into 64 bits: use a smaller one.")
        words = self.tokenization
        read = words.encode(prompt)  # ends the last line, whether the prompt does or not
        ids = [words.eos_id, *(read if prompt.endswith("\n") else read[:-1])]
        options = options or SamplingOptions(forbidden=(words.unk_id,))
        generator = torch.Generator().manual_seed(seed) if seed is not None else None
        return words.decode(generate(self.model, ids, length, options, generator=generator))

    def unknown_words(self, text: str) -> list[str]:
        """The words of a text that are read as <unk>; a subword tokenizer splits such words instead."""
        words = self.tokenization
        if words.kind != "words":
            return []
        return [word for word in dict.fromkeys(text.split()) if words.id(word) == words.unk_id and word != UNK]

    def sample(self, prompt: str, length: int, seed: int) -> Sample:
        between = " " if self.tokenization.kind == "words" else ""
        text = f"{prompt}{between}{self.generate(prompt, length, seed=seed)}".strip()
        outside = ", ".join(self.unknown_words(prompt))
        note = f"These words are not in the vocabulary and are read as {UNK}: {outside}." if outside else ""
        return Sample(f"Continuations of “{prompt}”, sampled with seed {seed}.", text, note=note)

    def exportable(self, model: LanguageModel) -> Exportable:
        if hasattr(model.context, "keep_segment"):
            model = prepared_twin(model)  # since the model may be the run's own
            keeping: Any = model.context
            keeping.keep_segment(self.recipe.eval.length)
        return exportable(model, self.tokenization)

    @property
    def names_of_tokens(self) -> Tokenization:
        return self.tokenization

    def token_counts(self) -> Sequence[int] | None:
        counts = self.tokenization.counts
        return super().token_counts() if counts is None else counts


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    length: int,
    options: SamplingOptions | None = None,
    *,
    stop_token: int | None = None,
    generator: torch.Generator | None = None,
) -> list[int]:
    """Continue ``prompt``, one id or more, by up to ``length`` tokens; the state is carried, nothing recomputed.

    A context model without a memory reads the prompt and all that follows as one segment.
    """
    prompt = [int(token) for token in prompt]
    if not prompt:
        raise UserError("The prompt is empty: begin with the end-of-line token.")
    if not isinstance(length, Integral) or length < 1:
        raise UserError(f"The length is {length!r}, but must be a whole number of at least 1.")
    options, device = options or SamplingOptions(), next(model.parameters()).device
    with reading(model) as model:
        if hasattr(model.context, "keep_segment"):
            model.context.keep_segment(len(prompt) + length)
        hidden, state = model.hidden(torch.tensor([prompt], device=device), model.initial_state(1))
        log_probs = model.output.log_prob(hidden[:, -1])  # (1, V)
        continuation = [draw(log_probs[0], options, generator)]
        while len(continuation) < length and continuation[-1] != stop_token:
            log_probs, state = model.step(torch.tensor([continuation[-1:]], device=device), state)
            continuation.append(draw(log_probs[0], options, generator))
        return continuation
