"""Text → token ids → batches: vocabularies, tokenizers, corpora that are encoded once, and corpora known by name."""

from torchdefine.data.batches import IGNORE, TokenStreams, evaluation_streams, shard
from torchdefine.data.bitext import Bitext, BitextRules, SentencePairs, encode_bitext
from torchdefine.data.bitext_batches import BitextBatches, PairBatch
from torchdefine.data.corpus import Corpus, encode_corpus
from torchdefine.data.named import (
    DOWNLOADABLE,
    SHIPPED,
    SHIPPED_BITEXTS,
    corpus_names,
    licence_of,
    resolve_bitext,
    resolve_corpus,
)
from torchdefine.data.segments import Segment, SegmentPlan
from torchdefine.data.text_files import TextBlock, find_splits, read_text
from torchdefine.data.token_file import TokenFile, TokenHeader
from torchdefine.data.tokenization import Tokenization, load_tokenization
from torchdefine.data.tokenizer import SubwordTokenizer, train_bpe
from torchdefine.data.tokenizer_pair import TokenizerPair
from torchdefine.data.vocabulary import EOS, UNK, Vocabulary

__all__ = [
    "DOWNLOADABLE",
    "EOS",
    "IGNORE",
    "SHIPPED",
    "SHIPPED_BITEXTS",
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
    "find_splits",
    "licence_of",
    "load_tokenization",
    "read_text",
    "resolve_bitext",
    "resolve_corpus",
    "shard",
    "train_bpe",
]
