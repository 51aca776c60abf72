"""A captured step does what the step does, for every method, with what the CPU decides anew."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from helpers import assert_identical
from learning import CASES, beginning, learner
from measure import KINDS, Kernel, busy, kind_of, rows_by, short_name
from rerun import Rerun, stream
from torch import Tensor

from syngap.bench.methods import Method
from syngap.bench.methods.compiler import Compiler
from syngap.bench.methods.er import ER
from syngap.bench.streams import Batch, Stream
from syngap.bench.tape import Tape, decision, play, record
from syngap.bench.training.capture import CapturedMethod

CPU = torch.device("cpu")


def plain(method: Method, batches: Stream) -> Method:
    torch.manual_seed(3)  # dropout draws from torch's own source
    for step in range(len(batches)):
        method.step(batches[step])
    return method


def by_graphs(method: Method, batches: Stream, graphs: Rerun) -> CapturedMethod:
    torch.manual_seed(3)
    captured = CapturedMethod(method, graphs)
    for step in range(len(batches)):
        captured.learn(batches[step])
        method.after_step()
    return captured


@pytest.mark.parametrize("case", CASES)
def test_every_method_ends_where_its_steps_would(case: str) -> None:
    begin = beginning(case, stream())
    one, other = begin(), begin()
    batches = stream().present(one.sees)
    plain(one, batches)
    graphs = Rerun(other)
    captured = by_graphs(other, batches, graphs)
    assert captured.failure == ""
    assert graphs.captured >= 2  # batches of three and of four samples
    assert graphs.replayed > len(batches) / 2
    assert_identical(one.state_dict(), other.state_dict())


def test_a_step_that_refreshes_directions_is_no_replay() -> None:
    method = beginning("syngap-directions", stream())()
    graphs = Rerun(method)
    captured, refreshes = CapturedMethod(method, graphs), 0
    for step in range(len(stream())):
        before, is_refresh = graphs.replayed, method.must_run_eagerly()
        captured.learn(stream()[step])
        refreshes += is_refresh
        assert not (is_refresh and graphs.replayed > before)
    assert refreshes == len(stream()) // 10
    assert graphs.replayed > len(stream()) / 2


def test_a_compiled_step_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compiler, "backend", "eager")
    begin = beginning("syngap-teacher", stream(), compiled=True)
    one, other = plain(begin(), stream()), begin()
    graphs = Rerun(other)
    captured = by_graphs(other, stream(), graphs)
    assert other.learner.compiling
    assert captured.failure == ""
    assert graphs.replayed > len(stream()) / 2
    assert_identical(one.state_dict(), other.state_dict())


class Slowing(ER):
    """Decides in learn, by a number of its own, what it does."""

    def __init__(self, learner: Any, **options: Any) -> None:
        super().__init__(learner, **options)
        self.steps, self.rates = 0, [1.0, 2]

    def learn(self, batch: Batch) -> None:
        self.steps += 1
        self.rates[1] += 3
        if self.steps % 5 == 0:
            self.optimizer.param_groups[0]["lr"] *= 0.9
        super().learn(batch)


def test_a_method_that_counts_in_learn_is_not_captured_and_loses_nothing() -> None:
    one, other = (Slowing(learner(stream()), buffer=9, replay=4) for _ in range(2))
    plain(one, stream())
    with pytest.warns(UserWarning, match="changes in learn"):
        captured = by_graphs(other, stream(), Rerun(other))
    assert captured.failure
    assert_identical(one.state_dict(), other.state_dict())


def test_what_cannot_be_captured_goes_on_as_it_stands_and_says_why() -> None:
    one, other = (ER(learner(stream()), buffer=9, replay=4) for _ in range(2))
    plain(one, stream())
    with pytest.warns(UserWarning, match="not captured: not permitted"):
        captured = by_graphs(
            other, stream(), Rerun(other, refuses="not permitted\nwhile capturing")
        )
    assert captured.failure == "not permitted while capturing"
    assert_identical(one.state_dict(), other.state_dict())


def test_a_memory_that_has_little_to_give_is_asked_as_it_stands() -> None:
    # Of 40 samples asked for there are 16, 20, ... for a while after a step was recorded.
    one, other = (ER(learner(stream()), buffer=60, replay=40) for _ in range(2))
    plain(one, stream())
    graphs = Rerun(other)
    by_graphs(other, stream(), graphs)
    assert_identical(one.state_dict(), other.state_dict())


class Refreshing(ER):
    """Does something else at every third step, and says so."""

    steps = 0

    def phase(self) -> Hashable:
        return self.steps % 3 == 0

    def count_replay(self) -> None:
        self.steps += 1

    def learn(self, batch: Batch) -> None:
        third = self.steps % 3 == 0
        self.steps += 1
        super().learn(Batch(batch.x, batch.y.flip(0)) if third else batch)


def test_phases_have_graphs_of_their_own() -> None:
    one, other = (Refreshing(learner(stream()), buffer=9, replay=4) for _ in range(2))
    plain(one, stream(batch=2, epochs=6))
    graphs = Rerun(other)
    by_graphs(other, stream(batch=2, epochs=6), graphs)
    assert graphs.captured == 2  # one shape, two phases
    assert_identical(one.state_dict(), other.state_dict())


# The tape


def counting() -> Callable[[], Tensor]:
    numbers = iter(range(100))
    return lambda: torch.tensor([next(numbers)])


def test_decisions_are_made_where_there_is_no_tape() -> None:
    make = counting()
    assert [decision(make, CPU).item() for _ in range(3)] == [0, 1, 2]


def test_a_tape_keeps_the_order_and_the_places() -> None:
    tape, first, second = Tape(), counting(), counting()
    with record(tape):
        places = [decision(first, CPU), decision(second, CPU), decision(first, CPU)]
    assert [place.item() for place in places] == [0, 0, 1]
    made = tape.make_again()
    assert [value.item() for value in made] == [2, 1, 3]
    assert [place.item() for place in places] == [0, 0, 1]
    tape.put(made)
    assert [place.item() for place in places] == [2, 1, 3]
    with play(tape.places):
        assert all(decision(first, CPU) is place for place in places)
        with pytest.raises(RuntimeError, match="more decisions than were recorded"):
            decision(first, CPU)
    assert decision(first, CPU).item() == 4  # nothing was made meanwhile


def test_a_tape_is_put_away_after_an_error() -> None:
    for within in (record(Tape()), play([])):
        with pytest.raises(KeyError), within:
            raise KeyError
    assert decision(lambda: torch.tensor(7), CPU).item() == 7


def test_other_shapes_do_not_fit() -> None:
    tape, lengths = Tape(), iter([2, 2, 3])
    with record(tape):
        decision(lambda: torch.zeros(next(lengths)), CPU)
    assert tape.fits(tape.make_again())
    assert not tape.fits(tape.make_again())


# What a profile of captured steps says (benchmarks/bound.py)

ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::"
UNNAMED = "(anonymous namespace)::"
LAMBDA = "(at::TensorIteratorBase&)::{lambda()#1}, std::array<char*, 2ul> >(int)"
FOREACH = (
    f"void at::native::{UNNAMED}multi_tensor_apply_kernel<at::native::{UNNAMED}TensorListMetadata"
)
KERNELS = {  # as cuDNN, cuBLAS, ATen and torch.compile name them
    "convolutions": (
        "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64"
        "_warpgroupsize1x1x1_g1_execute_segment_k_off_kernel__5x_cudnn",
        "sm80_xmma_wgrad_implicit_gemm_indexed_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize32x256x32"
        "_stage3_warpsize1x4x1_g1_tensor16x8x16_execute_kernel_cudnn_train",
        "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816dgrad_optimized_bf16_128x128>",
        "cutlass3x_sm100_tensorop_s256x256x16implicit_gemm_fprop_bf16",
        "void cudnn::cnn::wgrad_alg0_engine<float, 128, 5, 5, 3, 3, 3, false, 512>(int, int, int)",
        "void conv2d_grouped_direct_kernel<float, float, float>(cudnnTensorStruct)",
        "volta_scudnn_128x32_relu_medium_nn_v1",
        "triton_tem_fused_convolution_3",
    ),
    "products": (
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_64x1_tn>",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>",
        "triton_tem_fused_mm_0",
    ),
    "normalisation": (
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<__half, float, 512, true, 1>",
        "void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 512, true, 1>(float)",
        "void cudnn::batchnorm_bwtr_nhwc_semiPersist<__half, int, 2>",
        "void at::native::batch_norm_backward_elemt_channels_last_kernel<4, c10::BFloat16, float>",
        "triton_red_fused_native_batch_norm_backward_threshold_backward_15",
        "triton_red_fused__native_batch_norm_legit_functional_add_convolution_backward"
        "_native_batch_norm_backward_threshold_backward_10",
        "triton_poi_fused__native_batch_norm_legit_functional__to_copy_add_copy__relu_2",
    ),
    "activation": (
        f"{ELEMENTWISE}{UNNAMED}launch_clamp_scalar{LAMBDA}",
        f"{ELEMENTWISE}{UNNAMED}threshold_kernel_impl<c10::BFloat16>{LAMBDA}",
        "triton_poi_fused_add_relu_7",
    ),
    "optimizer update": (
        f"{FOREACH}<2>, at::native::{UNNAMED}BinaryOpListAlphaFunctor<float, 2, 2, 0>, "
        "std::plus<float>, float>",
        f"{FOREACH}<3>, at::native::{UNNAMED}FusedAdamMathFunctor<float, 4, (ADAM_MODE)1, false>",
        "step",  # src/syngap/optim/fused.py
    ),
    "copies and layout": (
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        f"{ELEMENTWISE}bfloat16_copy_kernel_cuda{LAMBDA}",
        f"void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda{LAMBDA}",
        f"{ELEMENTWISE}FillFunctor<float>, std::array<char*, 1ul> >(int)",
        f"void at::native::{UNNAMED}CatArrayBatchedCopy<at::native::{UNNAMED}OpaqueType<4u>>",
        f"{FOREACH}<2>, at::native::{UNNAMED}UnaryOpFunctor<float, 2, 1, 1>, "
        "at::native::Copy<float, float>>",
        "void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true>",
        "triton_poi_fused__to_copy_convolution_5",
    ),
    "loss": (
        f"void {UNNAMED}softmax_warp_forward<float, float, float, 7, true, false>",
        "void at::native::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>",
    ),
    "draws and indices": (
        f"void at::native::{UNNAMED}distribution_elementwise_grid_stride_kernel<float, 4>",
        f"void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel{LAMBDA}",
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<int>",
    ),
    "sums and means": (
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, MeanOps<float>>>",
        "triton_per_fused_sum_14",
    ),
    "other arithmetic": (
        f"{ELEMENTWISE}CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul> >(int)",
        "triton_poi_fused_add_mul_1",
    ),
    "others": ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",),
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in KERNELS.items() for name in names]
)
def test_a_profile_knows_kinds_of_kernels_by_their_names(kind: str, name: str) -> None:
    assert {*KERNELS} == {*KINDS, "others"}
    assert kind_of(name) == kind
    assert "|" not in short_name(name)


def test_a_profile_tells_time_without_a_kernel_from_kernels_at_once() -> None:
    copy, step = "Memset (Device)", "step"
    kernels = [Kernel(step, 4, 6), Kernel(copy, 0, 2), Kernel(copy, 1, 3), Kernel(step, 8, 10)]
    assert busy(kernels) == 7
    assert rows_by(kind_of, kernels, steps=2) == [
        ["optimizer update", "2.0", "40.0%", "1.0"],
        ["copies and layout", "2.0", "40.0%", "1.0"],
        ["no kernel", "1.5", "30.0%", ""],
    ]
    assert rows_by(kind_of, kernels, steps=2, most=1)[1:] == [["no kernel", "1.5", "30.0%", ""]]
    assert rows_by(kind_of, [], steps=2) == []
