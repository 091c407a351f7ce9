"""Subwords, as a tokenizer file of the Hugging Face package ``tokenizers`` defines them (extra ``bpe``)."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from torchdefine.data.text_files import bytes_of, read_texts
from torchdefine.data.vocabulary import EOS, UNK, VOCABULARY_FILE, Tokenization, Vocabulary
from torchdefine.errors import UserError
from torchdefine.files import Meter, Progress, read_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD = "<pad>"
BOS = "<bos>"
SPECIALS = (PAD, BOS, EOS, UNK)
TOKENIZER_FILE, SOURCE_FILE, TARGET_FILE = "tokenizer.json", "source.tokenizer.json", "target.tokenizer.json"

SMALLEST_BPE = 256 + len(SPECIALS)
"""Byte-level BPE starts from one token for each byte, so that no text is unknown to it."""

_CHECKED_LINES, _CHECKED_CHARACTERS = 1000, 10_000  # of a block, and of each of these lines
_LINES_AT_ONCE = 1024  # what the package returns for a line is many times its size


class SubwordTokenizer(Tokenization):
    """Subwords ↔ ids. Lines are encoded as they are, white space included, and each is ended by ``<eos>``.

    ``<pad>``, ``<bos>``, ``<eos>`` and ``<unk>`` always have ids: those a file lacks are added at its end.
    """

    kind = "subwords"
    file_name = TOKENIZER_FILE
    pad_id: int
    bos_id: int
    tokenizer: Tokenizer
    """The package's own object, with all its methods."""

    def __init__(self, json_text: str) -> None:
        """Take the text of a tokenizer file; ``load`` reads it from there."""
        tokenizer = _tokenizers().Tokenizer.from_str(json_text)
        missing = [token for token in SPECIALS if token not in tokenizer.get_vocab()]
        if missing:
            tokenizer.add_special_tokens(missing)
            json_text = tokenizer.to_str()
        # The fingerprint is of this text, not of what the package would write now, which depends on its version.
        self._json = json_text
        self.tokenizer = _uncut(tokenizer)
        vocabulary = tokenizer.get_vocab()
        self._size = max(vocabulary.values()) + 1  # ids may have gaps
        self.pad_id, self.bos_id, self.eos_id = (vocabulary[token] for token in (PAD, BOS, EOS))
        model = json.loads(json_text)["model"]
        unknown = model.get("unk_id")  # a Unigram model has its own unknown token as a number, the others by name
        self.unk_id = vocabulary.get(model.get("unk_token"), vocabulary[UNK]) if unknown is None else int(unknown)

    @cached_property
    def _literal(self) -> Tokenizer:
        """The same for text that looks like a special token: a mode of its own, since threads share the other one."""
        tokenizer = _uncut(_tokenizers().Tokenizer.from_str(self._json))
        tokenizer.encode_special_tokens = True
        return tokenizer

    def __len__(self) -> int:
        return self._size

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self._json.encode()).hexdigest()

    def id(self, token: str) -> int:
        index = self.tokenizer.token_to_id(token)
        return self.unk_id if index is None else index

    def token(self, index: int) -> str:
        token = self.tokenizer.id_to_token(index) if 0 <= index < self._size else None
        if token is None:
            raise IndexError(f"The id {index} is not one of the tokenizer's {self._size} subwords.")
        return token

    def encode_lines(self, lines: Sequence[str]) -> np.ndarray:
        lines_of_ids = ((*encoding.ids, self.eos_id) for encoding in _encodings(self.tokenizer, lines))
        return np.fromiter(chain.from_iterable(lines_of_ids), dtype=np.uint32)

    def lost_characters(self, lines: Sequence[str]) -> tuple[int, int]:
        """Of a sample of the lines, white space aside. Decoding would tell less, since a file need not say how."""
        sample = [line[:_CHECKED_CHARACTERS] for line in lines[:: len(lines) // _CHECKED_LINES + 1]]
        encodings = self.tokenizer.encode_batch(sample, add_special_tokens=False)
        lost = sum(_uncovered(line, encoding.offsets) for line, encoding in zip(sample, encodings, strict=True))
        if (normalizer := self.tokenizer.normalizer) is not None:
            normalized = [normalizer.normalize_str(line) for line in sample]
            again = self.tokenizer.encode_batch(normalized, add_special_tokens=False)
            for line, other, one, two in zip(sample, normalized, encodings, again, strict=True):
                if line != other and one.ids == two.ids:  # else the change is a spelling, as that of spaces
                    lost += (Counter(_printed(line)) - Counter(_printed(other))).total()
        return lost, sum(len(_printed(line)) for line in sample)

    def _decode_line(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def encode_sentences(self, sentences: Sequence[str]) -> list[list[int]]:
        """The ids of each sentence by itself, without ``<eos>``; text that looks like a special token stays text."""
        specials = {self.pad_id, self.bos_id, self.eos_id}
        encoded = [encoding.ids for encoding in _encodings(self._literal, sentences)]
        return [  # a foreign tokenizer may still have them among its words
            ids if specials.isdisjoint(ids) else [self.unk_id if i in specials else i for i in ids] for ids in encoded
        ]

    def decode_sentence(self, ids: Sequence[int]) -> str:
        """The text of one sentence in one line, without special tokens and with single spaces."""
        return " ".join(self.tokenizer.decode(list(ids), skip_special_tokens=True).split())

    def _file_text(self) -> str:
        return self._json

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a tokenizer file: one that ``save`` wrote, or any of the package ``tokenizers``."""
        json_text = read_text(Path(path), "tokenizer file")
        _tokenizers()  # fails here if the package is missing, which is not a damaged file
        try:
            return cls(json_text)
        except Exception as error:  # the package raises nothing more precise
            raise UserError(f"{path} is not a tokenizer file of the package tokenizers ({error}).") from error


def _uncut(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _encodings(tokenizer: Tokenizer, lines: Sequence[str]) -> Iterator[Any]:
    for start in range(0, len(lines), _LINES_AT_ONCE):
        yield from tokenizer.encode_batch(list(lines[start : start + _LINES_AT_ONCE]), add_special_tokens=False)


def load_tokenization(folder: str | Path) -> Tokenization:
    """Read back what ``save`` wrote into a folder."""
    words, subwords = Path(folder) / VOCABULARY_FILE, Path(folder) / TOKENIZER_FILE
    if words.is_file() and subwords.is_file():
        raise UserError(f"{folder} has both {words.name} and {subwords.name}: remove the one that is not meant.")
    if words.is_file():
        return Vocabulary.load(words)
    if subwords.is_file():
        return SubwordTokenizer.load(subwords)
    raise UserError(f"{folder} has neither {words.name} nor {subwords.name}: check the folder's name.")


@dataclass(frozen=True)
class TokenizerPair:
    """Source and target subwords of a translator; a joint tokenizer is both."""

    source: SubwordTokenizer
    target: SubwordTokenizer
    kind: Literal["subwords"] = "subwords"

    @property
    def joint(self) -> bool:
        return self.source is self.target

    def __len__(self) -> int:
        """How many target ids there are, among which the model predicts."""
        return len(self.target)

    @property
    def sha256(self) -> str:
        both = self.source.sha256 + self.target.sha256
        return self.target.sha256 if self.joint else hashlib.sha256(both.encode()).hexdigest()

    def save(self, folder: str | Path) -> Path:
        """Write into a folder: ``tokenizer.json`` for a joint tokenizer, else one file for each side."""
        sides = {SOURCE_FILE: self.source, TARGET_FILE: self.target}
        for name, side in ({TOKENIZER_FILE: self.target} if self.joint else sides).items():
            side.save(Path(folder) / name)
        return Path(folder)

    @classmethod
    def load(cls, path: str | Path) -> TokenizerPair:
        """Read what ``save`` wrote into a folder, or one tokenizer file for both sides."""
        path = Path(path)
        if (path / SOURCE_FILE).is_file():
            return cls(SubwordTokenizer.load(path / SOURCE_FILE), SubwordTokenizer.load(path / TARGET_FILE))
        joint = SubwordTokenizer.load(path / TOKENIZER_FILE if path.is_dir() else path)
        return cls(joint, joint)


def train_subwords(
    files: Sequence[str | Path], vocabulary_size: int, progress: Progress | None = None
) -> SubwordTokenizer:
    """Learn a byte-level BPE of at most ``vocabulary_size`` tokens from text files; the specials come first."""
    if not files:
        raise UserError("Training a tokenizer needs at least one text file.")
    if vocabulary_size < SMALLEST_BPE:
        needed = f"{SMALLEST_BPE}: the 256 bytes and {', '.join(SPECIALS)}"
        raise UserError(f"vocabulary_size is {vocabulary_size}, but must be at least {needed}.")
    paths = [Path(file) for file in files]
    meter = Meter(bytes_of(paths), progress)
    tokenizer = train_subwords_on((block.lines for block in read_texts(paths, meter.advance)), vocabulary_size)
    meter.finish()
    return tokenizer


def train_subwords_on(
    blocks: Iterable[list[str]], vocabulary_size: int, *, sentences: bool = False
) -> SubwordTokenizer:
    """The same from blocks of lines; with ``sentences`` a word is the same token at a line's start and within it."""
    tokenizers = _tokenizers()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=sentences)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet, specials = tokenizers.pre_tokenizers.ByteLevel.alphabet(), list(SPECIALS)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary_size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(blocks, trainer)
    return SubwordTokenizer(tokenizer.to_str())


def _printed(text: str) -> str:
    """The text without white space, and without the sign that stands for it in some tokenizers."""
    return "".join(text.replace("\u2581", " ").split())


def _uncovered(line: str, offsets: Sequence[tuple[int, int]]) -> int:
    """How many characters no token was made of."""
    rest, end = [], 0
    for start, stop in sorted(offsets):
        rest.append(line[end:start])
        end = max(end, stop)
    return len(_printed("".join([*rest, line[end:]])))


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise UserError("Subwords need the package tokenizers: pip install 'torchdefine[bpe]'.") from error
    return tokenizers
