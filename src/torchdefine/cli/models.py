"""Commands for other people's models."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from torchdefine.cli.shared import Command, add_device, print_json
from torchdefine.tables import METHODS

SLOW = [name for name, entry in METHODS.items() if not entry.quick]

ADAPTING = """  Many replacements are made, all are measured by what the model does with them, and the best that fits is
  taken: low ranks, DeFINE and MLP units, numbers of few bits, codes, and mixtures of them. The new folder holds the
  model, what lay beside it, adapt.json with every number, and front.svg. After `import torchdefine.adapt.huggingface`
  it loads by AutoModel."""


def add_commands(command: Command) -> None:
    """The command that changes an existing model."""
    sub = command("adapt", _adapt, "Replace the token table of a Hugging Face model by the best smaller one.", ADAPTING)
    sub.add_argument("folder", metavar="MODEL_DIR", help="a folder that save_pretrained wrote, with its tokenizer")
    sub.add_argument("--budget", required=True, help="for the table: 4MB, 512KiB, or '4M parameters' in float32")
    sub.add_argument("--text", required=True, help="a file of plain text like the text that the model will read")
    sub.add_argument("--out", required=True, help="the new model's folder")
    sub.add_argument("--quick", action="store_true", help=f"leave out slow methods: {', '.join(SLOW)}")
    sub.add_argument("--distill", type=int, default=200, help="steps of self-distillation, 0 for none (default: 200)")
    sub.add_argument("--choosing", type=int, default=300, help="sentences to compare candidates on (default: 300)")
    sub.add_argument("--held-out", type=int, default=2000, help="sentences to judge the result on (default: 2000)")
    add_device(sub)
    sub.add_argument("--json", action="store_true", help="print JSON")


def _adapt(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.adapt.huggingface import transformers
    from torchdefine.adapt.shrink import ShrinkOptions, shrink_model
    from torchdefine.training.distributed import Processes

    their_log = transformers.logging  # its bars and notes would mix with ours
    their_log.set_verbosity_error()
    their_log.disable_progress_bar()
    settings = ShrinkOptions(
        choosing=options.choosing,
        held_out=options.held_out,
        distill_steps=options.distill,
        quick=options.quick,
        device=str(Processes().device(options.device)),
    )
    shrunk = shrink_model(options.folder, options.text, options.out, options.budget, options=settings, stage=_stage)
    if options.json:
        print_json(shrunk.to_dict())
        return
    for fitted in shrunk.fitted.values():
        fitted.print()
    print(shrunk.replacement)
    print(
        f"On {shrunk.held_out:,} held-out sentences, mean cosine {shrunk.likeness.mean_cosine:.4f} and rank "
        f"correlation {shrunk.likeness.rank_correlation:.4f} to the old model."
    )
    if any(table.heads for table in shrunk.replacement.tables):
        print(
            "The output layer uses the new table too, but only hidden states were compared: measure the model's "
            "perplexity before you use it."
        )
    before, after = (size / 1e6 for size in shrunk.file_bytes)
    print(f"Weights {before:,.1f} → {after:,.1f} MB on disk, in {shrunk.seconds:,.0f} s.")
    print(f"The model is in {shrunk.folder}.")


def _stage(what: str) -> Any:
    """A bar on a terminal, a line everywhere else."""
    from torchdefine.training.progress import work_bar

    if not sys.stderr.isatty():
        print(what, file=sys.stderr)
    return work_bar(what)
