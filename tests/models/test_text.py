import re
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
    T5Model,
)

from fewstep.errors import UserError
from fewstep.models.sd3 import SD3Settings
from fewstep.models.sd3_network import SD3Network
from fewstep.models.text import TextEncoder, encoder_directory, mask_and_pool

CPU = torch.device("cpu")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "red", "cat", "house"]


def tokenizer(pad: str | None = "[PAD]") -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=pad, unk_token="[UNK]")


def write_bert(directory: Path) -> Path:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=12,
    )
    BertModel(config).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"))


def test_tokens_are_encoded_as_without_padding_which_is_zero(bert: Path) -> None:
    encoder = TextEncoder(str(bert), 8, CPU, torch.float32)
    found = encoder.encode(["a red cat", "", "a red cat " * 9])
    assert found["prompt_embeds"].shape == (3, 8, 16)
    assert found["pooled"].shape == (3, 16)
    assert (encoder.width, encoder.pooled) == (16, 16)
    plain = BertModel.from_pretrained(bert).eval()
    for row, ids in enumerate([[2, 4, 5, 6, 3], [2, 3], [2, 4, 5, 6, 4, 5, 6, 3]]):
        with torch.no_grad():
            states = plain(torch.tensor([ids])).last_hidden_state[0]
        own = found["prompt_embeds"][row]
        torch.testing.assert_close(own[: len(ids)], states, rtol=1e-5, atol=1e-6)
        assert not own[len(ids) :].any()
        torch.testing.assert_close(found["pooled"][row], states.mean(0), rtol=1e-5, atol=1e-6)


def test_a_prompt_without_a_token_is_zero() -> None:
    states = torch.randn(2, 3, 4)
    masked, pooled = mask_and_pool(states, torch.tensor([[0, 0, 0], [1, 0, 1]]))
    assert not masked[0].any()
    assert not pooled[0].any()
    torch.testing.assert_close(pooled[1], (states[1, 0] + states[1, 2]) / 2)


def test_of_an_encoder_and_a_decoder_the_encoder_is_taken(tmp_path: Path) -> None:
    config = T5Config(
        vocab_size=len(WORDS), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    T5Model(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    found = TextEncoder(str(tmp_path), 6, CPU, torch.float32).encode(["a cat"])
    plain = T5EncoderModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        states = plain(torch.tensor([[2, 4, 6, 3]])).last_hidden_state
    torch.testing.assert_close(found["prompt_embeds"][:, :4], states)


def test_it_encodes_the_prompts_of_a_network_without_a_pipeline(bert: Path) -> None:
    size = SD3Network(
        sample_size=8, in_channels=3, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16,
        pos_embed_max_size=4,
    )  # fmt: skip
    settings = SD3Settings(network=size, text_encoder=str(bert), max_sequence_length=8)
    model = settings.build()
    condition = model.prompt_encoder(CPU, torch.float32).encode(["a cat", "a house"])
    expected = {key: value.shape for key, value in model.example_condition(2).items()}
    assert {key: value.shape for key, value in condition.items()} == expected
    wide = size.model_copy(update={"joint_attention_dim": 24})
    with pytest.raises(UserError, match="joint_attention_dim is 24, the text encoder gives 16"):
        SD3Settings(network=wide, text_encoder=str(bert), max_sequence_length=8).build(
        ).prompt_encoder(CPU, torch.float32)  # fmt: skip


def test_the_identity_names_class_length_and_files(bert: Path) -> None:
    first = TextEncoder(str(bert), 8, CPU, torch.float32).identity
    assert first["class"] == "TextEncoder"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= first.keys()
    other = TextEncoder(str(bert), 9, CPU, torch.float32).identity
    assert {key for key in first if first[key] != other[key]} == {"max_sequence_length"}


def test_prompts_longer_than_the_encoder_takes_are_refused(bert: Path) -> None:
    with pytest.raises(UserError, match=r"model\.max_sequence_length: 13 .* 12 tokens at most"):
        TextEncoder(str(bert), 13, CPU, torch.float32)


def test_an_installed_package_may_carry_the_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "with_a_model"
    write_bert(package / "model")
    (package / "__init__.py").write_text("raise ImportError('not to be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert encoder_directory("package:with_a_model") == package / "model"
    assert "with_a_model" not in sys.modules
    write_bert(package / "second")
    with pytest.raises(UserError, match="with_a_model has 2 transformers models"):
        encoder_directory("package:with_a_model")


@pytest.mark.parametrize("name", ["package:not_installed_here", "package:no-name", "package:"])
def test_a_package_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(UserError, match="no package"):
        encoder_directory(name)


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(str(tmp_path))):
        encoder_directory(str(tmp_path))


def test_prompts_that_are_longer_than_what_is_looked_at_are_counted(bert: Path) -> None:
    encoder = TextEncoder(str(bert), 8, CPU, torch.float32)
    # Six words and two tokens around them are eight.
    assert encoder.count_cut(["a red cat a red cat"]) == 0
    assert encoder.count_cut(["a red cat a red cat a", "", "a " * 50]) == 2
