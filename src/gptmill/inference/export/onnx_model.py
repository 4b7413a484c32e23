"""GPT as an ONNX graph, in every composition: token ids and past keys and values in, logits and all of them out.

It computes what models/gpt.py computes, part by part under the same names. Experts are all computed and weighted, since
an ONNX graph has no dispatch.

Shape suffixes: B batch, T sequence, P past, S = P + T, C channels, H query heads, K key/value heads, D head dimension,
E experts, F hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from gptmill.config.model import Gelu, LayerNorm, LearnedPositions, ModelConfig, Moe, Relu2, Rope
from gptmill.inference.export.onnx_graph import OnnxGraph
from gptmill.models.attention import find_value_table
from gptmill.models.rotary import make_rope

INPUT, LOGITS = "input_ids", "logits"
MASKED = -1e9


def list_caches(config: ModelConfig, kind: str) -> list[str]:
    """The names of all past or present keys and values."""
    return [f"{kind}.{layer}.{part}" for layer in range(config.num_layers) for part in ("key", "value")]


class OnnxModel:
    """Adds a model's parts to a graph."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], vocab_size: int) -> None:
        self.config = config
        self.graph = OnnxGraph()
        self._weights = weights
        self._vocab_size = vocab_size

    def build(self) -> OnnxGraph:
        """The whole graph."""
        graph, config = self.graph, self.config
        past_P = graph.size(list_caches(config, "past")[0], 2)
        total_S = graph.add("Add", past_P, graph.size(INPUT, 1))
        self.positions_T = graph.add("Range", past_P, total_S, graph.index(1))
        self.positions_S = graph.add("Range", graph.index(0), total_S, graph.index(1))
        x_BTC = graph.add("Gather", self._add("token_embedding.weight", rows=self._vocab_size), INPUT)
        if isinstance(config.positions, LearnedPositions):
            table = self._add("position_embedding.weight")
            x_BTC = graph.add("Add", x_BTC, graph.add("Gather", table, self.positions_T))
        rope = self._make_rope()
        masks = {window: self._make_mask(window) for window in dict.fromkeys(config.list_windows())}
        for layer, window in enumerate(config.list_windows()):
            block = f"blocks.{layer}."
            attended = self._attend(self._normalise(x_BTC, f"{block}attention_norm"), layer, rope, masks[window])
            x_BTC = graph.add("Add", x_BTC, attended)
            x_BTC = graph.add("Add", x_BTC, self._feed_forward(self._normalise(x_BTC, f"{block}mlp_norm"), block))
        head = "token_embedding.weight" if config.tied_head else self._add("head.weight", rows=self._vocab_size)
        logits_BTV = graph.linear(self._normalise(x_BTC, "final_norm"), head)
        if (cap := config.logit_softcap) is not None:
            bounded = graph.add("Tanh", graph.add("Div", logits_BTV, graph.constant(cap)))
            logits_BTV = graph.add("Mul", bounded, graph.constant(cap))
        graph.name(logits_BTV, LOGITS)
        return graph

    def _add(self, name: str, rows: int | None = None) -> str:
        return self.graph.weight(name, self._weights[name][:rows].float().numpy())

    def _add_linear(self, x: str, name: str) -> str:
        bias = self._add(f"{name}.bias") if f"{name}.bias" in self._weights else None
        return self.graph.linear(x, self._add(f"{name}.weight"), bias)

    def _normalise(self, x: str, name: str) -> str:
        if not isinstance(self.config.norm, LayerNorm):
            return self._rms_norm(x, name)
        bias = [self._add(f"{name}.bias")] if f"{name}.bias" in self._weights else []
        weight = self._add(f"{name}.weight")
        return self.graph.add("LayerNormalization", x, weight, *bias, axis=-1, epsilon=self.config.norm_eps)

    def _rms_norm(self, x: str, name: str) -> str:
        graph = self.graph
        square = graph.add("ReduceMean", graph.add("Mul", x, x), axes=[-1], keepdims=1)
        root = graph.add("Sqrt", graph.add("Add", square, graph.constant(self.config.norm_eps)))
        return graph.add("Mul", graph.add("Div", x, root), self._add(f"{name}.weight"))

    def _make_rope(self) -> tuple[str, str] | None:
        """The cosines and sines of the tokens' positions, from tables of the whole context; as (T, 1, D)."""
        tables = make_rope(torch.arange(self.config.context_length), self.config)
        if not isinstance(self.config.positions, Rope) or tables is None:
            return None
        cos, sin = (
            self.graph.add("Gather", self.graph.weight(f"rope.{kind}", table.unsqueeze(1).numpy()), self.positions_T)
            for kind, table in zip(("cos", "sin"), tables, strict=True)
        )
        return cos, sin

    def _apply_rope(self, x_BTHD: str, rope: tuple[str, str]) -> str:
        graph = self.graph
        first, second = graph.add_many("Split", 2, x_BTHD, axis=-1)
        rotated = graph.add("Concat", graph.add("Neg", second), first, axis=-1)
        return graph.add("Add", graph.add("Mul", x_BTHD, rope[0]), graph.add("Mul", rotated, rope[1]))

    def _make_mask(self, window: int | None) -> str:
        """What is added to the scores: 0 where a query sees a key, a large negative number elsewhere; (T, S)."""
        graph = self.graph
        query = graph.add("Unsqueeze", self.positions_T, graph.ints(1))
        distance_TS = graph.add("Sub", query, self.positions_S)
        is_hidden = graph.add("Less", distance_TS, graph.index(0))
        if window is not None:
            is_hidden = graph.add("Or", is_hidden, graph.add("GreaterOrEqual", distance_TS, graph.index(window)))
        return graph.add("Where", is_hidden, graph.constant(MASKED), graph.constant(0.0))

    def _attend(self, x_BTC: str, layer: int, rope: tuple[str, str] | None, mask_TS: str) -> str:
        graph, config, name = self.graph, self.config, f"blocks.{layer}.attention"
        heads, kv_heads, width = config.num_heads, config.kv_heads, config.head_width
        packed = graph.add("Reshape", self._add_linear(x_BTC, f"{name}.qkv"), graph.ints(0, 0, -1, width))
        q, k, v = graph.add_many("Split", 3, packed, graph.ints(heads, kv_heads, kv_heads), axis=2)
        if config.qk_norm:
            q, k = self._rms_norm(q, f"{name}.query_norm"), self._rms_norm(k, f"{name}.key_norm")
        if rope is not None:
            q, k = self._apply_rope(q, rope), self._apply_rope(k, rope)
        if find_value_table(config, layer) is not None:
            v = graph.add("Add", v, self._embed_values(layer))
        q, k, v = (graph.add("Transpose", part, perm=[0, 2, 1, 3]) for part in (q, k, v))
        k = graph.add("Concat", f"past.{layer}.key", k, axis=2)
        v = graph.add("Concat", f"past.{layer}.value", v, axis=2)
        graph.name(k, f"present.{layer}.key")
        graph.name(v, f"present.{layer}.value")
        if kv_heads != heads:  # query heads in groups, each with its key/value head: (B, K, H / K, T, D)
            q = graph.add("Reshape", q, graph.ints(0, kv_heads, heads // kv_heads, -1, width))
            k, v = (graph.add("Unsqueeze", part, graph.ints(2)) for part in (k, v))
        last = [0, 1, 2, 4, 3] if kv_heads != heads else [0, 1, 3, 2]
        scores = graph.add("MatMul", q, graph.add("Transpose", k, perm=last))
        scores = graph.add("Mul", scores, graph.constant(width**-0.5))
        shares = graph.add("Softmax", graph.add("Add", scores, mask_TS), axis=-1)
        y = graph.add("MatMul", shares, v)
        if kv_heads != heads:
            y = graph.add("Reshape", y, graph.ints(0, heads, -1, width))
        y_BTHD = graph.add("Transpose", y, perm=[0, 2, 1, 3])
        return self._add_linear(graph.add("Reshape", y_BTHD, graph.ints(0, 0, heads * width)), f"{name}.proj")

    def _embed_values(self, layer: int) -> str:
        graph, config = self.graph, self.config
        table = self._add(f"value_embeddings.{find_value_table(config, layer)}.weight", rows=self._vocab_size)
        values = graph.add("Reshape", graph.add("Gather", table, INPUT), graph.ints(0, 0, -1, config.head_width))
        gate = graph.add("Unsqueeze", self._add(f"blocks.{layer}.attention.value_gate"), graph.ints(1))
        return graph.add("Mul", values, gate)

    def _feed_forward(self, x: str, block: str) -> str:
        graph, kind = self.graph, self.config.feed_forward
        if isinstance(kind, Moe):
            return self._mix_experts(x, block, kind)
        if isinstance(kind, Gelu | Relu2):
            up = self._add_linear(x, f"{block}mlp.up")
            activated = self._gelu(up) if isinstance(kind, Gelu) else self._square(graph.add("Relu", up))
            return self._add_linear(activated, f"{block}mlp.proj")
        gate, up = graph.add_many("Split", 2, self._add_linear(x, f"{block}mlp.gate_up"), axis=-1)
        return self._add_linear(graph.add("Mul", self._silu(gate), up), f"{block}mlp.proj")

    def _mix_experts(self, x_BTC: str, block: str, moe: Moe) -> str:
        graph = self.graph
        routed = graph.linear(x_BTC, self._add(f"{block}mlp.router.weight"))
        probabilities_BTE = graph.add("Softmax", routed, axis=-1)
        top, experts = graph.add_many("TopK", 2, probabilities_BTE, graph.ints(moe.experts_per_token), axis=-1)
        shares = graph.add("Div", top, graph.add("ReduceSum", top, graph.ints(-1), keepdims=1))
        zeros = graph.add("Mul", probabilities_BTE, graph.constant(0.0))
        weights_BTE = graph.add("ScatterElements", zeros, experts, shares, axis=-1)
        x_B1TC = graph.add("Unsqueeze", x_BTC, graph.ints(1))
        gate_up, down = self._add(f"{block}mlp.gate_up"), self._add(f"{block}mlp.down_proj")
        both_BETF = graph.add("MatMul", x_B1TC, graph.add("Transpose", gate_up, perm=[0, 2, 1]))
        gate, up = graph.add_many("Split", 2, both_BETF, axis=-1)
        hidden = graph.add("Mul", self._silu(gate), up)
        y_BETC = graph.add("MatMul", hidden, graph.add("Transpose", down, perm=[0, 2, 1]))
        weights_BET = graph.add("Transpose", weights_BTE, perm=[0, 2, 1])
        weighted = graph.add("Mul", y_BETC, graph.add("Unsqueeze", weights_BET, graph.ints(3)))
        return graph.add("ReduceSum", weighted, graph.ints(1), keepdims=0)

    def _square(self, x: str) -> str:
        return self.graph.add("Mul", x, x)

    def _silu(self, x: str) -> str:
        return self.graph.add("Mul", x, self.graph.add("Sigmoid", x))

    def _gelu(self, x: str) -> str:
        """The tanh approximation."""
        graph = self.graph
        cube = graph.add("Mul", graph.add("Mul", self._square(x), x), graph.constant(0.044715))
        inner = graph.add("Mul", graph.add("Add", x, cube), graph.constant(float(np.sqrt(2 / np.pi))))
        outer = graph.add("Add", graph.add("Tanh", inner), graph.constant(1.0))
        return graph.add("Mul", graph.add("Mul", x, graph.constant(0.5)), outer)
