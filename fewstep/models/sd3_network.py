"""Size of a Stable Diffusion 3 network, in diffusers' own words."""

from __future__ import annotations

from typing import Annotated, Any, Literal, final

from pydantic import Field, model_validator

from fewstep.settings import Settings

Positive = Annotated[int, Field(gt=0)]
NETWORK_CLASS = "SD3Transformer2DModel"


def network_class() -> Any:
    """Diffusers' class. It takes seconds to import, and recipes are checked without it."""
    from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel

    return SD3Transformer2DModel


@final
class SD3Network(Settings):
    """Size of a network, in the words of diffusers' `SD3Transformer2DModel`."""

    sample_size: Positive = Field(64, description="height and width that positions are scaled to")
    patch_size: Positive = Field(2, description="side of a token's patch")
    in_channels: Positive = Field(16, description="channels of a sample")
    num_layers: Positive = Field(4, description="transformer blocks")
    attention_head_dim: Positive = Field(64, description="width of each head")
    num_attention_heads: Positive = Field(4, description="heads of each block")
    joint_attention_dim: Positive = Field(4096, description="width of what prompts are encoded to")
    caption_projection_dim: Positive = Field(
        256, description="width of the text in the network: all heads together"
    )
    pooled_projection_dim: Positive = Field(2048, description="width of a prompt's pooled encoding")
    pos_embed_max_size: Positive = Field(96, description="most tokens along a side of a sample")
    dual_attention_layers: tuple[int, ...] = Field(
        (), description="blocks with a second attention, over the image alone (3.5 Medium)"
    )
    qk_norm: Literal["rms_norm"] | None = Field(
        None, description="how queries and keys are normalized: rms_norm (3.5) or not (3)"
    )

    @model_validator(mode="after")
    def _check(self) -> SD3Network:
        width = self.num_attention_heads * self.attention_head_dim
        if self.caption_projection_dim != width:
            raise ValueError(
                f"caption_projection_dim ({self.caption_projection_dim}) must be "
                f"num_attention_heads times attention_head_dim ({width}): text and image attend "
                f"to each other"
            )
        wrong = [i for i in self.dual_attention_layers if not 0 <= i < self.num_layers]
        if wrong:
            raise ValueError(
                f"dual_attention_layers: there is no block {wrong[0]} of {self.num_layers}"
            )
        self.check_size(self.sample_size, "sample_size")
        return self

    def check_size(self, size: int, what: str) -> None:
        """Raise ValueError unless samples of this height and width can be cut into tokens."""
        if size % self.patch_size != 0:
            raise ValueError(
                f"{what} ({size}) must be a multiple of patch_size ({self.patch_size}): a sample "
                f"is cut into whole patches"
            )
        most = self.pos_embed_max_size * self.patch_size
        if size > most:
            raise ValueError(
                f"{what} ({size}) is more than pos_embed_max_size times patch_size ({most}): "
                f"there are no positions for it"
            )
