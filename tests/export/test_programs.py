"""Exported programs against the models they were made of, at sizes that they were not traced at."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchdefine import AdaptiveMap, DeFINE, ProjectiveMap, StandardMap
from torchdefine.context import (
    LSTM,
    QRNN,
    SRU,
    LSTMConfig,
    QRNNConfig,
    SRUConfig,
    Transformer,
    TransformerConfig,
    TransformerXL,
    TransformerXLConfig,
)
from torchdefine.data import TokenizerPair, Vocabulary
from torchdefine.embedding import TokenEmbedding
from torchdefine.export import Port, Program, formats, on_the_cpu
from torchdefine.export.formats import FORMATS, OLDEST_TORCH, TRACED_AT, trace
from torchdefine.export.program import (
    CHECKED_AT,
    DTYPES,
    TOLERANCE,
    Runner,
    difference,
    difference_to_model,
    wrong_outputs,
)
from torchdefine.modes import prepare
from torchdefine.output import AdaptiveSoftmax, AdaptiveTableSoftmax, FullSoftmax, MixtureSoftmax
from torchdefine.tables import CodeLearning, compress_embedding
from torchdefine.tasks.language import LanguageModel
from torchdefine.tasks.language import programs as language
from torchdefine.tasks.translation import Translator
from torchdefine.tasks.translation import programs as translation

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH, reason="needs a newer torch, as exporting does"
)

V = 60


def bands(ranked: bool = False) -> AdaptiveMap:
    return AdaptiveMap(V, 16, (10, 30), division=2, counts=torch.randint(99, (V,)) if ranked else None)


def standard_lstm() -> LanguageModel:
    embedding = TokenEmbedding(StandardMap(V, 16))
    return LanguageModel(embedding, LSTM(16, LSTMConfig(hidden_dim=16)), FullSoftmax(16, embedding.map))


def projective_awd_mixture() -> LanguageModel:
    """AWD-LSTM's dropouts everywhere: none of them may be left in evaluation."""
    embedding = TokenEmbedding(ProjectiveMap(V, 12, 20))
    embedding.row_dropout = 0.4
    context = LSTM(
        20,
        LSTMConfig(
            layers=2, hidden_dim=24, output_dim=16, input_dropout=0.4, hidden_dropout=0.3, recurrent_dropout=0.5
        ),
    )
    return LanguageModel(embedding, context, MixtureSoftmax(16, FullSoftmax(12, embedding.map), 3, 0.3))


def adaptive_define_lstm() -> LanguageModel:
    embedding = DeFINE.over(bands(ranked=True), 24, expand_dim=64)
    return LanguageModel(
        embedding, LSTM(24, LSTMConfig(layers=2, hidden_dim=32, output_dim=16)), AdaptiveSoftmax(16, embedding.map)
    )


def cached_lstm() -> LanguageModel:
    model = adaptive_define_lstm().eval()
    model.embedding.look_up(model.embedding.table())
    model.embedding.unit.forward = None  # whoever calls it now fails
    return model


def finished_lstm() -> LanguageModel:
    """The output is tied to the finished vectors, which the program looks up for the input too."""
    embedding = DeFINE.over(bands(ranked=True), 24, expand_dim=64)
    context = LSTM(24, LSTMConfig(hidden_dim=20, output_dim=24))
    model = on_the_cpu(LanguageModel(embedding, context, AdaptiveSoftmax(24, embedding)).eval())
    model.embedding.unit.forward = None  # whoever calls it now fails
    return model


def compressed_lstm() -> LanguageModel:
    """Codes in bytes of two each, unpacked by the program."""
    model = adaptive_define_lstm().eval()
    sizes = {"codebooks": 3, "entries": 16, "training": CodeLearning(steps=20, rounds=1)}
    model.embedding.look_up(compress_embedding(model.embedding, "codes", **sizes).table)
    model.embedding.unit.forward = None
    return model


def adaptive_mixture_lstm() -> LanguageModel:
    """With a projection in every band."""
    embedding = TokenEmbedding(AdaptiveMap(V, 12, (10, 30), division=2, output_dim=16))
    component = AdaptiveSoftmax(16, embedding.map)
    return LanguageModel(
        embedding, LSTM(16, LSTMConfig(hidden_dim=20, output_dim=18)), MixtureSoftmax(18, component, 2)
    )


def deep_qrnn() -> LanguageModel:
    embedding = TokenEmbedding(StandardMap(V, 16))
    context = QRNN(16, QRNNConfig(layers=3, hidden_dim=20, output_dim=16, windows=(3, 2, 1), zoneout=0.2))
    return LanguageModel(embedding, context, FullSoftmax(16, embedding.map))


def deep_sru() -> LanguageModel:
    embedding = TokenEmbedding(StandardMap(V, 16))
    return LanguageModel(
        embedding, SRU(16, SRUConfig(layers=3, hidden_dim=20, output_dim=16)), FullSoftmax(16, embedding.map)
    )


def transformer_xl(same_length: bool = True, pre_norm: bool = False) -> LanguageModel:
    embedding = DeFINE.over(ProjectiveMap(V, 16, 32), 32, expand_dim=64)
    sizes = {"layers": 2, "heads": 2, "head_dim": 10, "inner_dim": 48, "memory": 5}
    evaluation = {"eval_memory": 12, "eval_same_length": same_length, "eval_clamp": 8 if same_length else None}
    context = TransformerXL(32, TransformerXLConfig(**sizes, **evaluation, pre_norm=pre_norm))
    for parameter in context.parameters():  # fresh ones are so small that no attention would show
        nn.init.normal_(parameter, std=0.3)
    return LanguageModel(embedding, context, AdaptiveTableSoftmax(32, embedding.map, (10, 30), (False, True, True)))


def pre_norm_transformer_xl() -> LanguageModel:
    return transformer_xl(same_length=False, pre_norm=True)


def translator() -> Translator:
    target = DeFINE(V, 32, map_dim=16, expand_dim=64)
    source = TokenEmbedding.beside(StandardMap(V - 7, 16), target)
    transformer = Transformer(32, TransformerConfig(encoder_layers=2, decoder_layers=2, heads=2, hidden_dim=48))
    return Translator(source, target, transformer, FullSoftmax(32, target.map), pad_id=3)


def shared_translator() -> Translator:
    shared = TokenEmbedding(bands(ranked=True))
    transformer = Transformer(
        16, TransformerConfig(encoder_layers=1, decoder_layers=1, heads=2, hidden_dim=24, norm="post")
    )
    return Translator(shared, shared, transformer, AdaptiveSoftmax(16, shared.map), pad_id=0)


MODELS: dict[str, Callable[[], LanguageModel | Translator]] = {
    build.__name__: build
    for build in (
        standard_lstm,
        projective_awd_mixture,
        adaptive_define_lstm,
        cached_lstm,
        finished_lstm,
        compressed_lstm,
        adaptive_mixture_lstm,
        deep_qrnn,
        deep_sru,
        transformer_xl,
        pre_norm_transformer_xl,
        translator,
        shared_translator,
    )
}
EVERY_TIME = (
    *("standard_lstm", "projective_awd_mixture", "cached_lstm", "finished_lstm"),
    *("deep_qrnn", "transformer_xl", "translator"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in EVERY_TIME else pytest.mark.slow) for name in MODELS]
)
def test_a_saved_torch_program_gives_what_the_model_gives(name: str, tmp_path: Path) -> None:
    model = build(name)
    runners = {}
    for program in programs_of(model):
        runners[program.name] = written_and_compared(program, "torch-export", tmp_path)
    if isinstance(model, Translator):
        assert_decodes_like(model, runners["encoder"], runners["decoder"])
    elif name != "pre_norm_transformer_xl":  # there, what a position sees depends on the length of the call
        assert_steps_like(model, runners["step"])
    if isinstance(model, LanguageModel) and isinstance(model.context, TransformerXL):
        assert_reads_any_length_like(model, runners["step"])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_program_in_onnx_gives_what_the_model_gives(name: str, tmp_path: Path) -> None:
    for program in programs_of(build(name)):
        written_and_compared(program, "onnx", tmp_path)


def programs_of(model: LanguageModel | Translator) -> list[Program]:
    """The programs of its task; the card's code, which asks the vocabulary, is tested with whole runs."""
    some = SimpleNamespace(kind="words", pad_id=0, bos_id=1, eos_id=2)
    if isinstance(model, Translator):
        pair = TokenizerPair(some, some)
        return [translation.encoder_program(model, pair), translation.decoder_program(model, pair)]
    embedding = language.embedding_program(model.embedding)
    return [embedding, language.step_program(model, model.context, some)]


def build(name: str) -> LanguageModel | Translator:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    prepare(model)
    return model


def written_and_compared(program: Program, format: str, folder: Path) -> Runner:
    """The program from its file, compared with the model; only torch's own operations and no path are in it."""
    kind, traced = FORMATS[format], trace(program)
    called = {str(node.target) for node in traced.graph.nodes if node.op == "call_function"}
    assert all(re.match(r"aten\.|<built-in function |_operator\.", one) for one in called), called
    file = folder / f"{program.name}{kind.suffix}"
    kind.write(program, traced, file)
    assert b"/torchdefine/" not in file.read_bytes(), "a file's path has got into the program"
    runner = kind.open(file, program.inputs)
    assert difference_to_model(program, runner) < TOLERANCE
    return runner


def assert_steps_like(model: LanguageModel, run: Runner) -> None:
    """Steps of one token are one call of the model, also further than the memory of a Transformer-XL reaches."""
    step = programs_of(model)[1]
    ids = torch.randint(V, (3, 30))
    with torch.no_grad():
        expected, _ = model.log_prob(ids, model.initial_state(3))  # (3, 30, V)
    carried = [torch.zeros(port.sized({"batch": 3}), dtype=DTYPES[port.dtype]) for port in step.inputs[1:]]
    for place in range(30):
        log_probs, *carried = run([ids[:, place : place + 1], *carried])
        torch.testing.assert_close(log_probs, expected[:, place], atol=TOLERANCE, rtol=TOLERANCE)


def assert_reads_any_length_like(model: LanguageModel, run: Runner) -> None:
    state = model.initial_state(2)
    carried = [*state[0], state[1]]
    for length in (1, 5, 3, 20, 1, 12, 13):
        ids = torch.randint(V, (2, length))
        with torch.no_grad():
            expected, state = model.log_prob(ids, state)
        log_probs, *carried = run([ids, *carried])
        torch.testing.assert_close(log_probs, expected[:, -1], atol=TOLERANCE, rtol=TOLERANCE)
        assert carried[-1].tolist() == state[1].tolist()


def assert_decodes_like(model: Translator, encode: Runner, decode: Runner) -> None:
    source = torch.tensor([[5, 9, 2, model.pad_id, model.pad_id], [8, 7, 6, 5, 4]])
    targets = torch.randint(V, (2, 9))
    with torch.no_grad():
        expected = model.output.log_prob(model.hidden(source, targets))  # (2, 9, V)
    _, visible, *of_source = encode([source])
    assert visible.tolist() == (source != model.pad_id).tolist()
    heads = model.transformer.config.heads
    own = [torch.zeros(2, heads, 0, model.transformer.width // heads)] * len(of_source)
    for place in range(9):
        log_probs, *own = decode([targets[:, place], visible, *of_source, *own])
        torch.testing.assert_close(log_probs, expected[:, place], atol=TOLERANCE, rtol=TOLERANCE)


def test_no_size_is_checked_at_which_programs_are_traced() -> None:
    for sizes in CHECKED_AT:
        assert all(sizes[name] != TRACED_AT[name] for name in TRACED_AT)


def test_a_program_that_is_wrong_is_found_out() -> None:
    (embedding, step) = programs_of(build("standard_lstm"))
    right = lambda inputs: list(step.call(*inputs))  # noqa: E731
    assert difference_to_model(step, right) < TOLERANCE
    for wrong in (
        lambda inputs: [tensor + 1e-3 for tensor in right(inputs)],
        lambda inputs: right(inputs)[:-1],
        lambda inputs: [tensor.double() for tensor in right(inputs)],
        lambda inputs: [tensor * torch.nan for tensor in right(inputs)],
    ):
        assert difference_to_model(step, wrong) > TOLERANCE
    assert embedding.name == "embedding"


@pytest.mark.parametrize(
    ("found", "apart"),
    [
        ([[0.5, 200.0], [7]], 0.0),
        ([[0.5 + 2**-12, 200.0], [7]], 2**-12),
        ([[0.5, 200.5], [7]], 0.5 / 200),
        ([[0.5, 200.0], [8]], torch.inf),
    ],
)
def test_the_largest_difference_is_in_proportion_above_one_alone(found: list[list[float]], apart: float) -> None:
    expected = [torch.tensor([0.5, 200.0]), torch.tensor([7]), torch.ones(3)]
    assert difference([*map(torch.tensor, found), torch.ones(3)], expected) == pytest.approx(apart)


def test_outputs_that_were_not_promised_are_named() -> None:
    ports = [Port("log_probs", ("batch", 2))]
    for outputs, words in (
        ([torch.ones(1, 2)], ""),
        ([], "0 outputs instead of 1"),
        ([torch.ones(1, 3)], "log_probs of (1, 3) torch.float32 instead of (1, 2) float32"),
        ([torch.ones(1, 2).long()], "log_probs of (1, 2) torch.int64 instead of (1, 2) float32"),
        ([torch.tensor([[1.0, torch.nan]])], "numbers in log_probs that are not finite"),
    ):
        assert wrong_outputs(outputs, ports, CHECKED_AT[0]) == words


def test_a_model_in_training_is_exported_as_it_evaluates() -> None:
    model = adaptive_define_lstm().train()
    copied = on_the_cpu(model)
    assert not copied.training
    assert model.training
    assert on_the_cpu(copied) is copied


def test_a_program_keeps_only_the_weights_that_it_uses() -> None:
    encoder, decoder = (trace(program) for program in programs_of(build("shared_translator")))
    assert not any(".output." in name for name in encoder.state_dict)
    assert not any(".decoder." in n and ".across.key_value" not in n for n in encoder.state_dict)
    assert not any(".encoder." in name for name in decoder.state_dict)
    finished = trace(programs_of(build("finished_lstm"))[1])
    tensors = [*finished.state_dict.values(), *finished.constants.values()]
    assert [tuple(tensor.shape) for tensor in tensors].count((V, 24)) == 1
    assert not any("unit" in name or "bands" in name for name in finished.state_dict)
    embedding = trace(programs_of(build("cached_lstm"))[0])
    assert not embedding.constants
    assert [tuple(table.shape) for table in embedding.state_dict.values()] == [(V, 24)]


def test_inputs_to_check_with_are_ones_that_a_program_must_take() -> None:
    ids = Port("ids", ("batch", "length"), "int64", below=4, padding=3)
    assert Port.from_dict(ids.to_dict()) == ids
    for length in range(1, 9):
        sample = ids.sample({"batch": 40, "length": length}, torch.Generator().manual_seed(length))
        assert sample.shape == (40, length)
        assert bool((sample[:, 0] != 3).all())
        assert bool((sample == 3).any()) == (length > 2)
    mask = Port("visible", ("batch", "length"), "bool").sample({"batch": 40, "length": 3}, torch.Generator())
    assert bool(mask[:, 0].all())
    assert not bool(mask.all())


class Sum(nn.Module):
    """Somebody else's context model."""

    input_dim = output_dim = 16

    def initial_state(self, batch_size: int) -> dict[str, torch.Tensor]:
        return {"total": torch.zeros(batch_size, 16)}

    def forward(self, x: torch.Tensor, state: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        sums = x.cumsum(1) + state["total"][:, None]
        return sums, {"total": sums[:, -1].detach()}


class SteppingSum(Sum):
    step_length = None

    def step(self, x: torch.Tensor, state: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return self(x, state)

    def state_tensors(self) -> dict[str, int]:
        return {"total": 1}


def test_a_context_model_of_somebody_else_is_exported_if_it_has_a_step(tmp_path: Path) -> None:
    embedding = TokenEmbedding(StandardMap(V, 16))
    model = LanguageModel(embedding, SteppingSum(), FullSoftmax(16, embedding.map)).eval()
    _, step = programs_of(model)
    assert [port.shape for port in step.inputs] == [("batch", "length"), ("batch", 16)]
    assert_steps_like(model, written_and_compared(step, "torch-export", tmp_path))


def test_a_context_model_without_a_step_has_its_embedding_exported() -> None:
    embedding = TokenEmbedding(StandardMap(V, 16))
    model = LanguageModel(embedding, Sum(), FullSoftmax(16, embedding.map)).eval()
    exported = language.exportable(model, Vocabulary(["<unk>", "<eos>"], [1, 1]))
    assert [program.name for program in exported.programs] == ["embedding"]
    assert "a part of class Sum" in exported.description
    assert "this context model has no step" in exported.limits[0]


def test_a_saved_torch_program_runs_where_there_is_no_torchdefine(tmp_path: Path) -> None:
    step = programs_of(build("standard_lstm"))[1]
    FORMATS["torch-export"].write(step, trace(step), tmp_path / "step.pt2")
    code = """
import sys
sys.modules["torchdefine"] = None  # importing it is an error now
import torch
step = torch.export.load(sys.argv[1]).module()
log_probs, *state = step(torch.tensor([[1], [2]]), *[torch.zeros(1, 2, 16)] * 2)
print(log_probs.exp().sum(-1).tolist())
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "step.pt2")], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("[1.0") or done.stdout.startswith("[0.99")


@pytest.mark.slow
def test_large_weights_lie_beside_an_onnx_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "LARGEST_ONNX_FILE", 100)
    program = programs_of(build("standard_lstm"))[0]
    FORMATS["onnx"].write(program, trace(program), tmp_path / "embedding.onnx")
    assert (tmp_path / "embedding.onnx.data").stat().st_size >= V * 16 * 4
    assert difference_to_model(program, FORMATS["onnx"].open(tmp_path / "embedding.onnx", program.inputs)) < TOLERANCE


@pytest.mark.gpu
def test_a_model_on_a_gpu_is_exported_from_the_cpu() -> None:
    model = adaptive_define_lstm().cuda()
    copied = on_the_cpu(model)
    assert {p.device.type for p in copied.parameters()} == {"cpu"}
    assert {p.device.type for p in model.parameters()} == {"cuda"}
