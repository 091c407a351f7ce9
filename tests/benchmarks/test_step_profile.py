import pytest
import torch
from benchmarks.measuring import Setting
from benchmarks.records import run
from benchmarks.step_profile import BENCHMARK, groups, kind_of


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tst_96x64_64x8_4x2_h_bz_NTN", "matrix products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matrix products"),
        ("attention_key_gradients", "attention"),
        ("_seam_backward", "the unit's seams"),
        ("_norm_forward", "norms, dropout and ReLU"),
        ("_lstm_backward", "LSTM"),
        ("_softmax_loss", "softmax and loss"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>", "optimiser and clipping"),
        ("Memset (Device)", "copies, conversions and zeros"),
        ("void at_cuda_detail::cub::detail::radix_sort::DeviceRadixSortOnesweepKernel<...>", "tables"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "other kernels"),
    ],
)
def test_kernels_are_known_by_their_names(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_a_cpu_says_what_it_lacks() -> None:
    for group in groups(Setting(torch.device("cpu"), small=True)):
        assert all(contestant.lacks for contestant in group.contestants)


@pytest.mark.gpu
def test_shares_of_all_steps_add_up() -> None:
    record = run(BENCHMARK, Setting(torch.device("cuda"), small=True, repeats=3))
    for group in record["groups"].values():
        assert not group["not_run"]
        for row in group["rows"].values():
            assert sum(row["facts"]["shares"].values()) == pytest.approx(1, abs=0.01)
            assert row["facts"]["kernels a step"] > 100
