import copy
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

import torchdefine
from torchdefine import AdaptiveMap, DeFINE, ProjectiveMap, SlimMap, StandardMap, UnitConfig
from torchdefine.embedding import VARIANTS, TokenEmbedding, make_plan, table
from torchdefine.errors import UserError


def small(**changes) -> DeFINE:
    return DeFINE(50, **{"embedding_dim": 24, "map_dim": 16, "expand_dim": 64, "depth": 3, **changes})


EMBEDDINGS = {
    **{
        variant: lambda variant=variant: small(
            unit=variant, padding_idx=2, embedding_dim=64 if variant == "define-no-reduce" else 24
        )
        for variant in VARIANTS
    },
    "projective": lambda: DeFINE.over(ProjectiveMap(50, 8, 16, padding_idx=2), 24, expand_dim=64),
    "adaptive": lambda: DeFINE.over(AdaptiveMap(50, 16, (10, 30), padding_idx=2), 24, expand_dim=64),
    "adaptive-projected": lambda: DeFINE.over(
        AdaptiveMap(50, 16, (10, 30), padding_idx=2, output_dim=32), 24, expand_dim=64
    ),
    "ranked": lambda: DeFINE.over(AdaptiveMap(50, 16, (10,), padding_idx=2, counts=range(50)), 24, expand_dim=64),
    "slim": lambda: DeFINE.over(SlimMap(50, 16, 4, 20, padding_idx=2), 24, expand_dim=64),
    "weight_scaling": lambda: small(weight_scaling=True, padding_idx=2),
    "output_norm": lambda: small(output_norm=True, padding_idx=2),
    "normed": lambda: small(unit=UnitConfig(norm="layer", dropout=0.1), padding_idx=2),
}


def test_a_table_by_a_borrowed_unit_drops_nothing_out() -> None:
    """The unit is no part of the embedding that borrows it, so its mode is not changed along with it."""
    lender = small(dropout=0.5)
    borrower = TokenEmbedding.beside(StandardMap(50, 16), lender)
    both = torch.nn.ModuleList((lender, borrower)).eval()
    expected = borrower.table()
    both.train()
    assert torch.equal(borrower.table(), expected)
    assert all(part.training for part in both.modules())


@pytest.mark.parametrize("kind", ["define", "projective", "adaptive"])
def test_rows_that_come_after_loading_start_like_the_others(kind: str, tmp_path: Path) -> None:
    embedding = EMBEDDINGS[kind]()
    embedding.map.reset_parameters(std=0.02)
    embedding.save(tmp_path)
    loaded = DeFINE.load(tmp_path).resize(4000)
    before, after = (loaded.map(ids).std() for ids in (torch.arange(30, 50), torch.arange(50, 4000)))
    assert 0.5 < after / before < 2


def test_a_table_is_as_precise_as_the_embedding_within_autocast() -> None:
    embedding = DeFINE(40, 16, map_dim=8, expand_dim=32)
    exact = embedding.table()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(embedding.table(), exact)
        assert torch.equal(embedding.cached().weight, exact)


def test_a_table_leaves_every_part_in_its_mode() -> None:
    embedding = small(dropout=0.5)
    embedding.unit.eval()  # somebody trains the map alone
    embedding.table()
    assert embedding.training
    assert embedding.map.training
    assert not any(part.training for part in embedding.unit.modules())


@pytest.fixture(params=EMBEDDINGS)
def embedding(request: pytest.FixtureRequest) -> DeFINE:
    made = EMBEDDINGS[request.param]()
    for parameter in made.unit.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.1)  # as after training: a bias would give the padding token a vector
    return made


IDS = torch.tensor([[0, 1, 2, 49], [30, 10, 9, 2]])


def test_looks_like_nn_embedding(embedding: DeFINE) -> None:
    assert embedding(IDS).shape == (2, 4, embedding.embedding_dim)
    assert embedding(torch.tensor(3)).shape == (embedding.embedding_dim,)
    assert (embedding.num_embeddings, embedding.padding_idx) == (50, 2)


def test_padding_is_zero_and_gets_no_gradient(embedding: DeFINE) -> None:
    out = embedding(IDS)
    assert torch.equal(out[IDS == 2], torch.zeros(2, embedding.embedding_dim))
    embedding.zero_grad()
    embedding(torch.tensor([2, 2])).sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in embedding.parameters())


def test_cached_table_equals_the_live_embedding(embedding: DeFINE, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "TOKENS_AT_ONCE", 7)
    calls = []
    embedding.train()
    finished = embedding.table(progress=lambda done, total: calls.append((done, total)))
    assert embedding.training
    cached = embedding.cached()
    embedding.eval()
    torch.testing.assert_close(cached(IDS), embedding(IDS), rtol=1e-6, atol=1e-6)
    assert finished.shape == (50, embedding.embedding_dim)
    assert calls[-1] == (50, 50)
    assert len(calls) == 8
    assert not any(p.requires_grad for p in cached.parameters())
    assert embedding.cached(dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    assert cached.padding_idx == embedding.padding_idx
    assert embedding.table(dtype=torch.float64).dtype == torch.float64


def test_reset_draws_everything_again_and_forgets_the_finished_table(embedding: DeFINE) -> None:
    embedding.eval().look_up(torch.full((50, embedding.embedding_dim), 7.0))
    for parameter in embedding.parameters():
        torch.nn.init.constant_(parameter, 7.0)
    embedding.reset_parameters()
    for name, parameter in embedding.named_parameters():
        assert not (parameter == 7.0).any(), name
    assert 1 / 3 < embedding(torch.arange(3, 50)).std() < 3
    assert not embedding(torch.tensor([2])).any(), "padding stays zero"


def test_a_unit_that_cannot_be_drawn_again_is_named() -> None:
    with pytest.raises(UserError, match="The unit GELU has no method reset_parameters"):
        TokenEmbedding(StandardMap(5, 4), torch.nn.GELU()).reset_parameters()


def test_resize_keeps_vectors_bit_for_bit(embedding: DeFINE) -> None:
    embedding.eval()
    old = embedding(IDS)
    assert embedding.resize(80).num_embeddings == 80
    assert torch.equal(embedding(IDS), old)
    assert embedding(torch.tensor([79])).abs().sum() > 0


def test_settings_of_training_are_saved(tmp_path: Path) -> None:
    map_layer = ProjectiveMap(50, 8, 16)
    map_layer.projection_std = 0.01
    embedding = DeFINE.over(map_layer, 24, expand_dim=32)
    embedding.row_dropout, embedding.map_dropout = 0.3, 0.2
    embedding.save(tmp_path)
    loaded = DeFINE.load(tmp_path)
    assert (loaded.row_dropout, loaded.map_dropout) == (0.3, 0.2)
    loaded.reset_parameters()
    assert 0.005 < float(loaded.map.projection.weight.detach().std()) < 0.02


def test_config_and_files_round_trip(embedding: DeFINE, tmp_path: Path) -> None:
    embedding.eval()
    config = json.loads(json.dumps(embedding.to_config()))
    twin = DeFINE.from_config(config)
    twin.load_state_dict(embedding.state_dict())
    assert torch.equal(twin.eval()(IDS), embedding(IDS))
    embedding.double().save(tmp_path / "here")
    loaded = DeFINE.load(tmp_path / "here").eval()
    assert torch.equal(loaded(IDS), embedding(IDS))
    assert sorted(p.name for p in (tmp_path / "here").iterdir()) == ["embedding.json", "embedding.safetensors"]


def test_loading_leaves_the_random_state_alone(embedding: DeFINE, tmp_path: Path) -> None:
    embedding.save(tmp_path)
    before = torch.random.get_rng_state()
    DeFINE.load(tmp_path)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_call_passes_through_few_functions_and_checks_ids_once(monkeypatch: pytest.MonkeyPatch) -> None:
    embedding, ids = DeFINE(8001, 128, map_dim=32, depth=3), torch.randint(8001, (4, 7))
    checks: list[Tensor] = []
    aminmax = torch.aminmax
    monkeypatch.setattr(torch, "aminmax", lambda given: (checks.append(given), aminmax(given))[1])
    embedding(ids)
    assert len(checks) == 1
    monkeypatch.undo()
    package, called = str(Path(torchdefine.__file__).parent), set()
    sys.setprofile(lambda frame, event, _: called.add(frame.f_code) if event == "call" else None)
    embedding(ids)
    sys.setprofile(None)
    assert 2 <= len({code for code in called if code.co_filename.startswith(package)}) <= 12


def test_the_import_costs_little_more_than_torchs() -> None:
    program = "import time, torch; before = time.process_time(); import torchdefine; torchdefine.DeFINE; "
    run = [sys.executable, "-c", program + "print(time.process_time() - before)"]
    assert min(float(subprocess.run(run, capture_output=True, check=True).stdout) for _ in range(3)) <= 0.15


def test_deepcopy_meta_and_float64(embedding: DeFINE) -> None:
    embedding.eval()
    assert torch.equal(copy.deepcopy(embedding)(IDS), embedding(IDS))
    torch.testing.assert_close(embedding(IDS).double(), embedding.double()(IDS), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_builds_on_the_meta_device(name: str) -> None:
    with torch.device("meta"):
        skeleton = EMBEDDINGS[name]()
    assert all(tensor.is_meta for tensor in skeleton.state_dict().values())
    real = EMBEDDINGS[name]().eval()
    skeleton.to_empty(device="cpu").load_state_dict(real.state_dict())
    assert torch.equal(skeleton.eval()(IDS), real(IDS))


def test_compiles_without_graph_breaks(embedding: DeFINE) -> None:
    embedding.eval()
    torch._dynamo.reset()
    compiled = torch.compile(embedding, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(IDS), embedding(IDS))
    compiled(IDS).sum().backward()
    assert all(p.grad is not None for p in embedding.unit.parameters())


@pytest.mark.slow
def test_compiles_with_the_default_backend() -> None:
    embedding = EMBEDDINGS["adaptive"]()
    compiled = torch.compile(embedding, fullgraph=True)
    torch.testing.assert_close(compiled(IDS), embedding(IDS), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_close_to_float32(embedding: DeFINE, dtype: torch.dtype) -> None:
    embedding.eval()
    with torch.autocast("cpu", dtype=dtype):
        low = embedding(IDS)
    assert low.isfinite().all()
    torch.testing.assert_close(low.float(), embedding(IDS), rtol=0.1, atol=0.2)


@pytest.mark.gpu
def test_same_numbers_on_the_gpu(embedding: DeFINE) -> None:
    embedding.eval()
    cpu = embedding(IDS)
    torch.testing.assert_close(embedding.cuda()(IDS.cuda()).cpu(), cpu, rtol=1e-3, atol=1e-3)


def test_sizes_that_nobody_gave() -> None:
    assert DeFINE(10, 64).plan == make_plan(16, UnitConfig(embedding_dim=64, expand_dim=256, depth=3))
    assert DeFINE(10, 64, map_dim=32).plan == make_plan(32, UnitConfig(embedding_dim=64, expand_dim=256, depth=3))
    plan = make_plan(128, UnitConfig(embedding_dim=64, expand_dim=1024, depth=3))
    assert DeFINE(10, 64, map_dim=128, unit=UnitConfig()).plan == plan  # which has a width of its own
    assert DeFINE.over(StandardMap(10, 128), 64).plan == plan


def test_an_embedding_that_is_larger_than_its_table_warns_with_both_numbers() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sum(p.numel() for p in DeFINE(8001, 128).parameters()) < 8001 * 128 / 2
        DeFINE.over(StandardMap(10, 16), 64)  # whoever gives the map has chosen
    with pytest.warns(
        UserWarning, match=r"182,416 parameters here, more than the 128,000 .*map_dim \(now 32\)"
    ) as said:
        DeFINE(1000, 128)
    assert said[0].filename == __file__


def test_device_and_dtype_are_those_of_torchs_layers() -> None:
    made = DeFINE(50, 64, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in made.parameters()} == {("meta", torch.bfloat16)}
    assert {p.dtype for p in DeFINE(50, 64, dtype=torch.float64).parameters()} == {torch.float64}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_planned_by_its_own_rules(variant: str) -> None:
    sizes = {"embedding_dim": 64, "expand_dim": 64, "depth": 4, "max_groups": 4}
    plan = make_plan(16, UnitConfig.of(variant, **sizes))
    for unit in (variant, UnitConfig.of(variant)):
        assert DeFINE(10, map_dim=16, **sizes, unit=unit).plan == plan
        assert DeFINE.over(StandardMap(10, 16), **sizes, unit=unit).plan == plan


def test_training_moves_every_parameter() -> None:
    embedding = small()
    before = [p.clone() for p in embedding.parameters()]
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    embedding(torch.arange(50)).square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, embedding.parameters(), strict=True))


def test_repr_shows_the_plan() -> None:
    assert "reduce" in repr(small())
    assert "skip" in repr(small())


def test_bad_arguments_build_nothing() -> None:
    with pytest.raises(UserError, match="map_dim 15 is not divisible by the 4 groups"):
        small(map_dim=15)
    with pytest.raises(UserError, match="unknown"):
        small(unit="hgtt!")
    with pytest.raises(TypeError, match="A unit is a UnitConfig or the name of a variant, not None"):
        small(unit=None)
    with pytest.raises(TypeError, match=r"padding_idx must be a whole number or None, not 1\.0"):
        small(padding_idx=1.0)
    with pytest.raises(TypeError, match="whole numbers"):
        small()(torch.tensor([0.5]))
    with pytest.raises(UserError, match="id 50"):
        small()(torch.tensor([50]))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    small().save(tmp_path)
    for name in ("embedding.safetensors", "embedding.json"):
        whole = (tmp_path / name).read_bytes()
        for at in range(8, len(whole), len(whole) // 60):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << at % 8
            (tmp_path / name).write_bytes(flipped)
            with pytest.raises(UserError):
                DeFINE.load(tmp_path)
        (tmp_path / name).write_bytes(whole)
    weights = tmp_path / "embedding.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"embedding\.safetensors is damaged or cut short"):
        DeFINE.load(tmp_path)
    weights.unlink()
    with pytest.raises(UserError, match=r"has no embedding\.safetensors"):
        DeFINE.load(tmp_path)
    settings = tmp_path / "embedding.json"
    config = json.loads(settings.read_text())
    settings.write_text(json.dumps({**config, "version": 99}))
    with pytest.raises(UserError, match="version 99"):
        DeFINE.load(tmp_path)
    settings.write_text(json.dumps({name: value for name, value in config.items() if name != "unit"}))
    with pytest.raises(UserError, match="is damaged"):
        DeFINE.load(tmp_path)
    settings.write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        DeFINE.load(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        DeFINE.load(tmp_path / "nowhere")


def test_a_save_that_was_killed_between_its_files_is_no_mixture(tmp_path: Path) -> None:
    before, after = DeFINE(50, 24, 16, 32), DeFINE(50, 24, 8, 48)
    before.save(tmp_path)
    old = (tmp_path / "embedding.json").read_bytes()
    after.save(tmp_path)
    (tmp_path / "embedding.json").write_bytes(old)
    assert torch.equal(DeFINE.load(tmp_path).eval()(IDS), after.eval()(IDS))


def test_it_says_what_it_saves() -> None:
    embedding = DeFINE(5000, 64, map_dim=32, expand_dim=256)
    count = sum(parameter.numel() for parameter in embedding.parameters())
    assert f"5,000 → 64: {count:,} parameters, nn.Embedding would have 320,000" in repr(embedding)


@pytest.mark.parametrize(
    "map_layer", [StandardMap(400, 16), ProjectiveMap(400, 16, 16), AdaptiveMap(400, 16, (100, 200), division=1)]
)
def test_weights_are_drawn_anew_as_they_were_drawn_before(map_layer: StandardMap | ProjectiveMap | AdaptiveMap) -> None:
    embedding = TokenEmbedding(map_layer)
    map_layer.reset_parameters(0.05)
    before = torch.cat([p.detach().flatten() for p in map_layer.parameters()])
    embedding.reset_parameters()
    after = torch.cat([p.detach().flatten() for p in map_layer.parameters()])
    assert not torch.equal(before, after)
    assert after.std().item() == pytest.approx(before.std().item(), rel=0.05)
    assert map_layer.std == 0.05
