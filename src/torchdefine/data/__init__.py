"""Text → token ids → batches: vocabularies, tokenizers, corpora that are encoded once, and corpora known by name."""

from torchdefine.data.batches import IGNORE, Segment, SegmentPlan, TokenStreams, evaluation_streams, shard
from torchdefine.data.bitext import Bitext, BitextRules, SentencePairs, encode_bitext, one_line
from torchdefine.data.bitext_batches import BitextBatches, PairBatch
from torchdefine.data.corpus import Corpus, encode_corpus
from torchdefine.data.sources import (
    NAMED_TEXTS,
    SPLITS,
    corpus_names,
    find_bitext,
    find_splits,
    licence_of,
    resolve_bitext,
    resolve_corpus,
)
from torchdefine.data.text_files import TextBlock, read_pairs, read_text
from torchdefine.data.token_file import TokenFile, TokenHeader
from torchdefine.data.tokenization import Tokenization, TokenizerPair, load_tokenization
from torchdefine.data.tokenizer import SubwordTokenizer, train_bpe
from torchdefine.data.vocabulary import EOS, UNK, Vocabulary

__all__ = [
    "EOS",
    "IGNORE",
    "NAMED_TEXTS",
    "SPLITS",
    "UNK",
    "Bitext",
    "BitextBatches",
    "BitextRules",
    "Corpus",
    "PairBatch",
    "Segment",
    "SegmentPlan",
    "SentencePairs",
    "SubwordTokenizer",
    "TextBlock",
    "TokenFile",
    "TokenHeader",
    "TokenStreams",
    "Tokenization",
    "TokenizerPair",
    "Vocabulary",
    "corpus_names",
    "encode_bitext",
    "encode_corpus",
    "evaluation_streams",
    "find_bitext",
    "find_splits",
    "licence_of",
    "load_tokenization",
    "one_line",
    "read_pairs",
    "read_text",
    "resolve_bitext",
    "resolve_corpus",
    "shard",
    "train_bpe",
]
