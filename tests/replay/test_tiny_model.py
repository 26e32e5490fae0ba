"""The tiny model: complete or not there, always the same, one token a word, prefixes kept."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from vllm_thunder.replay import tiny_model
from vllm_thunder.replay.tiny_model import TinyModel, build_tiny_model
from vllm_thunder.replay.words import lexicon, write_words

SMALL = TinyModel(hidden_size=64, intermediate_size=96, num_hidden_layers=2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models"), SMALL)


def test_everything_that_vllm_reads_is_there(directory: Path) -> None:
    names = {path.name for path in directory.iterdir()}
    assert names >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["max_position_embeddings"] >= 16384
    tensors = load_file(directory / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(np.float32)}
    assert tensors["model.embed_tokens.weight"].shape == (config["vocab_size"], 64)
    assert tensors["model.layers.1.self_attn.k_proj.weight"].shape == (2 * 32, 64)


def test_the_model_fits_its_config(directory: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.config.eos_token_id == Tokenizer.from_file(
        str(directory / "tokenizer.json")
    ).token_to_id("<|im_end|>")


def test_a_built_model_is_used_again_and_two_builds_are_equal(
    directory: Path, tmp_path: Path
) -> None:
    before = (directory / "model.safetensors").stat().st_mtime_ns
    assert build_tiny_model(directory.parent, SMALL) == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == before
    again = build_tiny_model(tmp_path, SMALL)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (directory / name).read_bytes(), name
    other = build_tiny_model(tmp_path, TinyModel(**{**_fields(SMALL), "seed": 1}))
    assert other != again
    assert (other / "model.safetensors").read_bytes() != (again / "model.safetensors").read_bytes()


def _fields(model: TinyModel) -> dict[str, int]:
    return {name: getattr(model, name) for name in TinyModel.__dataclass_fields__}


def test_an_interrupted_build_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny_model, "_write_weights", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build_tiny_model(tmp_path, SMALL)
    assert not list(tmp_path.iterdir())


def test_a_build_that_loses_the_race_uses_the_winners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_rename = os.rename

    def rename_after_another_did(source: Path, target: Path) -> None:
        monkeypatch.setattr(tiny_model.os, "rename", real_rename)
        build_tiny_model(tmp_path, SMALL)
        real_rename(source, target)

    monkeypatch.setattr(tiny_model.os, "rename", rename_after_another_did)
    directory = build_tiny_model(tmp_path, SMALL)
    assert [path.name for path in tmp_path.iterdir()] == [directory.name]


def test_a_word_is_a_token_and_any_text_comes_back(directory: Path) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for word in lexicon():
        assert len(tokenizer.encode(" " + word).ids) == 1, word
    text = "Grüße, 你好!\n\tdef f(x): return x  # 😀"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_each_context_is_a_token_prefix_of_the_next(directory: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    messages = [
        {"role": "system", "content": write_words(20, "a")},
        {"role": "user", "content": write_words(30, "b")},
    ]
    answer = " " + write_words(12, "c")  # words as the model emits them: with their space

    def prompt() -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    first = prompt() + tokenizer(answer, add_special_tokens=False)["input_ids"]
    messages += [
        {"role": "assistant", "content": answer},
        {"role": "user", "content": write_words(5, "d")},
    ]
    second = prompt()
    assert second[: len(first)] == first
    assert len(first) - 62 < 40, "the template and the words cost few tokens beyond the words"


def test_only_whole_words_can_be_greedy(directory: Path) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    output = load_file(directory / "model.safetensors")["lm_head.weight"]
    words = {tokenizer.token_to_id("Ġ" + word) for word in lexicon()}
    assert set(np.flatnonzero(output.any(axis=1))) == words


def test_kv_bytes() -> None:
    assert TinyModel(
        num_hidden_layers=3, num_key_value_heads=2, head_dim=32
    ).kv_bytes_per_token == (3 * 2 * 32 * 2 * 4)
