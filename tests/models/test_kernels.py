"""The fused model computes what the plain one does, forward and backward.

On the CPU the kernels' reference implementations run. The Triton kernels are compared with them by Triton's
interpreter, where Triton is installed, and on a GPU where there is one.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from compositions import COMPOSITIONS, CONTEXT, build_wild, draw_tokens
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule
from traced_functions import Recorder

from gptmill.config.model import ModelConfig
from gptmill.config.run import ActivationCheckpointing
from gptmill.models.fused.dispatch import MODELS, choose_kernels, describe_kernels
from gptmill.models.fused.pending_residual import Branch, PendingResidual, add_and_normalise
from gptmill.models.gpt import GPT
from gptmill.models.kernels.add_norm import add_norm, add_norm_backward_reference, add_norm_reference
from gptmill.models.kernels.bias_gelu import gelu_backward_reference
from gptmill.models.kernels.compiler import OPAQUE_OPS, prepare_compiler
from gptmill.models.kernels.custom_ops import register_custom_ops
from gptmill.models.kernels.dropout_mask import dropout_mask
from gptmill.models.kernels.fp8 import Fp8Format
from gptmill.models.kernels.linear_cross_entropy import linear_cross_entropy
from gptmill.models.kernels.qkv_projection import pack_gradients_reference
from gptmill.models.kernels.swiglu import swiglu, swiglu_backward_reference
from gptmill.models.losses import IGNORE_INDEX, LossConfig

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def run(model: GPT, groups: Tensor | None = None) -> dict[str, Tensor]:
    """The losses and gradients of two rows, some of whose targets do not count."""
    device = model.token_embedding.weight.device
    tokens, targets = draw_tokens(2, CONTEXT).to(device), draw_tokens(2, CONTEXT, seed=3).to(device)
    targets[0, 2] = targets[1, 5:] = IGNORE_INDEX
    losses = model.train()(tokens, targets, None, groups)
    (losses.objective / 3).backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    found |= {"objective": losses.objective.detach(), "cross entropy": losses.cross_entropy.detach()}
    return found | ({} if losses.per_domain_G is None else {"by group": losses.per_domain_G})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("config", COMPOSITIONS.values(), ids=COMPOSITIONS)
def test_a_fused_model_computes_what_the_plain_one_does(config: ModelConfig, device: str) -> None:
    plain, fused = (build_wild(config, kernels=kernels).to(device) for kernels in ("none", "auto"))
    assert list(fused.state_dict()) == list(plain.state_dict())
    assert_alike(run(fused), run(plain))


@pytest.mark.parametrize(
    "rule", [LossConfig(chunk_tokens=5), LossConfig(num_domains=3), LossConfig(z_loss=0.1)], ids=str
)
def test_a_fused_head_keeps_to_the_rule_of_the_loss(rule: LossConfig) -> None:
    plain, fused = build_wild(), build_wild(kernels="head")
    plain.loss_config = fused.loss_config = rule
    domains = torch.tensor([2, 0]) if rule.num_domains else None
    assert_alike(run(fused, domains), run(plain, domains))


def test_a_model_says_which_kernels_it_uses() -> None:
    said = {kernels: describe_kernels(build_wild(kernels=kernels)) for kernels in MODELS}
    assert said == {"none": "", "head": "the LM head's kernel", "auto": "all kernels"}


class Replay(nn.Module):
    """Dropout that keeps what it is told to, in order."""

    def __init__(self, kept: list[Tensor], factor: float) -> None:
        super().__init__()
        self.kept, self.factor = iter(kept), factor

    def forward(self, y: Tensor) -> Tensor:
        return torch.where(next(self.kept), y * self.factor, 0.0)


@pytest.mark.parametrize("name", ["classic", "llama", "everything"])
def test_a_fused_model_drops_what_a_plain_one_would(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of them the same numbers. Dropout of attention and of embeddings, the same in both, is left out."""
    config = replace(COMPOSITIONS[name], dropout=0.4)
    plain, fused = build_wild(config), build_wild(config, kernels="auto")
    kept: list[Tensor] = []

    def watch(like: Tensor, p: float) -> Tensor:
        kept.append(dropout_mask(like, p))
        return kept[-1]

    for model in (plain, fused):
        model.dropout.p = 0.0
        for block in (*model.blocks, *model.extra_blocks):
            block.attention.dropout = 0.0
    with monkeypatch.context() as patch:
        patch.setattr("gptmill.models.fused.pending_residual.dropout_mask", watch)
        found = run(fused)
    assert len(kept) == 2 * (config.num_layers + config.mtp_heads)
    assert 0.5 < torch.stack(kept).float().mean() < 0.7
    replay = Replay(kept, 1 / (1 - config.dropout))
    for block in (*plain.blocks, *plain.extra_blocks):
        block.dropout = replay
    assert_alike(found, run(plain))


def test_evaluation_drops_nothing_fused_either() -> None:
    tokens, targets = draw_tokens(2, CONTEXT), draw_tokens(2, CONTEXT, seed=3)
    config = replace(COMPOSITIONS["classic"], dropout=0.5)
    wanted = build_wild(config)(tokens, targets).cross_entropy
    fused = build_wild(config, kernels="auto")
    torch.testing.assert_close(fused(tokens, targets).cross_entropy, wanted)
    assert not torch.isclose(fused.train()(tokens, targets).cross_entropy, wanted)


def test_what_dropout_adds_is_right_on_average() -> None:
    torch.manual_seed(0)
    x, y, bias = torch.randn(16), torch.randn(16), torch.randn(16)
    pending = PendingResidual(x.expand(100, 400, 16), Branch(y.expand(100, 400, 16), bias).drop(0.3))
    sums, _ = add_and_normalise(nn.LayerNorm(16), pending)
    torch.testing.assert_close(sums, pending.materialize())
    added = sums - x
    dropped = added.isclose(torch.zeros(()), atol=1e-6)
    torch.testing.assert_close(added[~dropped], ((y + bias) / 0.7).expand_as(added)[~dropped])
    torch.testing.assert_close(dropped.float().mean(), torch.tensor(0.3), rtol=0, atol=0.005)
    torch.testing.assert_close(added.mean(dim=(0, 1)), y + bias, rtol=0.03, atol=0)


@pytest.mark.parametrize("is_rms", [False, True])
def test_gradients_past_dropout_are_those_of_the_formula(is_rms: bool) -> None:
    torch.manual_seed(0)
    x, y, d_stream, d_normed = torch.randn(4, 3, 5, 24)
    y_bias, weight, bias = torch.randn(3, 24)
    keep = torch.rand(3, 5, 24) >= 0.4
    leaves = [each.requires_grad_() for each in (x, y, y_bias, weight, *(() if is_rms else (bias,)))]
    total = x + torch.where(keep, (y + y_bias) / 0.6, 0.0)
    normed = F.rms_norm(total, (24,), weight, 1e-5) if is_rms else F.layer_norm(total, (24,), weight, bias, 1e-5)
    scale = torch.tensor(1 / 0.6)
    found = add_norm(x, y, y_bias, keep, scale, weight, None if is_rms else bias, 1e-5, is_rms=is_rms, with_fp8=True)
    torch.testing.assert_close(found[:2], (total, normed))
    wanted = torch.autograd.grad((total, normed), leaves, (d_stream, d_normed))
    torch.testing.assert_close(torch.autograd.grad(found[:2], leaves, (d_stream, d_normed)), wanted)
    assert found[2] is not None
    narrow = found[2].fp8.float() * found[2].inverse_scale
    torch.testing.assert_close(narrow.view_as(normed), normed, rtol=0.07, atol=0.01)


@pytest.mark.parametrize("how", ["full", "selective"])
def test_a_fused_block_that_is_computed_again_drops_the_same(how: ActivationCheckpointing) -> None:
    model = build_wild(replace(COMPOSITIONS["extra heads"], dropout=0.4), kernels="auto")
    torch.manual_seed(5)
    wanted = run(model)
    model.set_activation_checkpointing(how)
    torch.manual_seed(5)
    assert_alike(run(model), wanted)


def test_the_gradient_of_swiglu_is_that_of_the_plain_formula() -> None:
    x, d_y = torch.randn(3, 5, 14, dtype=torch.float64).float().requires_grad_(), torch.randn(3, 5, 7)
    gate, up = x.chunk(2, dim=-1)
    wanted = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(swiglu(x), wanted)
    (expected,), (found,) = (torch.autograd.grad(y, x, d_y, retain_graph=True) for y in (wanted, swiglu(x)))
    torch.testing.assert_close(found, expected)


def test_kernels_are_for_gpus_and_for_formats_of_16_bits() -> None:
    assert choose_kernels("auto", torch.device("cpu"), "bf16", host_keeps_up=True, has_own_parts=False) == "none"
    assert choose_kernels("none", torch.device("cuda"), "bf16", host_keeps_up=True, has_own_parts=False) == "none"
    assert choose_kernels("auto", torch.device("cuda"), "fp16", host_keeps_up=True, has_own_parts=False) == "none"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("host_keeps_up", "chosen"), [(False, "head"), (True, "auto")])
def test_a_gpu_gets_those_that_win(host_keeps_up: bool, chosen: str) -> None:
    assert (
        choose_kernels("auto", torch.device("cuda"), "bf16", host_keeps_up=host_keeps_up, has_own_parts=False) == chosen
    )


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile itself does
def test_the_compiler_looks_into_every_operation_but_those_that_it_is_told_of() -> None:
    from torch._dynamo.backends.common import aot_autograd

    met: set[str] = set()

    def list_operations(graph: GraphModule, _: list[Tensor]) -> Callable[..., object]:
        met.update(str(node.target.name()) for node in graph.graph.nodes if isinstance(node.target, OpOverload))
        return torch._functorch.aot_autograd.make_boxed_func(graph.forward)

    model = build_wild(kernels="auto")
    model.compile_parts(backend=aot_autograd(fw_compiler=list_operations))
    run(model)
    assert {name for name in met if name.startswith("gptmill::")} == {"gptmill::linear_cross_entropy"}
    assert set(OPAQUE_OPS) <= set(torch._C._dispatch_get_all_op_names())  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile itself does
@pytest.mark.parametrize("name", ["classic", "llama"])
def test_no_gradient_goes_to_a_tensor_that_a_cast_returned_as_it_was(name: str) -> None:
    """Of an autograd.Function that ends in such a cast, torch 2.11 loses the gradient: pytorch/pytorch#180642."""
    register_custom_ops()
    recorder = Recorder()
    model = build_wild(replace(COMPOSITIONS[name], num_layers=1), kernels="auto").train()
    model.compile_parts(backend=recorder)
    model(draw_tokens(2, CONTEXT), draw_tokens(2, CONTEXT, seed=3))
    assert recorder.last_operations
    assert "to" not in recorder.last_operations


def test_the_compiler_is_told_of_what_it_does_not_look_into() -> None:
    with torch.compiler.config.patch(cache_key_tag=""):
        prepare_compiler()
        assert torch.compiler.config.cache_key_tag
    assert set(OPAQUE_OPS) <= set(torch._inductor.lowering.FALLBACK_ALLOW_LIST)


def test_a_fused_model_in_autocast_hands_on_hidden_states_of_its_dtype() -> None:
    tokens = draw_tokens(2, CONTEXT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dtypes = [build_wild(kernels=kernels).hidden_states(tokens).dtype for kernels in ("none", "auto")]
    assert dtypes == [torch.float32, torch.bfloat16]


def test_evaluation_needs_no_gradient_and_gives_the_same_loss() -> None:
    tokens, targets = draw_tokens(2, CONTEXT), draw_tokens(2, CONTEXT, seed=3)
    with torch.no_grad():
        losses = [build_wild(kernels=kernels)(tokens, targets).cross_entropy for kernels in ("none", "auto")]
    torch.testing.assert_close(losses[1], losses[0])


@pytest.mark.parametrize("chunk", [None, 7])
def test_a_fused_head_matches_cross_entropy_when_its_sum_is_scaled(chunk: int | None) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(20, 8, requires_grad=True), torch.randn(33, 8, requires_grad=True)
    targets = torch.randint(33, (20,))
    targets[4] = IGNORE_INDEX
    total, losses = linear_cross_entropy(x, weight, targets, chunk)
    wanted = torch.nn.functional.cross_entropy(x @ weight.t(), targets, reduction="none")
    torch.testing.assert_close(losses, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(total * 0.3, (x, weight)), torch.autograd.grad(wanted.sum() * 0.3, (x, weight))
    )


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile itself does
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_fused_model_can_be_compiled(precision: str) -> None:
    """In bf16 the stream is narrow: its numbers are near those of the plain path, and its types are right."""
    model = build_wild(kernels="auto")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        plain = run(build_wild())
        model.compile_parts(backend="aot_eager")
        fused = run(model)
    if precision == "fp32":
        assert_alike(fused, plain)
    for name, wanted in plain.items():
        assert fused[name].dtype == wanted.dtype
        assert (fused[name] - wanted).norm() <= 0.05 * wanted.norm() + 1e-6, name


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile itself does
@pytest.mark.parametrize("how", ["none", "full"])
def test_a_compiled_model_drops_what_it_would_uncompiled(how: ActivationCheckpointing) -> None:
    model = build_wild(replace(COMPOSITIONS["classic"], num_layers=1, dropout=0.4), kernels="auto")
    model.set_activation_checkpointing(how)
    torch.manual_seed(5)
    wanted = run(model)
    model.compile_parts(backend="aot_eager")
    torch.manual_seed(5)
    assert_alike(run(model), wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize("name", ["classic", "llama"])
def test_a_gpu_computes_the_same_with_the_kernels_compiled_into_the_model(name: str) -> None:
    model = build_wild(COMPOSITIONS[name], kernels="auto").cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        wanted = run(model)
        model.compile_parts()
        found = run(model)
    for place, tensor in wanted.items():
        assert found[place].dtype == tensor.dtype
        assert (found[place] - tensor).norm() <= 0.05 * tensor.norm() + 1e-6, place


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize("device", DEVICES)
def test_dropout_compiled_into_a_norm_computes_the_same(device: str) -> None:
    """Of the same numbers: a compiler draws others than torch does."""
    torch.manual_seed(0)
    x, y, d_stream, d_normed = torch.randn(4, 8, 16, 96, device=device, dtype=torch.bfloat16)
    y_bias, norm = torch.randn(96, device=device), nn.LayerNorm(96, device=device)
    leaves = [each.requires_grad_() for each in (x, y, y_bias)]
    keep, factor = torch.rand(8, 16, 96, device=device) >= 0.4, torch.tensor(1 / 0.6, device=device)

    def compute(x: Tensor, y: Tensor, y_bias: Tensor, keep: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        total, normed = add_and_normalise(norm, PendingResidual(x, Branch(y, y_bias, keep, factor)))
        return total, normed.x_BTC

    wanted = compute(x, y, y_bias, keep, factor)
    found = torch.compile(compute, backend="inductor" if device == "cuda" else "aot_eager")(x, y, y_bias, keep, factor)
    everything = (*leaves, *norm.parameters())
    wanted += torch.autograd.grad(wanted, everything, (d_stream, d_normed))
    found += torch.autograd.grad(found, everything, (d_stream, d_normed))
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("width", [768, 1600])
@pytest.mark.parametrize(("is_rms", "dropped"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_gpu_finds_the_triton_kernels_equal_to_their_twins(width: int, is_rms: bool, dropped: bool) -> None:
    register_custom_ops()
    torch.manual_seed(0)
    x, y, d_stream, d_normed = torch.randn(4, 1000, width, device="cuda", dtype=torch.bfloat16)
    y_bias, weight, bias = torch.randn(3, width, device="cuda")
    keep, factor = torch.rand(1000, width, device="cuda") >= 0.2, torch.tensor(1.25, device="cuda")
    dropout = (keep, factor) if dropped else (None, None)
    arguments = (x, y, y_bias, *dropout, weight, None if is_rms else bias, 1e-5, is_rms, True)
    found, wanted = torch.ops.gptmill.add_norm(*arguments), add_norm_reference(*arguments)
    back = (d_stream, d_normed, wanted[0], *wanted[-2:], *dropout, weight, is_rms)
    found += torch.ops.gptmill.add_norm_backward(*back)
    wanted += add_norm_backward_reference(*back)
    hidden = (y, x, y_bias)
    found += torch.ops.gptmill.bias_gelu_backward(*hidden)
    wanted += gelu_backward_reference(*hidden)
    found += (torch.ops.gptmill.swiglu_backward(x[:, : width // 2], y),)
    wanted += (swiglu_backward_reference(x[:, : width // 2], y),)
    heads = x.view(2, 500, -1, 32).transpose(1, 2)
    angles = torch.rand(heads.shape[1], 32, device="cuda") * 6
    for turn in ((None, None, True), (angles.cos(), angles.sin(), False)):
        found += torch.ops.gptmill.pack_qkv_gradients(heads, heads.contiguous(), heads, *turn)
        wanted += pack_gradients_reference(heads, heads, heads, *turn)
    for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.dtype == other.dtype
        distance = (one.float() - other.float()).norm() / other.float().norm().clamp(min=1e-9)
        assert distance < (0.02 if one.dtype == torch.float8_e4m3fn else 2e-3), place


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("vocab_size", [50304, 50257])
@pytest.mark.parametrize("fp8", [None, "fp8"])
def test_a_gpus_head_is_near_the_twins(fp8: Fp8Format | None, vocab_size: int) -> None:
    if fp8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs fp8")
    torch.manual_seed(0)
    x, weight = torch.randn(1024, 256, requires_grad=True), (0.1 * torch.randn(50304, 256)).requires_grad_()
    with torch.no_grad():
        weight[50257:] *= 3  # padding that would matter
    targets = torch.randint(50257, (1024,))
    targets[:3] = IGNORE_INDEX
    wanted = linear_cross_entropy(x, weight, targets, None, None, vocab_size)[0] / 1024
    expected = torch.autograd.grad(wanted, (x, weight))
    own = [each.detach().cuda().requires_grad_() for each in (x, weight)]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        total = linear_cross_entropy(own[0], own[1], targets.cuda(), None, fp8, vocab_size)[0] / 1024
    torch.testing.assert_close(total.detach().cpu(), wanted.detach(), rtol=2e-3, atol=0)
    found = torch.autograd.grad(total, own)
    assert not found[1][vocab_size:].any()
    for one, other in zip(found, expected, strict=True):
        assert (one.cpu() - other).norm() / other.norm() < (0.1 if fp8 else 0.01)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, whose interpreter runs kernels on a CPU")
def test_the_interpreter_finds_the_triton_kernels_equal_to_their_twins() -> None:
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    names = (
        "accumulate add_norm bias_gelu bucket_count decode_attention dropout_mask linear_cross_entropy "
        "linear_cross_entropy_in_fp8 nan pack_qkv_gradients swiglu transpose"
    )
    assert run_script("interpreted_kernels.py") == names.split()


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which compiles without a GPU, too")
def test_every_triton_kernel_compiles() -> None:
    names = (
        "accumulate add_norm_backward add_norm_forward count_buckets cross_entropy decode_attention dropout_mask "
        "gelu_backward pack_qkv_gradients swiglu_backward transpose"
    )
    assert run_script("compiled_kernels.py") == names.split()


def run_script(name: str) -> list[str]:
    """What a script beside this one prints."""
    script = __file__.replace("test_kernels.py", name)
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.split()


def assert_alike(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    compare: Callable[..., None] = torch.testing.assert_close
    for name, tensor in wanted.items():
        compare(found[name], tensor, rtol=2e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("device", DEVICES)
def test_what_dropout_keeps_is_drawn_with_its_chance_and_anew_each_time(device: str) -> None:
    torch.manual_seed(0)
    like = torch.empty(3, 100_001, device=device)
    drawn = [dropout_mask(like, 0.2) for _ in range(2)]
    for keep in drawn:
        assert keep.dtype == torch.bool
        assert abs(keep.float().mean().item() - 0.8) < 4 * 0.4 / keep.numel() ** 0.5
    assert abs((drawn[0] == drawn[1]).float().mean().item() - 0.68) < 0.01
    torch.manual_seed(0)
    assert dropout_mask(like, 0.2).equal(drawn[0])
