"""What a model is, apart from its weights: one frozen configuration for every family."""

from __future__ import annotations

from dataclasses import dataclass

from kvdrive_jax.models.rope import RopeConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and settings of one decoder-only transformer.

    Attributes:
        architecture: the family, a key of `weights.FAMILIES`; it names the checkpoint's tensors.
        vocab_size: V, rows of the embedding.
        hidden_size: E.
        intermediate_size: F, width of the feed-forward network.
        num_layers: L.
        num_heads: H, query heads.
        num_kv_heads: K, kv heads; H is a multiple of K.
        head_dim: D; need not be E / H.
        rms_norm_eps: added to the mean square in every norm.
        max_positions: longest context the model may be used for, in tokens.
        rope: position encoding.
        attention_bias: bias on q, k and v.
        output_bias: bias on the attention's output projection.
        mlp_bias: bias on the feed-forward projections.
        qk_norm: RMS norm of each query and key head before RoPE.
        tied_embeddings: the head is the embedding. A checkpoint's tensors overrule what its
        configuration says.
        eos_token_ids: tokens that end a generation.
        bos_token_id: token that starts a sequence, if the model has one.

    Raises:
        ValueError: sizes that are not positive, or heads that do not divide.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    rope: RopeConfig
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_positions",
        ):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}: expected a positive integer, got {value}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads: expected a multiple of num_kv_heads ({self.num_kv_heads}), "
                f"got {self.num_heads}"
            )
        if self.rope.rotary_dim > self.head_dim:
            raise ValueError(
                f"rotary_dim: expected at most head_dim ({self.head_dim}), "
                f"got {self.rope.rotary_dim}"
            )

    @property
    def group_size(self) -> int:
        """G, query heads per kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_width(self) -> int:
        """(H + 2K) D, columns of the fused projection: queries, then keys, then values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by before softmax, D ** -0.5."""
        return float(self.head_dim) ** -0.5
