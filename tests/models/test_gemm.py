"""Matmuls in their fastest way: what they give, where they are put in the place of torch's, and what is remembered."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from compositions import CONTEXT, build_wild, draw_tokens
from gptmill.models.kernels.choice import fuse
from gptmill.models.stream import Normed
from torch import Tensor, nn
from torch.fx import Graph

from gptmill.config.run import ActivationCheckpointing
from gptmill.models.fused.fp8_layers import build_fp8_linear
from gptmill.models.kernels import gemm as matmuls
from gptmill.models.kernels.cublaslt import Epilogue, Numbers, Plan
from gptmill.models.kernels.gemm import (
    PLAIN,
    autotune_gemms,
    choices,
    describe,
    gemm_fp32,
    gemm_fp32_reference,
    gemm_reference,
    multiply,
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
LAYOUTS = {"as they lie": (False, False), "b turned": (False, True), "a turned": (True, False), "both": (True, True)}


def draw(rows: int, columns: int, *, turned: bool = False, device: str = "cuda") -> Tensor:
    shape = (columns, rows) if turned else (rows, columns)
    matrix = torch.randn(shape, device=device).bfloat16()
    return matrix.t() if turned else matrix


class Watched:
    """The pass over a compiled graph, which also tells what the graph does then."""

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
def test_compiled_matmuls_and_their_gradients_are_ours_and_give_the_same() -> None:
    watched = Watched()
    inputs = [draw(*shape, device="cpu").requires_grad_() for shape in ((64, 32), (128, 32), (1, 128))]
    x, weight, bias = inputs[0], inputs[1], inputs[2][0]
    plain = torch.autograd.grad(feed_forward(x, weight, bias).sum(), inputs, retain_graph=True)
    torch.compiler.reset()
    ours = torch.compile(feed_forward, options={"post_grad_custom_post_pass": watched})
    found = torch.autograd.grad(ours(x, weight, bias).sum(), inputs)
    assert (
        watched.seen.count("gptmill.multiply.default") == 5
    )  # the sum of the weight's two gradients is a matmul of torch's
    assert watched.seen.count("aten.addmm.default") == 1
    assert "aten.mm.default" not in watched.seen
    for one, other in zip(found, plain, strict=True):
        assert (one - other).float().norm() < 0.01 * other.float().norm()


def test_small_and_wide_matmuls_stay_torchs() -> None:
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
    ("dtype", "is_alone", "leaves", "is_wide"),
    [
        (torch.float32, True, True, True),
        (torch.float64, True, True, False),
        (torch.float32, False, True, False),
        (torch.float32, True, False, False),
    ],
)
def test_a_product_that_leaves_in_fp32_is_made_so(
    dtype: torch.dtype, is_alone: bool, leaves: bool, is_wide: bool
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
    name = torch.ops.gptmill.gemm_fp32.default if is_wide else torch.ops.gptmill.multiply.default
    assert ours.target == name
    assert ours.meta["val"].dtype == (torch.float32 if is_wide else torch.bfloat16)
    assert (cast in graph.nodes) == (not is_wide)


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
def test_compiled_gradients_of_weights_in_fp32_are_wide_products() -> None:
    watched = Watched()
    layer, x = nn.Linear(32, 16), torch.randn(64, 32)
    with torch.autocast("cpu", torch.bfloat16):
        plain = torch.autograd.grad(layer(x).square().sum(), layer.parameters())
        torch.compiler.reset()
        ours = torch.compile(layer, options={"post_grad_custom_post_pass": watched})(x).square().sum()
    found = torch.autograd.grad(ours, layer.parameters())
    assert watched.seen.count("gptmill.multiply_wide.default") == 1
    for one, other in zip(found, plain, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.02 * other.norm()


def test_matmuls_in_fp8_are_found_with_their_scales_and_sums() -> None:
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
    assert ours.target == torch.ops.gptmill.multiply.default
    assert ours.args == (a, b, None, scale, scale, True)


def test_the_pass_tells_its_code_and_its_limit_apart() -> None:
    assert build_gemm_pass().uuid() == build_gemm_pass().uuid()
    assert build_gemm_pass().uuid() != build_gemm_pass(1.0).uuid()


def test_without_a_gpu_torch_multiplies() -> None:
    a, b, bias = draw(64, 32, device="cpu"), draw(32, 16, device="cpu"), draw(1, 16, device="cpu")[0]
    assert multiply(a, b).equal(a @ b)
    assert multiply(a, b, bias).equal(torch.addmm(bias, a, b))
    assert gemm_fp32(a, b).equal((a @ b).float())


@needs_gpu
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_on_a_gpu_every_way_gives_what_torch_gives(layout: tuple[bool, bool], with_bias: bool) -> None:
    a, b = draw(4096, 2048, turned=layout[0]), draw(2048, 1536, turned=layout[1])
    numbers = Numbers(a, b, draw(1, 1536)[0] if with_bias else None)
    matmul = describe(numbers, Epilogue.BIAS if with_bias else Epilogue.NOTHING)
    assert matmul is not None
    plan = Plan(matmul, numbers)
    assert len(plan.algorithms) > 1
    expected = gemm_reference(numbers)
    for way in plan.algorithms:
        torch.testing.assert_close(plan.run(numbers, way), expected, rtol=0.01, atol=0.5)


@needs_gpu
def test_on_a_gpu_a_wide_product_is_not_rounded() -> None:
    a, b = draw(4096, 2048, turned=True), draw(2048, 1536)
    assert tuned_gemm(Numbers(a, b), Epilogue.NOTHING, result=torch.float32) is not None
    found, expected = gemm_fp32(a, b), a.float() @ b.float()
    assert found.dtype == torch.float32
    assert (found - expected).norm() < 0.1 * (gemm_fp32_reference(a, b) - expected).norm()


@needs_gpu
@needs_fp8
def test_on_a_gpu_fp8_is_multiplied_with_its_scales() -> None:
    a, b = draw(4096, 2048).to(torch.float8_e4m3fn), draw(1536, 2048).to(torch.float8_e4m3fn).t()
    scales = torch.full((), 0.5, device="cuda"), torch.full((), 3.0, device="cuda")
    numbers = Numbers(a, b, draw(1, 1536)[0], *scales)
    assert tuned_gemm(numbers, Epilogue.BIAS, use_fast_accum=True) is not None
    expected = gemm_reference(numbers, use_fast_accum=True)
    torch.testing.assert_close(multiply(*numbers[:5], use_fast_accum=True), expected, rtol=0.02, atol=1.0)


@needs_gpu
@pytest.mark.usefixtures("no_choices")
def test_on_a_gpu_the_fastest_way_is_timed_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = draw(4096, 2048), draw(2048, 1536)
    numbers = Numbers(a, b)
    matmul = describe(numbers, Epilogue.NOTHING)
    assert matmul is not None
    multiply(a, b)
    assert not choices  # nobody has asked for it
    with autotune_gemms():
        multiply(a, b)
    assert list(choices) == [name_gemm(matmul, a.device)]
    monkeypatch.setattr(matmuls, "_find_fastest", None)
    with autotune_gemms():
        torch.testing.assert_close(multiply(a, b), a @ b, rtol=0.01, atol=0.5)


@needs_gpu
def test_on_a_gpu_what_it_cannot_do_is_left_to_torch() -> None:
    a, b = draw(4096, 2049)[:, 1:], draw(2048, 3072)[:, ::2]
    assert describe(Numbers(a, b), Epilogue.NOTHING) is None
    assert multiply(a, b).equal(a @ b)
    assert multiply(a.float(), b.float()).equal(a.float() @ b.float())


@pytest.mark.parametrize("narrow", [False, True], ids=["bf16", "fp8"])
def test_a_feed_forward_part_by_such_matmuls_is_what_it_is_by_layers(narrow: bool) -> None:
    torch.manual_seed(0)
    up, down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)
    up = build_fp8_linear(up, emulated=True, forward_only=True) if narrow else up
    x = torch.randn(2, 16, 32, requires_grad=True)
    gradient = torch.randn(2, 16, 32)
    with torch.autocast("cpu", torch.bfloat16):
        pairs = [down(F.gelu(up(x), approximate="tanh")), gelu_feed_forward(Normed(x), up, down)]
    inputs = [x, up.weight, up.bias, down.weight]
    plain, ours = (torch.autograd.grad(result, inputs, gradient.to(result.dtype)) for result in pairs)
    for one, other in zip((pairs[1], *ours), (pairs[0], *plain), strict=True):
        assert one.dtype == other.dtype
        assert (one - other).float().norm() < 0.02 * other.float().norm()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("is_compiled", [False, True], ids=["as it is", "compiled"])
def test_a_model_uses_them_where_they_are_large(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptmill.models.feed_forward.is_large", lambda *_: True)
    model, tokens, targets = build_wild(), draw_tokens(2, CONTEXT), draw_tokens(2, CONTEXT, seed=3)
    plain = model(tokens, targets).objective
    expected = torch.autograd.grad(plain, list(model.parameters()))
    fuse(model, "auto")
    monkeypatch.setattr("gptmill.models.feed_forward.bias_gelu", None)
    if is_compiled:
        torch.compiler.reset()
        model.compile_parts(fullgraph=True, backend="aot_eager")
    ours = model(tokens, targets).objective
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(torch.autograd.grad(ours, list(model.parameters())), expected)


@pytest.mark.parametrize(("recompute", "is_deterministic"), [("selective", False), ("none", True)])
def test_a_model_does_gelu_by_itself_where_matmuls_must_not(
    recompute: ActivationCheckpointing, is_deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Selective checkpointing would keep two results, and what must give the same bits is left to torch."""
    monkeypatch.setattr("gptmill.models.feed_forward.is_large", lambda *_: True)
    monkeypatch.setattr("gptmill.models.feed_forward.gelu_feed_forward", None)
    monkeypatch.setattr("torch.are_deterministic_algorithms_enabled", lambda: is_deterministic)
    model = build_wild()
    model.set_activation_checkpointing(recompute)
    fuse(model, "auto")
    assert model(draw_tokens(2, CONTEXT), draw_tokens(2, CONTEXT, seed=3)).objective.isfinite()


@needs_gpu
def test_on_a_gpu_matmuls_do_the_work_of_gelu() -> None:
    x, weight, bias, gradient = draw(8192, 768), draw(3072, 768).t() / 30, draw(1, 3072)[0], draw(8192, 768)
    inner = torch.empty(8192, 3072, device="cuda", dtype=torch.bfloat16)
    assert tuned_gemm(Numbers(x, weight, bias, beside=inner), Epilogue.GELU_AUX_BIAS) is not None
    assert tuned_gemm(Numbers(gradient, weight, beside=inner), Epilogue.DGELU) is not None
    found = (*gemm_gelu(x, weight, bias, None, None), gemm_dgelu(gradient, weight, inner))
    wanted = (
        *gemm_gelu_reference(Numbers(x, weight, bias)),
        gemm_dgelu_reference(Numbers(gradient, weight, beside=inner)),
    )
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).float().norm() < 0.01 * other.float().norm()


@needs_gpu
@needs_fp8
def test_on_a_gpu_matmuls_in_fp8_do_the_work_of_gelu() -> None:
    x, weight, bias = draw(8192, 768).to(torch.float8_e4m3fn), draw(3072, 768).to(torch.float8_e4m3fn), draw(1, 3072)[0]
    scales = torch.full((), 0.5, device="cuda"), torch.full((), 0.05, device="cuda")
    numbers = Numbers(x, weight.t(), bias, *scales, torch.empty(8192, 3072, device="cuda", dtype=torch.bfloat16))
    assert tuned_gemm(numbers, Epilogue.GELU_AUX_BIAS, use_fast_accum=True) is not None
    found = gemm_gelu(x, weight.t(), bias, *scales)
    wanted = gemm_gelu_reference(Numbers(x, weight.t(), bias, *scales))
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one - other).float().norm() < 0.01 * other.float().norm()


@needs_gpu
@pytest.mark.usefixtures("no_choices")
def test_on_a_gpu_the_plain_way_is_taken_where_it_is_faster() -> None:
    a, b = draw(4096, 2048), draw(2048, 1536)
    numbers = Numbers(a, b)
    with autotune_gemms():
        assert tuned_gemm(numbers, Epilogue.NOTHING, plain=lambda: None) is None
    assert list(choices.values()) == [PLAIN]
