"""An adapter of Stable Diffusion 3 in the layout of Kohya's sd-scripts.

Those name the modules as the original network does, in which queries, keys and values come from
one matrix. diffusers has three, and calls everything else by other names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers
from safetensors.torch import load_file, save_file
from torch import Tensor

from fewstep.errors import UserError
from fewstep.export_lora import LORA_FILE, PREFIX
from fewstep.models.model import empty_network
from fewstep.models.sd3 import SD3

# diffusers, told no name, reads the file whose name ends as its own does: this must not.
KOHYA_FILE = "kohya_lora_weights.safetensors"
KOHYA_PREFIX = "lora_unet_"
# Of the largest change of a weight: what rounding may make of it.
TOLERANCE = 1e-4

# Modules of the original network, and those of diffusers' that hold their rows, in this order.
_OUTSIDE = {
    "x_embedder.proj": ("pos_embed.proj",),
    "t_embedder.mlp.0": ("time_text_embed.timestep_embedder.linear_1",),
    "t_embedder.mlp.2": ("time_text_embed.timestep_embedder.linear_2",),
    "y_embedder.mlp.0": ("time_text_embed.text_embedder.linear_1",),
    "y_embedder.mlp.2": ("time_text_embed.text_embedder.linear_2",),
    "context_embedder": ("context_embedder",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
    "final_layer.linear": ("proj_out",),
}
_IN_BLOCK = {
    "x_block.attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "x_block.attn.ln_q": ("attn.norm_q",),
    "x_block.attn.ln_k": ("attn.norm_k",),
    "x_block.attn.proj": ("attn.to_out.0",),
    "x_block.attn2.qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
    "x_block.attn2.ln_q": ("attn2.norm_q",),
    "x_block.attn2.ln_k": ("attn2.norm_k",),
    "x_block.attn2.proj": ("attn2.to_out.0",),
    "x_block.mlp.fc1": ("ff.net.0.proj",),
    "x_block.mlp.fc2": ("ff.net.2",),
    "x_block.adaLN_modulation.1": ("norm1.linear",),
    "context_block.attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "context_block.attn.ln_q": ("attn.norm_added_q",),
    "context_block.attn.ln_k": ("attn.norm_added_k",),
    "context_block.attn.proj": ("attn.to_add_out",),
    "context_block.mlp.fc1": ("ff_context.net.0.proj",),
    "context_block.mlp.fc2": ("ff_context.net.2",),
    "context_block.adaLN_modulation.1": ("norm1_context.linear",),
}


def original_modules(blocks: int) -> dict[str, tuple[str, ...]]:
    """All that a network of so many blocks may have: original name -> diffusers' names."""
    return _OUTSIDE | {
        f"joint_blocks.{block}.{name}": tuple(f"transformer_blocks.{block}.{n}" for n in names)
        for block in range(blocks)
        for name, names in _IN_BLOCK.items()
    }


def in_original_order(module: str, rows: Tensor, blocks: int) -> Tensor:
    """Rows of a module as the original network has them; diffusers has some halves swapped.

    Args:
        module: its original name.
        rows: [2 * N, ...] of a module with scale and shift, else any number.
        blocks: of the network. The last ends the text's part as the final layer ends the image's.
    """
    swapped = (
        "final_layer.adaLN_modulation.1",
        f"joint_blocks.{blocks - 1}.context_block.adaLN_modulation.1",
    )
    return torch.cat(rows.chunk(2)[::-1]) if module in swapped else rows


def kohya_tensors(adapter: Mapping[str, Tensor], blocks: int) -> dict[str, Tensor]:
    """An adapter by diffusers' names as one by those of the original network.

    Args:
        adapter: `MODULE.lora_A.weight` [r, in, ...] and `MODULE.lora_B.weight` [out, r, ...]; what
            they add to a weight is B A.
        blocks: of the network.

    Returns:
        `NAME.lora_down.weight`, `NAME.lora_up.weight` and `NAME.alpha`, which is the rank. Queries,
        keys and values have rank 3 r together, [3 r, in] and a block diagonal [3 out, 3 r]: zero
        where one of them is not adapted.

    Raises:
        UserError: where a module is adapted that the original network does not have.
    """
    modules = original_modules(blocks)
    placed = {name for names in modules.values() for name in names}
    unknown = {key.split(".lora_")[0] for key in adapter} - placed
    if unknown:
        raise UserError(f"export: Kohya's layout has no place for {', '.join(sorted(unknown))}")
    tensors = {}
    for module, names in modules.items():
        if adapted := [name for name in names if f"{name}.lora_A.weight" in adapter]:
            downs, ups = (_parts(adapter, names, adapted[0], kind) for kind in "AB")
            # A convolution's has four dimensions, and is never one of several.
            up = torch.block_diag(*ups) if len(ups) > 1 else ups[0]  # type: ignore[no-untyped-call]
            name, down = kohya_name(module), torch.cat(downs)
            tensors[f"{name}.lora_down.weight"] = down
            tensors[f"{name}.lora_up.weight"] = in_original_order(module, up, blocks)
            tensors[f"{name}.alpha"] = torch.tensor(float(len(down)))
    return tensors


def _parts(
    adapter: Mapping[str, Tensor], names: Sequence[str], adapted: str, kind: str
) -> list[Tensor]:
    """A matrix of each module: zero, and as large as that of an adapted one, where it has none."""
    zero = torch.zeros_like(adapter[f"{adapted}.lora_{kind}.weight"])
    return [adapter.get(f"{name}.lora_{kind}.weight", zero) for name in names]


def kohya_name(module: str) -> str:
    """What Kohya's scripts call an adapted module of the original network."""
    return KOHYA_PREFIX + module.replace(".", "_")


def export_kohya(directory: Path, blocks: int) -> Path:
    """Write an adapter that `export_lora` has written once more, for Kohya's scripts.

    Raises:
        UserError: see `kohya_tensors`.
    """
    tensors = kohya_tensors(_written(directory), blocks)
    save_file(tensors, directory / KOHYA_FILE, metadata={"format": "pt"})
    return directory / KOHYA_FILE


def _written(directory: Path) -> dict[str, Tensor]:
    """What `export_lora` wrote, without the pipeline's name for the network."""
    tensors = load_file(directory / LORA_FILE)
    return {key.removeprefix(PREFIX): value for key, value in tensors.items()}


def check_kohya(model: SD3, directory: Path) -> None:
    """Check that both files of an adapter change a network in the same way.

    This one is read as Kohya's scripts and ComfyUI read it, on the weights of the original
    network; diffusers' own conversion of such weights says which of its own they are.

    Raises:
        UserError: where a tensor belongs to no weight, an adapted weight has none, or the changes
            differ.
    """
    shapes = {k: v.to("meta") for k, v in empty_network(model.build_network).state_dict().items()}
    original = _original_weights(shapes, model.config.num_layers)
    tensors, adapter = load_file(directory / KOHYA_FILE), _written(directory)
    read: set[str] = set()
    for key in [key for key in original if key.endswith(".weight")]:
        name = kohya_name(key.removesuffix(".weight"))
        parts = [f"{name}.{part}" for part in ("lora_up.weight", "lora_down.weight", "alpha")]
        if all(part in tensors for part in parts):
            up, down, alpha = (tensors[part].float() for part in parts)
            original[key] = alpha / len(down) * (up.flatten(1) @ down.flatten(1))
            read.update(parts)
    # A weight that nothing changes has a shape only, and no values.
    changes = convert_sd3_transformer_checkpoint_to_diffusers(original)
    changes = {k.removesuffix(".weight"): v for k, v in changes.items() if not v.is_meta}
    adapted = {key.split(".lora_")[0] for key in adapter}
    missing, unexpected = adapted - changes.keys(), tensors.keys() - read
    different = {name for name in changes if not _same(changes[name], adapter, name)}
    if missing or unexpected or different:
        raise UserError(
            f"export: {KOHYA_FILE} is not the adapter of {LORA_FILE}: missing {sorted(missing)}, "
            f"unexpected {sorted(unexpected)}, different {sorted(different)}; nothing was written"
        )


def _original_weights(state: Mapping[str, Tensor], blocks: int) -> dict[str, Tensor]:
    """The weights of a network of diffusers, under the names of the original one."""
    weights = {"pos_embed": state["pos_embed.pos_embed"]}
    for module, names in original_modules(blocks).items():
        for kind in ("weight", "bias"):
            rows = [state[f"{name}.{kind}"] for name in names if f"{name}.{kind}" in state]
            if rows:
                weights[f"{module}.{kind}"] = in_original_order(module, torch.cat(rows), blocks)
    return weights


def _same(change: Tensor, adapter: Mapping[str, Tensor], name: str) -> bool:
    """Whether a change [out, in] is what the adapter makes of a module, which may be none."""
    expected = torch.zeros_like(change)
    if f"{name}.lora_A.weight" in adapter:
        up, down = (adapter[f"{name}.lora_{kind}.weight"].float().flatten(1) for kind in "BA")
        expected = up @ down
    most = TOLERANCE * float(expected.abs().max())
    return change.shape == expected.shape and torch.allclose(change, expected, rtol=0, atol=most)
