"""The programs of a language model: its embedding, and the step of a context model that has one."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from torchdefine.context import SteppingModel
from torchdefine.data import Tokenization
from torchdefine.data.tokenizer import TOKENIZER_FILE
from torchdefine.data.vocabulary import VOCABULARY_FILE
from torchdefine.embedding import TokenEmbedding
from torchdefine.export import Exportable, Port, Program
from torchdefine.export.card import embedding_in_words, in_words
from torchdefine.tasks.language.model import LanguageModel

WORDS = f"""words = [line.split("\\t")[0] for line in open("{VOCABULARY_FILE}", encoding="utf-8")][1:]"""
SUBWORDS = f"""from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file("{TOKENIZER_FILE}")"""


def exportable(model: LanguageModel, tokenization: Tokenization) -> Exportable:
    """A model in evaluation mode; if its context model has no ``step``, only the embedding is exported."""
    context: Any = model.context
    programs = [embedding_program(model.embedding)]
    notes = ["Only the embedding is exported, because this context model has no step."]
    if hasattr(context, "step"):
        programs.append(step_program(model, context, tokenization))
        notes = getattr(context, "step_notes", [])
    described = context.describe() if hasattr(context, "describe") else in_words(context)
    description = (
        f"A language model of {len(tokenization):,} {tokenization.kind}: {described}. "
        f"The embedding is {embedding_in_words(model.embedding)}. The output layer is {in_words(model.output)}."
    )
    return Exportable(model, programs, description, notes)


def embedding_program(embedding: TokenEmbedding) -> Program:
    how = "computed" if embedding.looked_up is None else "unpacked from a compressed table"
    if embedding.cached_vectors is not None:
        how = "looked up in the cached table"
    shape, count = ("batch", "length"), embedding.num_embeddings
    inputs, given = [Port("ids", shape, "int64", count)], ""
    summary = f"Ids to the vectors that the model reads, {how}."
    if embedding.reads_previous:
        inputs.append(Port("before", shape, "int64", count + 1))
        summary += " `before` is one more than the token before each, and 0 where there is none."
        given = ", $lib.asarray([[0, 2, 3], [0, 5, 6]])"

    def call(ids: Tensor, *before: Tensor) -> list[Tensor]:
        return [embedding(ids, previous=before[0] - 1) if before else embedding(ids)]

    return Program(
        "embedding",
        summary,
        embedding,
        call,
        tuple(inputs),
        (Port("vectors", (*shape, embedding.embedding_dim)),),
        f"""embedding = opened("embedding")
ids = $lib.asarray([[1, 2, 3], [4, 5, 6]])
(vectors,) = embedding(ids{given})
print(vectors.shape)""",
    )


def step_program(model: LanguageModel, context: SteppingModel, tokenization: Tokenization) -> Program:
    one, structure = tree_flatten(model.initial_state(1))
    two, _ = tree_flatten(model.initial_state(2))
    state = []
    for (name, below), a, b in zip(model.state_tensors().items(), one, two, strict=True):
        # A size that differs between the states of one row and of two is the batch's.
        shape = tuple(size if size == other else "batch" for size, other in zip(a.shape, b.shape, strict=True))
        state.append(Port(name, shape, str(a.dtype).removeprefix("torch."), below))

    def step(ids: Tensor, *carried: Tensor) -> list[Tensor]:
        log_probs, after = model.step(ids, tree_unflatten(carried, structure))
        return [log_probs, *tree_flatten(after)[0]]

    def eager(ids: Tensor, *carried: Tensor) -> list[Tensor]:
        hidden, after = model.hidden(ids, tree_unflatten(carried, structure))
        return [model.output.log_prob(hidden[:, -1]), *tree_flatten(after)[0]]

    return Program(
        "step",
        "One token further, or as many as the shape of `ids` allows: from ids and the state to log-probabilities of "
        "the next token and the new state. The state starts at zero.",
        model,
        step,
        (Port("ids", ("batch", context.step_length or "length"), "int64", model.embedding.num_embeddings), *state),
        (Port("log_probs", ("batch", model.output.num_embeddings)), *(port.after() for port in state)),
        _code(state, tokenization),
        eager,
    )


def _code(state: list[Port], tokenization: Tokenization) -> str:
    """The most probable continuation of the start of a line."""
    words = tokenization.kind == "words"
    shown = "words[ids.item()]" if words else "tokenizer.id_to_token(ids.item())"
    alike = groupby((port.sized({"batch": 1}), port.dtype) for port in state)
    zeros = [f"[$lib.zeros({shape}, dtype=$lib.{dtype})] * {len(list(ports))}" for (shape, dtype), ports in alike]
    return f"""{WORDS if words else SUBWORDS}
step = opened("step")
state = {" + ".join(zeros)}
ids = $lib.asarray([[{tokenization.eos_id}]])  # a line begins after the end of another
for _ in range(10):
    log_probs, *state = step(ids, *state)
    ids = log_probs.argmax(-1)[:, None]
    print({shown}, end=" ")"""
