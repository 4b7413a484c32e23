"""The embeddings of a decode step: token and position, added in fp32.

Shape suffixes: B sequences, S positions, V vocabulary, C channels.
"""

from __future__ import annotations

from torch import Tensor


def embed_tokens(
    tokens_B: Tensor, positions_B: Tensor, table_VC: Tensor, position_table_SC: Tensor | None, result_BC: Tensor
) -> None:
    """Writes the tokens' embeddings into `result_BC`."""
    if tokens_B.device.type != "cuda":
        x_BC = table_VC[tokens_B].float()
        result_BC.copy_(x_BC if position_table_SC is None else x_BC + position_table_SC[positions_B].float())
        return
    from gptmill.models.kernels.decode_embedding_triton import run_embed

    run_embed(tokens_B, positions_B, table_VC, position_table_SC, result_BC)
