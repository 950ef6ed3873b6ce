"""Kohya's layout of an adapter, applied as Kohya's scripts do, gives the merged network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from sd3_pipeline import TINY_SD3
from torch import Tensor, nn

from fewstep.errors import UserError
from fewstep.export_kohya import KOHYA_FILE, check_kohya, export_kohya, kohya_tensors
from fewstep.export_lora import export_lora
from fewstep.models.sd3 import SD3, SD3Settings
from fewstep.models.sd3_network import SD3Network
from fewstep.roles.storage import ADAPTABLE, SharedBase

SD35 = dict(TINY_SD3)
SD3_MEDIUM = SD35 | {"dual_attention_layers": (), "qk_norm": None}
WIDTH, TEXT, POOLED, PATCH, BLOCKS = 16, 32, 20, 2, 3
RANK = 2


def linear(rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {"weight": (rows, columns), "bias": (rows,)}


def original_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The weights of the original network, as Stability AI publishes them."""
    modules: dict[str, dict[str, tuple[int, ...]]] = {
        "x_embedder.proj": {"weight": (WIDTH, 4, PATCH, PATCH), "bias": (WIDTH,)},
        "t_embedder.mlp.0": linear(WIDTH, 256),
        "t_embedder.mlp.2": linear(WIDTH, WIDTH),
        "y_embedder.mlp.0": linear(WIDTH, POOLED),
        "y_embedder.mlp.2": linear(WIDTH, WIDTH),
        "context_embedder": linear(WIDTH, TEXT),
        "final_layer.adaLN_modulation.1": linear(2 * WIDTH, WIDTH),
        "final_layer.linear": linear(PATCH * PATCH * 4, WIDTH),
    }
    for block in range(BLOCKS):
        dual, last = block in config["dual_attention_layers"], block == BLOCKS - 1
        attentions = ["x_block.attn", "context_block.attn"] + ["x_block.attn2"] * dual
        for name in (f"joint_blocks.{block}.{attention}" for attention in attentions):
            modules[f"{name}.qkv"] = linear(3 * WIDTH, WIDTH)
            if config["qk_norm"] is not None:
                modules[f"{name}.ln_q"] = modules[f"{name}.ln_k"] = {"weight": (8,)}
            if not (last and "context" in name):
                modules[f"{name}.proj"] = linear(WIDTH, WIDTH)
        for part, chunks in (("x_block", 9 if dual else 6), ("context_block", 2 if last else 6)):
            name = f"joint_blocks.{block}.{part}"
            modules[f"{name}.adaLN_modulation.1"] = linear(chunks * WIDTH, WIDTH)
            if chunks > 2:
                modules[f"{name}.mlp.fc1"] = linear(4 * WIDTH, WIDTH)
                modules[f"{name}.mlp.fc2"] = linear(WIDTH, 4 * WIDTH)
    shapes = {f"{m}.{kind}": shape for m, kinds in modules.items() for kind, shape in kinds.items()}
    return {"pos_embed": (1, 36, WIDTH), **shapes}


def original_weights(config: dict[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        key: torch.randn(shape, generator=generator, dtype=torch.float64)
        for key, shape in original_shapes(config).items()
    }


def as_diffusers(weights: dict[str, Tensor], config: dict[str, Any]) -> SD3Transformer2DModel:
    network = SD3Transformer2DModel(**config).double().eval()
    converted = convert_sd3_transformer_checkpoint_to_diffusers(dict(weights))
    network.load_state_dict(converted, strict=True)
    return network


def applied(weights: dict[str, Tensor], file: Path) -> dict[str, Tensor]:
    """W + alpha / rank * up down, by name; every tensor of the file is for some weight."""
    lora, result = load_file(file), dict(weights)
    for key, weight in weights.items():
        name = "lora_unet_" + key.removesuffix(".weight").replace(".", "_")
        if key.endswith(".weight") and f"{name}.lora_up.weight" in lora:
            up, down, alpha = (
                lora.pop(f"{name}.{part}")
                for part in ("lora_up.weight", "lora_down.weight", "alpha")
            )
            change = up.flatten(1) @ down.flatten(1) * (alpha.item() / down.shape[0])
            result[key] = weight + change.reshape(weight.shape)
    assert lora == {}
    return result


def adapted(network: nn.Module, targets: Sequence[str], directory: Path) -> SharedBase:
    """A random adapter, and both of its files."""
    # Rank and alpha differ, so that a lost alpha shows.
    lora = LoraConfig(r=RANK, lora_alpha=8, target_modules=list(targets))
    storage = SharedBase(network, ("student",), lora)
    generator = torch.Generator().manual_seed(1)
    for parameter in storage.parameters("student").values():
        parameter.data.normal_(std=0.3, generator=generator)
    export_lora(storage, "student", directory)
    export_kohya(directory, BLOCKS)
    return storage


def every_module(network: nn.Module) -> list[str]:
    return [name for name, module in network.named_modules() if isinstance(module, ADAPTABLE)]


TARGETS: dict[str, Callable[[nn.Module], Sequence[str]]] = {
    "attention": lambda network: SD3.lora_targets,
    "every module": every_module,
    "some of a fused matrix": lambda network: ["to_q", "add_v_proj", "attn2.to_k"],
}


@pytest.mark.parametrize("targets", TARGETS)
def test_applied_to_the_original_network_it_gives_the_merged_one(
    targets: str, tmp_path: Path
) -> None:
    weights = original_weights(SD35)
    network = as_diffusers(weights, SD35)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    storage = adapted(network, TARGETS[targets](network), tmp_path)
    merged = storage.plain_network("student").state_dict()
    theirs = as_diffusers(applied(weights, tmp_path / KOHYA_FILE), SD35).state_dict()
    assert theirs.keys() == merged.keys()
    for key, value in merged.items():
        torch.testing.assert_close(theirs[key], value, rtol=0, atol=1e-12)
    changed = {key for key, value in merged.items() if not torch.equal(value, before[key])}
    assert len(changed) == len(storage.parameters("student")) / 2
    check_kohya(model(SD35), tmp_path)


def test_a_network_without_a_second_attention_is_written_too(tmp_path: Path) -> None:
    weights = original_weights(SD3_MEDIUM)
    network = as_diffusers(weights, SD3_MEDIUM)
    storage = adapted(network, every_module(network), tmp_path)
    theirs = as_diffusers(applied(weights, tmp_path / KOHYA_FILE), SD3_MEDIUM).state_dict()
    for key, value in storage.plain_network("student").state_dict().items():
        torch.testing.assert_close(theirs[key], value, rtol=0, atol=1e-12)
    check_kohya(model(SD3_MEDIUM), tmp_path)


def test_names_and_shapes_are_those_of_kohyas_scripts(tmp_path: Path) -> None:
    adapted(as_diffusers(original_weights(SD35), SD35), SD3.lora_targets, tmp_path)
    tensors = load_file(tmp_path / KOHYA_FILE)
    places = [f"{b}_{part}" for b in range(BLOCKS) for part in ("x_block", "context_block")]
    modules = {f"{place}_attn_{m}" for place in places for m in ("qkv", "proj")}
    # The last block gives no text, and only the first attends to the image alone.
    modules -= {"2_context_block_attn_proj"}
    modules |= {"0_x_block_attn2_qkv", "0_x_block_attn2_proj"}
    assert tensors.keys() == {
        f"lora_unet_joint_blocks_{module}.{part}"
        for module in modules
        for part in ("lora_down.weight", "lora_up.weight", "alpha")
    }
    name = "lora_unet_joint_blocks_0_x_block_attn_qkv"
    assert tensors[f"{name}.lora_down.weight"].shape == (3 * RANK, WIDTH)
    assert tensors[f"{name}.lora_up.weight"].shape == (3 * WIDTH, 3 * RANK)
    assert tensors[f"{name}.alpha"].item() == 3 * RANK
    assert tensors["lora_unet_joint_blocks_0_x_block_attn_proj.alpha"].item() == RANK


def model(config: dict[str, Any]) -> SD3:
    size = {key: value for key, value in config.items() if key != "out_channels"}
    built = SD3Settings(network=SD3Network(**size)).build()
    assert isinstance(built, SD3)
    return built


# A file that is not the adapter.

QKV = "lora_unet_joint_blocks_1_x_block_attn_qkv"


def lost(tensors: dict[str, Tensor]) -> None:
    for part in ("lora_down.weight", "lora_up.weight", "alpha"):
        del tensors[f"{QKV}.{part}"]


def half_lost(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{QKV}.alpha"]


def of_nothing(tensors: dict[str, Tensor]) -> None:
    tensors["lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha"] = torch.tensor(2.0)


def renamed(tensors: dict[str, Tensor]) -> None:
    for key in [key for key in tensors if key.startswith(QKV)]:
        tensors[key.replace("_1_x_block", "_7_x_block")] = tensors.pop(key)


def queries_for_keys(tensors: dict[str, Tensor]) -> None:
    q, k, v = tensors[f"{QKV}.lora_up.weight"].chunk(3)
    tensors[f"{QKV}.lora_up.weight"] = torch.cat([k, q, v])


def weaker(tensors: dict[str, Tensor]) -> None:
    tensors[f"{QKV}.alpha"] /= 3


def of_another_shape(tensors: dict[str, Tensor]) -> None:
    tensors[f"{QKV}.lora_down.weight"] = tensors[f"{QKV}.lora_down.weight"][:, 1:].contiguous()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lost, r"missing \['transformer_blocks.1.attn.to_k', .*unexpected \[\]"),
        (half_lost, rf"missing \['transformer_blocks.1.*unexpected \['{QKV}.lora_down"),
        (of_nothing, r"missing \[\], unexpected \['lora_te1.*'\], different \[\]"),
        (renamed, r"missing \['transformer_blocks.1.*unexpected \['lora_unet_joint_blocks_7"),
        (queries_for_keys, r"missing \[\], unexpected \[\], different \['t.*to_k', 't.*to_q'\]"),
        (weaker, r"missing \[\], unexpected \[\], different \['t.*to_k', 't.*to_q', 't.*to_v'\]"),
        (of_another_shape, r"missing \[\], unexpected \[\], different \['t.*to_k', 't.*'\]"),
    ],
)
def test_the_check_names_what_is_wrong_with_a_file(
    damage: Callable[[dict[str, Tensor]], None], told: str, tmp_path: Path
) -> None:
    adapted(as_diffusers(original_weights(SD35), SD35), SD3.lora_targets, tmp_path)
    check_kohya(model(SD35), tmp_path)
    tensors = load_file(tmp_path / KOHYA_FILE)
    damage(tensors)
    save_file(tensors, tmp_path / KOHYA_FILE)
    with pytest.raises(UserError, match=told):
        check_kohya(model(SD35), tmp_path)


def test_a_module_without_a_place_is_not_left_out_in_silence() -> None:
    name = "transformer_blocks.0.attn3.to_q"
    adapter = {f"{name}.lora_A.weight": torch.ones(1, 4), f"{name}.lora_B.weight": torch.ones(4, 1)}
    with pytest.raises(UserError, match=r"no place for transformer_blocks.0.attn3.to_q"):
        kohya_tensors(adapter, BLOCKS)
