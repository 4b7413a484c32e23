"""Large matmuls of compiled models in their fastest way: a pass over the graphs that torch.compile makes of them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from gptmill.models.kernels import gemm as matmuls
from gptmill.models.kernels.cublaslt import Numbers
from gptmill.models.kernels.custom_ops import define_opaque_op
from gptmill.models.kernels.gemm import LEAST_OPERATIONS, WIDE

aten = torch.ops.aten


def _multiply(
    a: Tensor, b: Tensor, bias: Tensor | None, scale_a: Tensor | None, scale_b: Tensor | None, fast: bool
) -> Tensor:
    return matmuls.multiply(a, b, bias, scale_a, scale_b, use_fast_accum=fast)


def _make_empty(a: Tensor, b: Tensor, _bias: Any, scale_a: Tensor | None, *_: Any) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=a.dtype if scale_a is None else torch.bfloat16)


define_opaque_op(
    "multiply(Tensor a, Tensor b, Tensor? bias, Tensor? scale_a, Tensor? scale_b, bool fast) -> Tensor",
    _multiply,
    _make_empty,
)
define_opaque_op(
    "multiply_wide(Tensor a, Tensor b) -> Tensor",
    matmuls.gemm_fp32,
    lambda a, b: a.new_empty((a.shape[0], b.shape[1]), dtype=torch.float32),
)


def build_gemm_pass(least_operations: float = LEAST_OPERATIONS) -> Any:
    """For torch.compile's option post_grad_custom_post_pass."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class UseFastestMatmuls(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            replace_gemms(graph, least_operations)

        def uuid(self) -> Any:
            """Whose graphs torch.compile may find again: those of this code."""
            return get_hash_for_files((__file__,), str(least_operations))

    return UseFastestMatmuls()


def replace_gemms(graph: Graph, least_operations: float) -> None:
    """Puts ours in the place of torch's, where they are large enough."""
    for node in list(graph.nodes):
        numbers = read_matmul(node)
        if numbers is None or not is_worth_it(node, numbers, least_operations):
            continue
        cast = find_cast(node) if numbers.bias is None and numbers.scale_a is None else None
        with graph.inserting_before(node):
            if cast is None:
                ours = graph.call_function(torch.ops.gptmill.multiply.default, (*numbers[:5], use_fast_accum(node)))
            else:
                ours = graph.call_function(torch.ops.gptmill.gemm_fp32.default, numbers[:2])
        replaced = [node] if cast is None else [cast, node]
        ours.meta.update(replaced[0].meta)
        replaced[0].replace_all_uses_with(ours)
        for each in replaced:
            graph.erase_node(each)


def find_cast(node: Node) -> Node | None:
    """That to fp32 which is all that is done with a product before it leaves the graph, as a weight's gradient does."""
    user = next(iter(node.users), None)
    if user is None or len(node.users) > 1 or user.target != torch.ops.prims.convert_element_type.default:
        return None
    return user if user.args[1] == torch.float32 and all(each.op == "output" for each in user.users) else None


def read_matmul(node: Node) -> Any:
    """What a node multiplies, as nodes; None for one that does something else, or more."""
    arguments = node.args
    if node.target == aten.mm.default and not node.kwargs:
        return Numbers(*arguments)  # type: ignore[arg-type]
    if node.target == aten.addmm.default and not node.kwargs:
        is_row = len(read_value(arguments[0]).shape) == 1
        return Numbers(arguments[1], arguments[2], arguments[0]) if is_row else None  # type: ignore[arg-type]
    if node.target == aten._scaled_mm.default and not node.kwargs:
        a, b, scale_a, scale_b, bias, scale_result, *_ = (*arguments, None, None)
        is_plain = scale_result is None and all(read_value(scale).numel() == 1 for scale in (scale_a, scale_b))
        return Numbers(a, b, bias, scale_a, scale_b) if is_plain else None  # type: ignore[arg-type]
    return None


def use_fast_accum(node: Node) -> bool:
    return node.target == aten._scaled_mm.default and len(node.args) > 7 and bool(node.args[7])


def is_worth_it(node: Node, numbers: Numbers, least_operations: float) -> bool:
    left, right, result = (read_value(part) for part in (numbers.a, numbers.b, node))
    if numbers.scale_a is None:
        is_known = left.dtype == right.dtype and left.dtype in WIDE
    else:
        is_known = result.dtype == torch.bfloat16
    sizes = (*left.shape, right.shape[1])
    if not all(isinstance(size, int) for size in sizes):
        return is_known  # of a shape that is not known yet, ours looks itself
    return is_known and 2.0 * math.prod(sizes) >= least_operations


def read_value(node: Any) -> Tensor:
    """The tensor, without its numbers, that a node stands for."""
    value: Tensor = node.meta["val"]
    return value
