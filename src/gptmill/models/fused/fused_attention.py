"""Attention whose QKV projection, RoPE and their gradients use the kernels.

Shape suffixes: B batch, T sequence, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from torch import Tensor, nn

from gptmill.config.model import SoftmaxAttention
from gptmill.models.attention import Attention, BlockContext
from gptmill.models.fused.fp8_layers import Fp8Linear, apply_layer, find_fp8_input, wants_fp8_input
from gptmill.models.fused.pending_residual import Branch, Normed, apply_without_bias, to_autocast_dtype
from gptmill.models.kernels.qkv_projection import project_qkv
from gptmill.models.kv_cache import LayerKVCache
from gptmill.models.rotary import CosSin, apply_rope


class FusedAttention(Attention):
    """The same parameters; a norm's result in, a pending branch out."""

    @property
    def wants_fp8_input(self) -> bool:
        return wants_fp8_input(self.qkv)

    def forward(  # type: ignore[override]
        self, normed: Normed, context: BlockContext, cache: LayerKVCache | None = None
    ) -> Branch:
        y_BTE = self.attend(*self._project(normed, context.rope), context, cache)
        return apply_without_bias(self.proj, y_BTE)

    def _project(self, normed: Normed, rope: CosSin | None) -> tuple[Tensor, Tensor, Tensor]:
        # The kernel rotates, but knows no QK-norm, which comes before.
        kernel_rope = rope if self.query_norm is None else None
        if not self._suits_kernel(kernel_rope):
            q_BTHD, k_BTKD, v_BTKD = self.split_heads(apply_layer(self.qkv, *normed))
            kernel_rope = None
        else:
            x_BTC = to_autocast_dtype(normed.x_BTC)
            x_fp8 = find_fp8_input(self.qkv, x_BTC.flatten(0, 1), normed.x_fp8)
            q_BTHD, k_BTKD, v_BTKD = project_qkv(
                x_BTC, self.qkv.weight, self.qkv.bias, x_fp8, self.num_heads, kernel_rope
            )
        q_BTHD, k_BTKD = self.normalise_heads(q_BTHD, k_BTKD)
        if rope is not None and kernel_rope is None:
            q_BTHD, k_BTKD = apply_rope(q_BTHD, rope), apply_rope(k_BTKD, rope)
        return q_BTHD, k_BTKD, v_BTKD

    def _suits_kernel(self, kernel_rope: CosSin | None) -> bool:
        """Whether the kernel has something to fuse, and can: heads of equal number, and no fp8 in the gradients."""
        is_full_fp8 = isinstance(self.qkv, Fp8Linear) and not self.wants_fp8_input
        if kernel_rope is not None and kernel_rope[0].dim() != 2:
            return False  # each text of the batch has positions of its own
        has_work = self.qkv.bias is not None or kernel_rope is not None
        return self.kv_heads == self.num_heads and has_work and not is_full_fp8


FUSED_ATTENTIONS: dict[type, type[nn.Module]] = {SoftmaxAttention: FusedAttention}
"""The fused modules by variant; those of plug-ins have none."""
