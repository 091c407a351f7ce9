"""Text → token ids → batches: vocabularies, tokenizers, corpora that are encoded once, and corpora known by name."""

from torchdefine.data.batches import IGNORE, TokenStreams, evaluation_streams, shard
from torchdefine.data.corpus import Corpus, encode_corpus
from torchdefine.data.named import DOWNLOADABLE, SHIPPED, corpus_names, resolve_corpus
from torchdefine.data.segments import Segment, SegmentPlan
from torchdefine.data.text_files import TextBlock, find_splits, read_text
from torchdefine.data.token_file import TokenFile, TokenHeader
from torchdefine.data.tokenization import Tokenization, load_tokenization
from torchdefine.data.tokenizer import SubwordTokenizer, train_bpe
from torchdefine.data.vocabulary import EOS, UNK, Vocabulary

__all__ = [
    "DOWNLOADABLE",
    "EOS",
    "IGNORE",
    "SHIPPED",
    "UNK",
    "Corpus",
    "Segment",
    "SegmentPlan",
    "SubwordTokenizer",
    "TextBlock",
    "TokenFile",
    "TokenHeader",
    "TokenStreams",
    "Tokenization",
    "Vocabulary",
    "corpus_names",
    "encode_corpus",
    "evaluation_streams",
    "find_splits",
    "load_tokenization",
    "read_text",
    "resolve_corpus",
    "shard",
    "train_bpe",
]
