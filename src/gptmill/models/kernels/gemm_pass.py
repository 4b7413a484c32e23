"""An Inductor pass that makes compiled models use the tuned GEMMs of `gemm.py`.

torch.compile traces a model into ATen graphs, one forward and one backward, and Inductor turns them into kernels. GEMMs
stay calls of the library, with the algorithm that its heuristic ranks first. Inductor runs a
`post_grad_custom_post_pass` over each graph after autograd, decompositions and its own rewrites, just before it
generates code: there every GEMM of the model and of its gradients is one node, aten.mm, aten.addmm or aten._scaled_mm
(fp8), and the pass replaces those that are large enough:

    aten.mm, aten.addmm with a bias vector, aten._scaled_mm with a scale per tensor
        ->  gptmill.gemm(a, b, bias, scale_a, scale_b, fast)
    aten.mm whose only use is a cast to fp32 that leaves the graph
        ->  gptmill.gemm_fp32(a, b)

The second form is that of a weight's gradient under autocast. It stores the fp32 sums themselves, which saves a pass
that reads 2 and writes 4 bytes per element and a rounding to bf16.

Both ops are opaque (`custom_ops.py`): the compiler calls them and does not look inside, which suits a choice that is
made at run time. Sizes are compared at compile time where they are known, and otherwise by the op itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from gptmill.models.kernels.cublaslt import Operands
from gptmill.models.kernels.custom_ops import define_opaque_op
from gptmill.models.kernels.gemm import HALF_PRECISION, MIN_FLOPS, gemm, gemm_fp32

aten = torch.ops.aten


def _gemm(
    a: Tensor, b: Tensor, bias: Tensor | None, scale_a: Tensor | None, scale_b: Tensor | None, fast: bool
) -> Tensor:
    return gemm(a, b, bias, scale_a, scale_b, use_fast_accum=fast)


def _make_fake(a: Tensor, b: Tensor, _bias: Any, scale_a: Tensor | None, *_: Any) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=a.dtype if scale_a is None else torch.bfloat16)


define_opaque_op(
    "gemm(Tensor a, Tensor b, Tensor? bias, Tensor? scale_a, Tensor? scale_b, bool fast) -> Tensor",
    _gemm,
    _make_fake,
)
define_opaque_op(
    "gemm_fp32(Tensor a, Tensor b) -> Tensor",
    gemm_fp32,
    lambda a, b: a.new_empty((a.shape[0], b.shape[1]), dtype=torch.float32),
)


def build_gemm_pass(min_flops: float = MIN_FLOPS) -> Any:
    """The pass, for torch.compile's option post_grad_custom_post_pass."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class ReplaceGemms(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            replace_gemms(graph, min_flops)

        def uuid(self) -> Any:
            """Part of the key of Inductor's cache: a compiled graph is reused only by the same pass."""
            return get_hash_for_files((__file__,), str(min_flops))

    return ReplaceGemms()


def replace_gemms(graph: Graph, min_flops: float) -> None:
    """Replaces torch's GEMMs by ours where they are large enough."""
    for node in list(graph.nodes):
        operands = read_operands(node)
        if operands is None or not should_replace(node, operands, min_flops):
            continue
        cast = find_cast(node) if operands.bias is None and operands.scale_a is None else None
        with graph.inserting_before(node):
            if cast is None:
                ours = graph.call_function(torch.ops.gptmill.gemm.default, (*operands[:5], use_fast_accum(node)))
            else:
                ours = graph.call_function(torch.ops.gptmill.gemm_fp32.default, operands[:2])
        replaced = [node] if cast is None else [cast, node]
        ours.meta.update(replaced[0].meta)
        replaced[0].replace_all_uses_with(ours)
        for each in replaced:
            graph.erase_node(each)


def find_cast(node: Node) -> Node | None:
    """The cast to fp32, if it is all that happens to a product before it leaves the graph."""
    user = next(iter(node.users), None)
    if user is None or len(node.users) > 1 or user.target != torch.ops.prims.convert_element_type.default:
        return None
    return user if user.args[1] == torch.float32 and all(each.op == "output" for each in user.users) else None


def read_operands(node: Node) -> Any:
    """The operands of a GEMM, as nodes; None for a node that does something else, or more."""
    arguments = node.args
    if node.target == aten.mm.default and not node.kwargs:
        return Operands(*arguments)  # type: ignore[arg-type]
    if node.target == aten.addmm.default and not node.kwargs:
        is_row = len(read_value(arguments[0]).shape) == 1
        return Operands(arguments[1], arguments[2], arguments[0]) if is_row else None  # type: ignore[arg-type]
    if node.target == aten._scaled_mm.default and not node.kwargs:
        a, b, scale_a, scale_b, bias, scale_result, *_ = (*arguments, None, None)
        is_supported = scale_result is None and all(read_value(scale).numel() == 1 for scale in (scale_a, scale_b))
        return Operands(a, b, bias, scale_a, scale_b) if is_supported else None  # type: ignore[arg-type]
    return None


def use_fast_accum(node: Node) -> bool:
    return node.target == aten._scaled_mm.default and len(node.args) > 7 and bool(node.args[7])


def should_replace(node: Node, operands: Operands, min_flops: float) -> bool:
    left, right, result = (read_value(part) for part in (operands.a, operands.b, node))
    if operands.scale_a is None:
        is_supported = left.dtype == right.dtype and left.dtype in HALF_PRECISION
    else:
        is_supported = result.dtype == torch.bfloat16
    sizes = (*left.shape, right.shape[1])
    if not all(isinstance(size, int) for size in sizes):
        return is_supported  # a dynamic shape: the op itself compares it
    return is_supported and 2.0 * math.prod(sizes) >= min_flops


def read_value(node: Any) -> Tensor:
    """The fake tensor of a node: shape and dtype without data."""
    value: Tensor = node.meta["val"]
    return value
