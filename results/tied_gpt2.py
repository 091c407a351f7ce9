"""A GPT-2 of a CPU's size with a tied table, trained on plain text: what `adapt` of language models is measured on.

    python results/tied_gpt2.py wiki78m/train-1.txt.xz wiki78m/valid.txt.xz --out MODEL_DIR [--steps 3000]

Writes the model and its tokenizer, a byte-level BPE of the training text, and results/shrink/tied-gpt2.json with
recipe, seed and curve. If it is ended, the same command goes on from its last fifty steps. Needs transformers.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from torchdefine.data import read_text
from torchdefine.files import write_json
from torchdefine.run.environment import describe_environment

RECIPE = {"vocab_size": 8_192, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 128}
BATCH, WARMUP, RATE, WEIGHT_DECAY, CLIP, SEED = 16, 100, 4e-3, 0.1, 1.0, 0
TRAINED_BYTES, TOKENIZER_BYTES, VALID_BYTES = 16 << 20, 4 << 20, 1 << 20
END = "<|endoftext|>"


def lines_of(path: Path, most: int) -> list[str]:
    """Lines that are paragraphs, as plain text, of the file's first bytes."""
    lines, read = [], 0
    for block in read_text(path):
        lines += [line.strip() for line in block.lines if len(line.split()) > 8 and not line.strip().startswith("=")]
        read += len(block.raw)
        if read >= most:
            break
    return lines


def trained_tokenizer(lines: list[str]) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=RECIPE["vocab_size"], special_tokens=[END], initial_alphabet=alphabet)
    bpe.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, bos_token=END)


def tokens_of(tokenizer: Any, lines: list[str]) -> Tensor:
    found: list[int] = []
    for at in range(0, len(lines), 1_000):
        for ids in tokenizer(lines[at : at + 1_000])["input_ids"]:
            found += [*ids, tokenizer.eos_token_id]
    return torch.tensor(found, dtype=torch.int32)


def rows_of(tokens: Tensor) -> Tensor:
    length = RECIPE["n_positions"]
    return tokens[: len(tokens) // length * length].view(-1, length).long()


@torch.no_grad()
def perplexity(model: Any, rows: Tensor) -> float:
    model.eval()
    losses = [float(model(input_ids=some, labels=some).loss) * len(some) for some in rows.split(32)]
    model.train()
    return math.exp(sum(losses) / len(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("valid", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1_200)
    arguments = parser.parse_args()
    torch.manual_seed(SEED)
    lines = lines_of(arguments.train, TRAINED_BYTES)
    few = lines_of(arguments.train, TOKENIZER_BYTES)
    tokenizer = trained_tokenizer(few)
    train = rows_of(tokens_of(tokenizer, lines))
    valid = rows_of(tokens_of(tokenizer, lines_of(arguments.valid, VALID_BYTES)))[:512]
    train = train[torch.randperm(len(train))]
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**RECIPE, **drop, bos_token_id=0, eos_token_id=0))
    steps = min(arguments.steps, len(train) // BATCH)
    print(f"{train.numel():,} tokens, {steps} steps", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY)
    state, curve, done, spent = arguments.out.with_suffix(".state"), [], 0, 0.0
    if state.exists():
        kept = torch.load(state, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        curve, done, spent = kept["curve"], kept["curve"][-1][0], kept["seconds"]
    began = time.monotonic() - spent
    for step in range(done, steps):
        rate = RATE * min((step + 1) / WARMUP, (1 + math.cos(math.pi * step / steps)) / 2 + 0.01)
        for group in optimizer.param_groups:
            group["lr"] = rate
        some = train[step * BATCH : (step + 1) * BATCH]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=some, labels=some).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if step % 50 == 49:
            curve.append([step + 1, round(float(loss), 4)])
            seconds = time.monotonic() - began
            print(step + 1, curve[-1][1], f"{seconds:.0f} s", flush=True)
            kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "curve": curve}
            torch.save({**kept, "seconds": seconds}, state)
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    facts = {
        "model": {**RECIPE, "parameters": sum(one.numel() for one in model.parameters())},
        "text": {
            "name": arguments.train.name,
            "sha256": hashlib.sha256("\n".join(lines).encode()).hexdigest(),
            "tokens": steps * BATCH * RECIPE["n_positions"],
        },
        "optimizer": {"name": "AdamW", "lr": RATE, "betas": [0.9, 0.98], "weight_decay": WEIGHT_DECAY, "clip": CLIP,
                      "warmup": WARMUP, "schedule": "cosine", "batch": BATCH, "bfloat16": True},
        "seed": SEED,
        "steps": steps,
        "seconds": round(time.monotonic() - began),
        "curve": curve,
        "perplexity": {"name": arguments.valid.name, "value": perplexity(model, valid), "tokens": valid.numel()},
        **describe_environment(torch.device("cpu")),
    }  # fmt: skip
    write_json(Path(__file__).parent / "shrink" / "tied-gpt2.json", facts)
    print(facts["perplexity"])


if __name__ == "__main__":
    main()
