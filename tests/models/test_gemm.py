"""Tuned GEMMs: their results, where they replace torch's, and the autotuning cache."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from compositions import CONTEXT, build_wild, draw_tokens
from torch import Tensor, nn
from torch.fx import Graph

from gptmill.config.run import ActivationCheckpointing
from gptmill.models.fused.fp8_layers import build_fp8_linear, find_fp8_input
from gptmill.models.kernels import gemm as gemm_module
from gptmill.models.kernels.cublaslt import Epilogue, GemmPlan, Operands
from gptmill.models.kernels.custom_ops import register_custom_ops
from gptmill.models.kernels.gemm import (
    USE_TORCH,
    autotune_gemms,
    autotuned,
    describe,
    gemm,
    gemm_fp32,
    gemm_fp32_reference,
    gemm_reference,
    name_gemm,
    tuned_gemm,
)
from gptmill.models.kernels.gemm_gelu import (
    gelu_feed_forward,
    gemm_dgelu,
    gemm_dgelu_reference,
    gemm_gelu,
    gemm_gelu_reference,
)
from gptmill.models.kernels.gemm_pass import build_gemm_pass, replace_gemms

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_fp8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs fp8"
)
LAYOUTS = {
    "row-major": (False, False),
    "b transposed": (False, True),
    "a transposed": (True, False),
    "both": (True, True),
}


def draw(rows: int, columns: int, *, transposed: bool = False, device: str = "cuda") -> Tensor:
    shape = (columns, rows) if transposed else (rows, columns)
    matrix = torch.randn(shape, device=device).bfloat16()
    return matrix.t() if transposed else matrix


class Watched:
    """The pass over a compiled graph, which also records the ops that the graph has then."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, graph: Graph) -> None:
        replace_gemms(graph, 0)
        self.seen.extend(str(node.target) for node in graph.nodes if node.op == "call_function")

    def uuid(self) -> None:
        return None


def feed_forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.linear(x, weight, bias)) @ weight


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
def test_compiled_gemms_and_their_gradients_are_replaced_and_give_the_same() -> None:
    watched = Watched()
    inputs = [draw(*shape, device="cpu").requires_grad_() for shape in ((64, 32), (128, 32), (1, 128))]
    x, weight, bias = inputs[0], inputs[1], inputs[2][0]
    plain = torch.autograd.grad(feed_forward(x, weight, bias).sum(), inputs, retain_graph=True)
    torch.compiler.reset()
    ours = torch.compile(feed_forward, options={"post_grad_custom_post_pass": watched})
    found = torch.autograd.grad(ours(x, weight, bias).sum(), inputs)
    # The sum of the weight's two gradients remains a GEMM of torch's.
    assert watched.seen.count("gptmill.gemm.default") == 5
    assert watched.seen.count("aten.addmm.default") == 1
    assert "aten.mm.default" not in watched.seen
    for one, other in zip(found, plain, strict=True):
        assert (one - other).float().norm() < 0.01 * other.float().norm()


def test_small_and_fp32_gemms_stay_torchs() -> None:
    graph = Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    a.meta["val"], b.meta["val"] = torch.empty(64, 32), torch.empty(32, 16)
    product = graph.call_function(torch.ops.aten.mm.default, (a, b))
    product.meta["val"] = torch.empty(64, 16)
    graph.output(product)
    for dtype, least in ((torch.float32, 0.0), (torch.bfloat16, 2.0 * 64 * 32 * 16 + 1)):
        for node in (a, b, product):
            node.meta["val"] = node.meta["val"].to(dtype)
        replace_gemms(graph, least)
        assert product in graph.nodes
    replace_gemms(graph, 2.0 * 64 * 32 * 16)
    assert product not in graph.nodes


@pytest.mark.parametrize(
    ("dtype", "is_alone", "leaves", "is_fp32"),
    [
        (torch.float32, True, True, True),
        (torch.float64, True, True, False),
        (torch.float32, False, True, False),
        (torch.float32, True, False, False),
    ],
)
def test_a_product_whose_only_use_is_a_cast_to_fp32_is_computed_in_fp32(
    dtype: torch.dtype, is_alone: bool, leaves: bool, is_fp32: bool
) -> None:
    graph = Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    a.meta["val"], b.meta["val"] = torch.empty(64, 32).bfloat16(), torch.empty(32, 16).bfloat16()
    product = graph.call_function(torch.ops.aten.mm.default, (a, b))
    product.meta["val"] = torch.empty(64, 16).bfloat16()
    cast = graph.call_function(torch.ops.prims.convert_element_type.default, (product, dtype))
    cast.meta["val"] = torch.empty(64, 16, dtype=dtype)
    result = cast if leaves else graph.call_function(torch.ops.aten.neg.default, (cast,))
    graph.output((result,) if is_alone else (result, product))
    replace_gemms(graph, 0)
    graph.lint()
    ours = next(node for node in graph.nodes if node.op == "call_function")
    name = torch.ops.gptmill.gemm_fp32.default if is_fp32 else torch.ops.gptmill.gemm.default
    assert ours.target == name
    assert ours.meta["val"].dtype == (torch.float32 if is_fp32 else torch.bfloat16)
    assert (cast in graph.nodes) == (not is_fp32)


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
def test_compiled_gradients_of_fp32_weights_are_fp32_products() -> None:
    watched = Watched()
    layer, x = nn.Linear(32, 16), torch.randn(64, 32)
    with torch.autocast("cpu", torch.bfloat16):
        plain = torch.autograd.grad(layer(x).square().sum(), layer.parameters())
        torch.compiler.reset()
        ours = torch.compile(layer, options={"post_grad_custom_post_pass": watched})(x).square().sum()
    found = torch.autograd.grad(ours, layer.parameters())
    assert watched.seen.count("gptmill.gemm_fp32.default") == 1
    for one, other in zip(found, plain, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.02 * other.norm()


def test_fp8_gemms_are_found_with_their_scales_and_accumulation() -> None:
    graph = Graph()
    a, b, scale = (graph.placeholder(name) for name in "abs")
    a.meta["val"], b.meta["val"] = (torch.empty(16, 16, dtype=torch.float8_e4m3fn) for _ in range(2))
    scale.meta["val"] = torch.empty(())
    arguments = (a, b, scale, scale, None, None, torch.bfloat16, True)
    product = graph.call_function(torch.ops.aten._scaled_mm.default, arguments)
    product.meta["val"] = torch.empty(16, 16, dtype=torch.bfloat16)
    graph.output(product)
    replace_gemms(graph, 0)
    ours = next(node for node in graph.nodes if node.op == "call_function")
    assert ours.target == torch.ops.gptmill.gemm.default
    assert ours.args == (a, b, None, scale, scale, True)


def test_the_uuid_of_the_pass_depends_on_its_limit() -> None:
    assert build_gemm_pass().uuid() == build_gemm_pass().uuid()
    assert build_gemm_pass().uuid() != build_gemm_pass(1.0).uuid()


def test_without_a_gpu_torch_multiplies() -> None:
    a, b, bias = draw(64, 32, device="cpu"), draw(32, 16, device="cpu"), draw(1, 16, device="cpu")[0]
    assert gemm(a, b).equal(a @ b)
    assert gemm(a, b, bias).equal(torch.addmm(bias, a, b))
    assert gemm_fp32(a, b).equal((a @ b).float())


@needs_gpu
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_on_a_gpu_every_algorithm_gives_what_torch_gives(layout: tuple[bool, bool], with_bias: bool) -> None:
    a, b = draw(4096, 2048, transposed=layout[0]), draw(2048, 1536, transposed=layout[1])
    operands = Operands(a, b, draw(1, 1536)[0] if with_bias else None)
    problem = describe(operands, Epilogue.BIAS if with_bias else Epilogue.DEFAULT)
    assert problem is not None
    plan = GemmPlan(problem, operands)
    assert len(plan.algorithms) > 1
    expected = gemm_reference(operands)
    for algorithm in plan.algorithms:
        torch.testing.assert_close(plan.run(operands, algorithm), expected, rtol=0.01, atol=0.5)


@needs_gpu
def test_on_a_gpu_an_fp32_product_is_not_rounded() -> None:
    a, b = draw(4096, 2048, transposed=True), draw(2048, 1536)
    assert tuned_gemm(Operands(a, b), Epilogue.DEFAULT, result=torch.float32) is not None
    found, expected = gemm_fp32(a, b), a.float() @ b.float()
    assert found.dtype == torch.float32
    assert (found - expected).norm() < 0.1 * (gemm_fp32_reference(a, b) - expected).norm()


@needs_gpu
@needs_fp8
def test_on_a_gpu_fp8_is_multiplied_with_its_scales() -> None:
    a, b = draw(4096, 2048).to(torch.float8_e4m3fn), draw(1536, 2048).to(torch.float8_e4m3fn).t()
    scales = torch.full((), 0.5, device="cuda"), torch.full((), 3.0, device="cuda")
    operands = Operands(a, b, draw(1, 1536)[0], *scales)
    assert tuned_gemm(operands, Epilogue.BIAS, use_fast_accum=True) is not None
    expected = gemm_reference(operands, use_fast_accum=True)
    torch.testing.assert_close(gemm(*operands[:5], use_fast_accum=True), expected, rtol=0.02, atol=1.0)


@needs_gpu
@pytest.mark.usefixtures("nothing_autotuned")
def test_on_a_gpu_algorithms_are_timed_once_and_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = draw(4096, 2048), draw(2048, 1536)
    operands = Operands(a, b)
    problem = describe(operands, Epilogue.DEFAULT)
    assert problem is not None
    gemm(a, b)
    assert not autotuned  # outside of autotune_gemms nothing is timed
    with autotune_gemms():
        gemm(a, b)
    assert list(autotuned) == [name_gemm(problem, a.device)]
    monkeypatch.setattr(gemm_module, "_find_fastest", None)
    with autotune_gemms():
        torch.testing.assert_close(gemm(a, b), a @ b, rtol=0.01, atol=0.5)


@needs_gpu
def test_on_a_gpu_unsupported_operands_are_left_to_torch() -> None:
    a, b = draw(4096, 2049)[:, 1:], draw(2048, 3072)[:, ::2]
    assert describe(Operands(a, b), Epilogue.DEFAULT) is None
    assert gemm(a, b).equal(a @ b)
    assert gemm(a.float(), b.float()).equal(a.float() @ b.float())


@pytest.mark.parametrize("quantized", [False, True], ids=["bf16", "fp8"])
def test_a_feed_forward_layer_with_gelu_epilogues_matches_separate_layers(quantized: bool) -> None:
    torch.manual_seed(0)
    up, down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)
    up = build_fp8_linear(up, emulated=True, forward_only=True) if quantized else up
    x = torch.randn(2, 16, 32, requires_grad=True)
    gradient = torch.randn(2, 16, 32)
    with torch.autocast("cpu", torch.bfloat16):
        half = x.bfloat16()
        x_fp8 = find_fp8_input(up, half.flatten(0, 1), None)
        ours = gelu_feed_forward(half, up.weight, up.bias, down.weight, x_fp8)
        pairs = [down(F.gelu(up(x), approximate="tanh")), ours]
    inputs = [x, up.weight, up.bias, down.weight]
    plain, ours = (torch.autograd.grad(result, inputs, gradient.to(result.dtype)) for result in pairs)
    for one, other in zip((pairs[1], *ours), (pairs[0], *plain), strict=True):
        assert one.dtype == other.dtype
        assert (one - other).float().norm() < 0.02 * other.float().norm()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_a_model_uses_gelu_epilogues_for_large_gemms(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptmill.models.fused.fused_mlp.is_large", lambda *_: True)
    tokens, targets = draw_tokens(2, CONTEXT), draw_tokens(2, CONTEXT, seed=3)
    reference, model = build_wild(), build_wild(kernels="auto")
    plain = reference(tokens, targets).objective
    expected = torch.autograd.grad(plain, list(reference.parameters()))
    monkeypatch.setattr("gptmill.models.fused.fused_mlp.bias_gelu", None)
    if is_compiled:
        register_custom_ops()  # as prepare_compiler does
        torch.compiler.reset()
        model.compile_parts(fullgraph=True, backend="aot_eager")
    ours = model(tokens, targets).objective
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(torch.autograd.grad(ours, list(model.parameters())), expected)


@pytest.mark.parametrize(("recompute", "is_deterministic"), [("selective", False), ("none", True)])
def test_a_model_computes_gelu_separately_where_epilogues_are_ruled_out(
    recompute: ActivationCheckpointing, is_deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Selective checkpointing would save two results, and deterministic algorithms are torch's."""
    monkeypatch.setattr("gptmill.models.fused.fused_mlp.is_large", lambda *_: True)
    monkeypatch.setattr("gptmill.models.fused.fused_mlp.gelu_feed_forward", None)
    monkeypatch.setattr("torch.are_deterministic_algorithms_enabled", lambda: is_deterministic)
    model = build_wild(kernels="auto")
    model.set_activation_checkpointing(recompute)
    assert model(draw_tokens(2, CONTEXT), draw_tokens(2, CONTEXT, seed=3)).objective.isfinite()


@needs_gpu
def test_on_a_gpu_gelu_epilogues_match_the_reference() -> None:
    x, weight, bias, gradient = draw(8192, 768), draw(3072, 768).t() / 30, draw(1, 3072)[0], draw(8192, 768)
    inner = torch.empty(8192, 3072, device="cuda", dtype=torch.bfloat16)
    assert tuned_gemm(Operands(x, weight, bias, aux=inner), Epilogue.GELU_AUX_BIAS) is not None
    assert tuned_gemm(Operands(gradient, weight, aux=inner), Epilogue.DGELU) is not None
    found = (*gemm_gelu(x, weight, bias, None, None), gemm_dgelu(gradient, weight, inner))
    wanted = (
        *gemm_gelu_reference(Operands(x, weight, bias)),
        gemm_dgelu_reference(Operands(gradient, weight, aux=inner)),
    )
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).float().norm() < 0.01 * other.float().norm()


@needs_gpu
@needs_fp8
def test_on_a_gpu_gelu_epilogues_of_fp8_gemms_match_the_reference() -> None:
    x, weight, bias = draw(8192, 768).to(torch.float8_e4m3fn), draw(3072, 768).to(torch.float8_e4m3fn), draw(1, 3072)[0]
    scales = torch.full((), 0.5, device="cuda"), torch.full((), 0.05, device="cuda")
    operands = Operands(x, weight.t(), bias, *scales, torch.empty(8192, 3072, device="cuda", dtype=torch.bfloat16))
    assert tuned_gemm(operands, Epilogue.GELU_AUX_BIAS, use_fast_accum=True) is not None
    found = gemm_gelu(x, weight.t(), bias, *scales)
    wanted = gemm_gelu_reference(Operands(x, weight.t(), bias, *scales))
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one - other).float().norm() < 0.01 * other.float().norm()


@needs_gpu
@pytest.mark.usefixtures("nothing_autotuned")
def test_on_a_gpu_torch_is_used_where_it_is_faster() -> None:
    a, b = draw(4096, 2048), draw(2048, 1536)
    operands = Operands(a, b)
    with autotune_gemms():
        assert tuned_gemm(operands, Epilogue.DEFAULT, plain=lambda: None) is None
    assert list(autotuned.values()) == [USE_TORCH]
