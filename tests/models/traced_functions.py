"""What torch.compile traces of autograd functions; for the tests beside."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.fx import GraphModule


class Recorder:
    """A backend that runs graphs as they are, and keeps the operations that give the results of their functions."""

    def __init__(self) -> None:
        self.last_operations: list[object] = []

    def __call__(self, graph: GraphModule, _: list[Tensor]) -> Callable[..., object]:
        for name, function in graph.named_children():
            if name.startswith("fwd") and isinstance(function, GraphModule):
                (output,) = function.graph.find_nodes(op="output")
                only_used_there = (node for node in output.all_input_nodes if len(node.users) == 1)
                self.last_operations.extend(node.target for node in only_used_there)
        return graph.forward
