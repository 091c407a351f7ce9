"""The programs of a masked language model: its embedding, its encoder, and what it takes for every token."""

from __future__ import annotations

from torch import Tensor

from torchdefine.export import Exportable, Port, Program
from torchdefine.export.card import embedding_in_words, in_words
from torchdefine.tasks.masked.model import MaskedModel
from torchdefine.tasks.masked.text import MaskedTokenizer


def exportable(model: MaskedModel, tokens: MaskedTokenizer) -> Exportable:
    """A model in evaluation mode."""
    config, size = model.encoder.config, len(tokens)
    ids = Port("ids", ("batch", "length"), "int64", size, padding=tokens.pad_id)
    visible = Port("visible", ("batch", "length"), "bool")

    def encode(ids: Tensor, visible: Tensor) -> list[Tensor]:
        return [model.hidden(ids, visible)]

    def predict(ids: Tensor, visible: Tensor) -> list[Tensor]:
        return [model.output.log_prob(model.head(model.hidden(ids, visible)))]

    opening = f"""from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file("{MaskedTokenizer.file_name}")
read = tokenizer.encode("The {tokens.mask} is in the north of the country .").ids
ids = $lib.asarray([[{tokens.bos_id}, *read, {tokens.eos_id}]])
visible = ids != {tokens.pad_id}"""
    programs = [
        Program(
            "encoder",
            "Ids, and where there is no padding, to a vector in context for every token.",
            model,
            encode,
            (ids, visible),
            (Port("vectors", ("batch", "length", model.encoder.width)),),
            f"""{opening}
(vectors,) = opened("encoder")(ids, visible)
print(vectors.shape)""",
        ),
        Program(
            "predictions",
            "Ids, and where there is no padding, to log-probabilities of all tokens at every place.",
            model,
            predict,
            (ids, visible),
            (Port("log_probs", ("batch", "length", size)),),
            f"""{opening}
(log_probs,) = opened("predictions")(ids, visible)
place = (ids[0] == {tokens.mask_id}).tolist().index(True)
print(tokenizer.id_to_token(int(log_probs[0, place].argmax())))""",
        ),
    ]
    description = (
        f"A masked language model of {size:,} subwords: an encoder of {config.layers} layers, {model.encoder.width} "
        f"wide. The embedding is {embedding_in_words(model.embedding)}. The output layer is {in_words(model.output)}."
    )
    return Exportable(model, programs, description, [f"A row may have {config.most_places} tokens at most."])
