"""The programs of a translator: its encoder, and the step of its decoder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from torchdefine.context import DecoderState
from torchdefine.data import TokenizerPair
from torchdefine.data.tokenizer import SOURCE_FILE, TARGET_FILE, TOKENIZER_FILE
from torchdefine.errors import UserError
from torchdefine.export import Exportable, Port, Program
from torchdefine.export.card import embedding_in_words
from torchdefine.tasks.translation.model import Translator

LIMIT = "Every source needs a token that is not padding. For a beam, repeat the encoder's outputs."


def exportable(model: Translator, tokenization: TokenizerPair) -> Exportable:
    """A model in evaluation mode."""
    transformer = model.transformer
    if transformer.config.feed_forward == "sru":
        raise UserError(
            "A translator with context.feed_forward sru cannot be exported, because a program cannot loop over the "
            "places of a source: use relu."
        )
    layers = f"{transformer.config.encoder_layers} + {transformer.config.decoder_layers} layers"
    sides = [
        f"The embedding of {side if side == 'both sides' else f'the {side}'} is {embedding_in_words(embedding)}."
        for side, embedding in model.embeddings().items()
    ]
    what = f"A translator: a Transformer of {layers}, {transformer.width} wide."
    description = " ".join([what, *sides, f"Its target vocabulary has {len(tokenization):,} subwords."])
    programs = [encoder_program(model, tokenization), decoder_program(model, tokenization)]
    return Exportable(model, programs, description, [LIMIT])


def encoder_program(model: Translator, tokenization: TokenizerPair) -> Program:
    eos, pad = tokenization.source.eos_id, model.pad_id

    def encode(ids: Tensor) -> list[Tensor]:
        encoded, visible = model.encode(ids)  # (B, S, m), (B, S)
        return [encoded, visible, *_flat(model.transformer.start(encoded, visible).memory)]

    return Program(
        "encoder",
        f"From a source, with its end token and padded with the id {pad}, to its vectors, a mask that is true where "
        "there is no padding, and the keys and values for the decoder.",
        model,
        encode,
        (Port("ids", ("batch", "source_length"), "int64", model.source.num_embeddings, pad),),
        (
            Port("encoded", ("batch", "source_length", model.transformer.width)),
            Port("visible", ("batch", "source_length"), "bool"),
            *_keys_and_values(model, "source_", "source_length"),
        ),
        f"""from tokenizers import Tokenizer

encoder = opened("encoder")
tokenizer = Tokenizer.from_file("{TOKENIZER_FILE if tokenization.joint else SOURCE_FILE}")
sources = [tokenizer.encode(line, add_special_tokens=False).ids + [{eos}] for line in ("Hello.", "How are you?")]
longest = max(map(len, sources))
ids = $lib.asarray([source + [{pad}] * (longest - len(source)) for source in sources])
encoded, visible, *source_keys_and_values = encoder(ids)
print(encoded.shape, visible)""",
    )


def decoder_program(model: Translator, tokenization: TokenizerPair) -> Program:
    own = _keys_and_values(model, "", "target_length")

    def decode(ids: Tensor, visible: Tensor, *keys_and_values: Tensor) -> list[Tensor]:
        pairs = list(zip(keys_and_values[::2], keys_and_values[1::2], strict=True))
        of_source, of_target = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
        log_probs, after = model.step(ids, DecoderState(of_target, of_source, visible[:, None, None, :]))
        return [log_probs, *_flat(after.own)]

    return Program(
        "decoder",
        "From the last token of every target, the encoder's outputs, and the target's keys and values so far (none at "
        "first), to log-probabilities of the next token and the keys and values including this one.",
        model,
        decode,
        (
            Port("ids", ("batch",), "int64", model.target.num_embeddings),
            Port("visible", ("batch", "source_length"), "bool"),
            *_keys_and_values(model, "source_", "source_length"),
            *own,
        ),
        (
            Port("log_probs", ("batch", model.output.num_embeddings)),
            *(port.after(target_length="target_length + 1") for port in own),
        ),
        _greedy_search(own, tokenization),
    )


def _keys_and_values(model: Translator, prefix: str, length: str) -> list[Port]:
    config = model.transformer.config
    sizes = ("batch", config.heads, length, model.transformer.width // config.heads)
    layers = range(config.decoder_layers)
    return [Port(f"{prefix}{what}_{layer}", sizes) for layer in layers for what in ("key", "value")]


def _greedy_search(own: Sequence[Port], tokenization: TokenizerPair) -> str:
    _, heads, _, width = own[0].shape
    bos, eos = tokenization.target.bos_id, tokenization.target.eos_id
    return f"""# continues the code of the encoder
decoder = opened("decoder")
own = [$lib.zeros((len(ids), {heads}, 0, {width}), dtype=$lib.float32)] * {len(own)}
last, found = $lib.full((len(ids),), {bos}), []
for _ in range(50):
    log_probs, *own = decoder(last, visible, *source_keys_and_values, *own)
    last = log_probs.argmax(-1)
    found.append(last.tolist())
tokenizer = Tokenizer.from_file("{TOKENIZER_FILE if tokenization.joint else TARGET_FILE}")
print([tokenizer.decode([*line, {eos}][: [*line, {eos}].index({eos})]) for line in zip(*found)])"""


def _flat(pairs: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
    return [tensor for pair in pairs for tensor in pair]
