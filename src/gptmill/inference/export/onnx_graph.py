"""A small builder of ONNX graphs: values are names, every method adds a node and returns the name of its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto

OPSET = 17


class OnnxGraph:
    """Nodes and weights in the order in which they were added."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.weights: dict[str, NDArray[Any]] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        """A node with one result."""
        return self.add_many(op, 1, *inputs, **attributes)[0]

    def add_many(self, op: str, count: int, *inputs: str, **attributes: Any) -> list[str]:
        """A node with several results."""
        from onnx.helper import make_node

        outputs = [f"{op.lower()}_{len(self.nodes)}_{number}" for number in range(count)]
        self.nodes.append(make_node(op, list(inputs), outputs, **attributes))
        return outputs

    def name(self, value: str, name: str) -> None:
        """Gives a value a name of its own, for an output of the graph."""
        from onnx.helper import make_node

        self.nodes.append(make_node("Identity", [value], [name]))

    def weight(self, name: str, array: NDArray[Any]) -> str:
        """A tensor of the model, under its own name."""
        self.weights[name] = np.ascontiguousarray(array)
        return name

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        """A number or a list of them; equal ones are stored once."""
        array = np.array(value, dtype=dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.weight(f"constant_{len(self._constants)}", array)
        return self._constants[key]

    def ints(self, *values: int) -> str:
        """A list of int64, as shapes and axes are."""
        return self.constant(values, np.int64)

    def index(self, value: int) -> str:
        """One int64."""
        return self.constant(value, np.int64)

    def size(self, value: str, axis: int) -> str:
        """The size of a dimension, which may depend on the inputs."""
        return self.add("Gather", self.add("Shape", value), self.index(axis))

    def linear(self, x: str, weight: str, bias: str | None = None) -> str:
        """x times the transpose of a matrix, as nn.Linear has it."""
        y = self.add("MatMul", x, self.add("Transpose", weight, perm=[1, 0]))
        return y if bias is None else self.add("Add", y, bias)

    def finish(
        self, inputs: list[ValueInfoProto], outputs: list[ValueInfoProto], tensors: list[TensorProto]
    ) -> GraphProto:
        """The graph; `tensors` are the weights, in the file or beside it."""
        from onnx.helper import make_graph

        return make_graph(self.nodes, "gpt", inputs, outputs, initializer=tensors)
