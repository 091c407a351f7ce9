"""A Transformer-XL through the public face: trained by the command, stopped, evaluated by its protocols, generating."""

import json
import lzma
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.commands import command
from tests.test_cli import Command, torchdefine  # noqa: F401
from tests.training.test_loop import StopAt, assert_same_run, with_the_golden_torch
from torchdefine import load_run, train
from torchdefine.data import encode_corpus, resolve_corpus
from torchdefine.export import load_export
from torchdefine.export.formats import OLDEST_TORCH
from torchdefine.export.program import DTYPES, TOLERANCE
from torchdefine.run import Run, RunFolder
from torchdefine.tasks.language import evaluate, generate
from torchdefine.tasks.sampling import SamplingOptions, draw
from torchdefine.training import Interrupted

GOLDEN_LOSSES = Path(__file__).parent / "golden_losses_transformer_xl.json"
SMALLER = {
    "data.max_size": 1500,
    "embedding.scale": 8.0,
    "embedding.projection_std": 0.18,
    "output.cutoffs": "300,800",
    "train.steps": 200,
    "train.eval_every": 100,
    "train.log_every": 50,
}


TABLE = {"scale": 8.0, "init_std": 0.02}
"""As the recipe has them, which another kind of map would not inherit."""


@pytest.fixture(scope="module")
def piece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The beginning of the shipped text, so that vocabulary and evaluation stay small."""
    folder = tmp_path_factory.mktemp("piece")
    for split, lines in (("train", 4000), ("valid", 60), ("test", 60)):
        with lzma.open(resolve_corpus("wikitext-2-shuffled") / f"{split}.txt.xz", "rt", encoding="utf-8") as text:
            (folder / f"{split}.txt").write_text("".join(line for line, _ in zip(text, range(lines), strict=False)))
    return folder


@pytest.fixture(scope="module")
def trained(piece: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:

    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("runs") / "run"
    settings = [word for name, value in SMALLER.items() for word in (f"--{name}", str(value))]
    assert command("train", "txl/small", "--data", piece, "--out", out, "--device", "cpu", *settings) == 0
    return out


@pytest.fixture(scope="module")
def run(trained: Path) -> Run:
    return load_run(trained, device="cpu")


@with_the_golden_torch
def test_golden_losses(trained: Path) -> None:
    """A few hundred steps on the shipped text; a change that is not meant to change numbers leaves them alone."""
    losses = {str(r["step"]): r["loss"] for r in RunFolder(trained).records("train")}
    expected = json.loads(GOLDEN_LOSSES.read_text())
    assert losses.keys() == expected.keys()
    for step, loss in expected.items():
        assert losses[step] == pytest.approx(loss, rel=2e-4), step


def test_it_learns_and_reports_both_protocols(trained: Path) -> None:
    result = json.loads((trained / "result.json").read_text())
    assert result["test_perplexity"] < 0.9 * result["test_unigram_perplexity"]
    reference, public = result["evaluation"]["test"], result["public_evaluation"]["test"]
    assert reference["protocol"].startswith("1 stream from an empty state, a memory of 64 positions (same length")
    assert public["protocol"].startswith("10 streams from an empty state")
    assert reference["tokens"] == public["tokens"]
    assert public["perplexity"] != reference["perplexity"]  # nine streams begin without what came before them


def test_eval_prints_both_protocols(torchdefine: Command, trained: Path) -> None:  # noqa: F811
    done = torchdefine("eval", trained, "--device", "cpu")
    assert done.returncode == 0
    assert "1 stream from an empty state" in done.stdout
    assert "public protocol: perplexity" in done.stdout
    both = json.loads(torchdefine("eval", trained, "--device", "cpu", "--json").stdout)
    result = json.loads((trained / "result.json").read_text())
    assert both["perplexity"] == pytest.approx(result["evaluation"]["test"]["perplexity"], rel=1e-5)
    assert both["public"]["perplexity"] == pytest.approx(result["public_evaluation"]["test"]["perplexity"], rel=1e-5)
    other = torchdefine("eval", trained, "--device", "cpu", "--batch-size", 3)
    assert "3 streams from an empty state" in other.stdout
    assert "public" not in other.stdout


def test_eval_with_another_memory(torchdefine: Command, trained: Path, tmp_path: Path) -> None:  # noqa: F811
    usual = json.loads(torchdefine("eval", trained, "--device", "cpu", "--json").stdout)
    shorter = json.loads(torchdefine("eval", trained, "--device", "cpu", "--json", "--memory", 2, "--clamp", 1).stdout)
    assert "a memory of 2 positions (same length, distances clamped at 1)" in shorter["protocol"]
    assert "a memory of 2 positions" in shorter["public"]["protocol"]
    assert shorter["perplexity"] > usual["perplexity"]
    done = torchdefine("eval", trained, "--device", "cpu", "--memory", 0)
    assert done.returncode == 2
    assert done.stderr == "torchdefine: The memory of an evaluation is 0, but must be at least 1.\n"


def test_only_a_transformer_takes_another_memory(torchdefine: Command, recipe_file: Path, tmp_path: Path) -> None:  # noqa: F811
    train(recipe_file, out=tmp_path / "lstm", train={"steps": 2})
    done = torchdefine("eval", tmp_path / "lstm", "--memory", 5)
    assert done.returncode == 2
    assert "Only a Transformer-XL has a memory and a clamp" in done.stderr


def test_generate_from_the_command_line(torchdefine: Command, trained: Path) -> None:  # noqa: F811
    texts = [
        torchdefine("generate", trained, "--prompt", "The game", "--length", 20, "--seed", 3, "--device", "cpu").stdout
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert texts[0].startswith("The game ")
    assert len(texts[0].split()) > 10


def test_a_stopped_run_resumes_with_its_memory(corpus: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    settings = {
        "data": {"corpus": str(corpus)},
        "output": {"cutoffs": (10, 30)},
        "train": {"steps": 24, "eval_every": 12, "log_every": 4, "length": 10},
    }
    train("txl/small", out=tmp_path / "whole", device="cpu", **settings)
    with pytest.raises(Interrupted):
        train("txl/small", out=tmp_path / "broken", device="cpu", reporter=StopAt(8, signal.SIGTERM), **settings)
    train("txl/small", out=tmp_path / "broken", device="cpu", resume=True, **settings)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


WITHOUT_MEMORY = {"memory": 0, "eval_memory": 0, "eval_same_length": False, "eval_clamp": None}


@pytest.fixture(scope="module")
def without_memory(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stopped and resumed, beside one that was not."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("without-memory")
    settings = {
        "data": {"corpus": str(corpus)},
        "context": WITHOUT_MEMORY,
        "output": {"cutoffs": (10, 30)},
        "train": {"steps": 24, "eval_every": 12, "log_every": 4, "length": 10},
        "eval": {"length": 16},
    }
    train("txl/small", out=folder / "whole", device="cpu", **settings)
    with pytest.raises(Interrupted):
        train("txl/small", out=folder / "broken", device="cpu", reporter=StopAt(8, signal.SIGTERM), **settings)
    train("txl/small", out=folder / "broken", device="cpu", resume=True, **settings)
    assert_same_run(folder / "whole", folder / "broken")
    return folder / "whole"


def test_without_a_memory_it_learns_and_every_segment_begins_anew(without_memory: Path, corpus: Path) -> None:
    run = load_run(without_memory, device="cpu")
    first, *_, last = (record["loss"] for record in run.folder.records("train"))
    assert last < first
    text = encode_corpus(corpus, vocabulary=run.tokenization).splits["test"]
    eos, tokens = run.tokenization.eos_id, torch.from_numpy(np.asarray(text.tokens).astype(np.int64))
    inputs, total = torch.cat((torch.tensor([eos]), tokens[:-1])), 0.0
    with torch.no_grad():
        for given, targets in zip(inputs.split(16), tokens.split(16), strict=True):
            hidden, _ = run.model.hidden(given[None], run.model.initial_state(1))
            total += float(run.model.output.loss(hidden[0], targets, reduction="sum"))
    found = run.evaluate("test")
    assert found.loss == pytest.approx(total / len(tokens), rel=1e-5)
    assert "no memory carried over segments of 16 tokens" in found.protocol
    assert run.evaluate("test", memory=4).loss != found.loss


def test_without_a_memory_a_generated_text_is_one_segment(without_memory: Path) -> None:
    """Drawn token by token as from the whole text anew for every token."""
    run = load_run(without_memory, device="cpu")
    model, options = run.model.double().eval(), SamplingOptions(temperature=1.3)
    text = [run.tokenization.eos_id, 5, 9]
    continuation = generate(model, text, 40, options, generator=torch.Generator().manual_seed(4))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for token in continuation:
            log_probs, _ = model.log_prob(torch.tensor([text]), model.initial_state(1))
            assert draw(log_probs[0, -1], options, generator) == token
            text.append(token)
    assert model.context.evaluation.memory == 0


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH, reason="exports need a newer torch"
)
def test_without_a_memory_an_exported_step_goes_on_within_a_segment(without_memory: Path, tmp_path: Path) -> None:
    run = load_run(without_memory, device="cpu")
    run.export(tmp_path / "exported")
    step = load_export(tmp_path / "exported").programs["step"]
    ids = torch.randint(len(run.tokenization), (2, 16))  # as many as a segment of its evaluation has
    with torch.no_grad():
        expected, _ = run.model.eval().log_prob(ids, run.model.initial_state(2))
    carried = [torch.zeros(port.sized({"batch": 2}), dtype=DTYPES[port.dtype]) for port in step.inputs[1:]]
    for place in range(16):
        log_probs, *carried = step.runner([ids[:, place : place + 1], *carried])
        torch.testing.assert_close(log_probs, expected[:, place], atol=TOLERANCE, rtol=TOLERANCE)
    assert "a memory of 16 positions" in (tmp_path / "exported" / "README.md").read_text()
    assert run.model.context.evaluation.memory == 0


@pytest.mark.parametrize(
    "changes",
    [
        {
            "embedding": {"kind": "adaptive", "map_dim": 64, "cutoffs": (10, 30), "division": 4, **TABLE},
            "unit": "none",
            "output": "adaptive",
        },
        {
            "embedding": {"kind": "adaptive", "map_dim": 32, "cutoffs": (10, 30), "division": 4, **TABLE},
            "output": "adaptive",
        },
        {
            "embedding": {"kind": "standard", "map_dim": 64, **TABLE},
            "output": {"cutoffs": (10, 30), "tied_projections": ()},
        },
        {"output": {"kind": "full"}},
        {"output": {"cutoffs": (10, 30)}, "context": {"pre_norm": True, "attention_dropout": 0.1}},
    ],
    ids=["bands that narrow", "bands behind a unit", "standard", "full softmax", "norms first"],
)
def test_every_kind_of_table_trains_under_it(corpus: Path, tmp_path: Path, changes: dict) -> None:
    steps = {"steps": 12, "eval_every": 12, "log_every": 6, "length": 10}
    run = train("txl/small", data=corpus, out=tmp_path / "run", device="cpu", train=steps, **changes)
    first, last = (record["loss"] for record in run.folder.records("train"))
    assert last < first
    again = load_run(tmp_path / "run", device="cpu").evaluate("test")
    assert again.perplexity == pytest.approx(run.result["test_perplexity"], rel=1e-5)


def test_one_stream_equals_one_long_segment_whatever_the_length(run: Run, piece: Path) -> None:
    """Every token once, each from as many positions as any other: the segments leave no trace."""
    text = encode_corpus(piece, vocabulary=run.tokenization).splits["test"]
    eos = run.tokenization.eos_id
    tokens = torch.from_numpy(np.asarray(text.tokens).astype(np.int64))
    inputs = torch.cat((torch.tensor([eos]), tokens[:-1])).unsqueeze(0)
    with torch.no_grad():
        log_probs, _ = run.model.log_prob(inputs, run.model.initial_state(1))
    expected = -float(log_probs[0].gather(-1, tokens.unsqueeze(-1)).double().mean())
    for length in (64, 37):
        result = evaluate(run.model, text, eos, batch_size=1, length=length)
        assert result.tokens == len(tokens)
        assert result.loss == pytest.approx(expected, rel=1e-5)


def test_streams_are_evaluated_each_from_an_empty_memory(run: Run, piece: Path) -> None:
    text = encode_corpus(piece, vocabulary=run.tokenization).splits["test"]
    eos, tokens = run.tokenization.eos_id, np.asarray(text.tokens).astype(np.int64)
    length = -(-len(tokens) // 10)
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(tokens), length):
            targets = torch.from_numpy(tokens[start : start + length])
            first = tokens[start - 1] if start else eos
            inputs = torch.cat((torch.tensor([first]), targets[:-1])).unsqueeze(0)
            hidden, _ = run.model.hidden(inputs, run.model.initial_state(1))
            total += float(run.model.output.loss(hidden[0], targets, reduction="sum"))
    assert evaluate(run.model, text, eos, batch_size=10, length=64).loss == pytest.approx(total / len(tokens), rel=1e-5)


def test_generation_with_memory_equals_recomputation(run: Run) -> None:
    """One token at a time against the whole text anew for every token, past the end of the memory."""
    model = run.model.double().eval()
    try:
        prompt = [run.tokenization.eos_id, *run.tokenization.encode("The game was released in")[:-1]]
        continuation = generate(model, prompt, 90, SamplingOptions(temperature=0))
        text = list(prompt)
        with torch.no_grad():
            for token in continuation:
                log_probs, _ = model.log_prob(torch.tensor([text]), model.initial_state(1))
                assert int(log_probs[0, -1].argmax()) == token
                text.append(token)
        assert len(text) > model.context.evaluation.memory
    finally:
        model.float()
