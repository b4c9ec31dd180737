"""Refusals that need no engine: each names its setting and what to do."""

from __future__ import annotations

from types import SimpleNamespace as Config

import pytest

from wisp_core.errors import ConfigurationError, UnsupportedModelError
from wisp_core.pager.support import refuse_unsupported
from wisp_core.settings import WispSettings


class UnquantizedFusedMoEMethod:
    is_monolithic = False
    unquantized_backend = Config(name="TRITON")


class Fp8MoEMethod:
    is_monolithic = False


def check(
    *,
    use_ep: bool = False,
    enable_eplb: bool = False,
    tensor: int = 1,
    pipeline: int = 1,
    data: int = 1,
    method: object = UnquantizedFusedMoEMethod(),
    lora: object = None,
    speculative: object = None,
    cpu_offload_gb: float = 0,
    device: str = "cpu",
    has_bias: bool = False,
    num_experts: int = 32,
    settings: WispSettings = WispSettings(cap=8),  # noqa: B008
) -> None:
    vllm_config = Config(
        parallel_config=Config(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, data_parallel_size=data),
        lora_config=lora,
        speculative_config=speculative,
        offload_config=Config(uva=Config(cpu_offload_gb=cpu_offload_gb), prefetch=Config(offload_group_size=0)),
        device_config=Config(device_type=device),
    )
    moe_config = Config(
        moe_parallel_config=Config(use_ep=use_ep, enable_eplb=enable_eplb), has_bias=has_bias, num_experts=num_experts
    )
    refuse_unsupported(vllm_config, moe_config, method, settings)


def test_plain_engines_pass() -> None:
    check()
    check(device="cuda")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"use_ep": True}, "--enable-expert-parallel"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"tensor": 2}, "--tensor-parallel-size: 2 is untested"),
        ({"pipeline": 2}, "--pipeline-parallel-size: 2"),
        ({"data": 2}, "--data-parallel-size: 2"),
        ({"method": Fp8MoEMethod()}, "quantization by Fp8MoEMethod.*no --quantization"),
        ({"lora": object()}, "--enable-lora"),
        ({"speculative": object()}, "--speculative-config"),
        ({"cpu_offload_gb": 1}, "--cpu-offload-gb"),
        ({"device": "cuda", "has_bias": True}, "experts with biases"),
        ({"device": "cuda", "num_experts": 512}, "512 experts per layer: at most 495"),
    ],
)
def test_each_unsupported_setting_is_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        check(**arguments)  # type: ignore[arg-type]


def test_a_monolithic_kernel_is_refused_with_the_backend_to_choose() -> None:
    method = UnquantizedFusedMoEMethod()
    method.is_monolithic = True
    with pytest.raises(UnsupportedModelError, match="--moe-backend triton"):
        check(method=method)


def test_an_untested_gpu_kernel_is_refused_with_the_backend_to_choose() -> None:
    method = UnquantizedFusedMoEMethod()
    method.unquantized_backend = Config(name="FLASHINFER_CUTLASS")
    with pytest.raises(UnsupportedModelError, match=r"FLASHINFER_CUTLASS.*--moe-backend triton"):
        check(method=method, device="cuda")


def test_all_reasons_are_told_at_once() -> None:
    with pytest.raises(UnsupportedModelError, match=r"(?s)tensor-parallel-size.*--enable-lora"):
        check(tensor=4, lora=object())


def test_the_emulated_link_is_for_cpu_only() -> None:
    with pytest.raises(ConfigurationError, match="emulated_link_bytes_per_s"):
        check(device="cuda", settings=WispSettings(cap=8, emulated_link_bytes_per_s=1e9))
