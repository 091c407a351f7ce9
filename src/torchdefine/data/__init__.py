"""Text → token ids → batches: vocabularies, tokenizers, corpora that are encoded once, and corpora known by name."""

from torchdefine.data.batches import IGNORE, BitextBatches, SegmentPlan, TokenStreams, shard
from torchdefine.data.bitext import Bitext, BitextConfig, SentencePairs, encode_bitext
from torchdefine.data.corpus import Corpus, TextConfig, encode_corpus
from torchdefine.data.sources import (
    NAMED_TEXTS,
    SPLITS,
    DataConfig,
    corpus_names,
    find_bitext,
    find_splits,
    licence_of,
    resolve_corpus,
)
from torchdefine.data.text_files import read_pairs, read_text
from torchdefine.data.token_file import TokenFile
from torchdefine.data.tokenizer import SubwordTokenizer, TokenizerPair, load_tokenization, train_subwords
from torchdefine.data.vocabulary import EOS, UNK, Tokenization, Vocabulary

__all__ = [
    "EOS",
    "IGNORE",
    "NAMED_TEXTS",
    "SPLITS",
    "UNK",
    "Bitext",
    "BitextBatches",
    "BitextConfig",
    "Corpus",
    "DataConfig",
    "SegmentPlan",
    "SentencePairs",
    "SubwordTokenizer",
    "TextConfig",
    "TokenFile",
    "TokenStreams",
    "Tokenization",
    "TokenizerPair",
    "Vocabulary",
    "corpus_names",
    "encode_bitext",
    "encode_corpus",
    "find_bitext",
    "find_splits",
    "licence_of",
    "load_tokenization",
    "read_pairs",
    "read_text",
    "resolve_corpus",
    "shard",
    "train_subwords",
]
