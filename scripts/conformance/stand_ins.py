"""Configurations in place of the models that vLLM's tests name, laid out as a hub cache.

The tests build a ``ModelConfig`` and no model: the shape is all that they read, and no weights and
no network are needed. The models with images need torchvision, which does not import beside vLLM
for CPU. The tests take from them only that a model has an encoder and how many tokens one item
has at most, so a model with audio of as many tokens an item stands in for them.
"""

import json
from pathlib import Path
from typing import Any

_OPT = {"model_type": "opt", "architectures": ["OPTForCausalLM"], "dtype": "float16"}
_QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "dtype": "bfloat16"}
_QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16"}

#: The shape that Qwen1.5-7B and the text models of the stand-ins with an encoder have.
_SEVEN_BILLION = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 151936,
}

_WITH_ENCODER = {
    "model_type": "qwen2_audio",
    "architectures": ["Qwen2AudioForConditionalGeneration"],
    "dtype": "float16",
    "audio_token_index": 1,
    "audio_config": {"model_type": "qwen2_audio_encoder"},
    "text_config": {"model_type": "qwen2", "max_position_embeddings": 4096, **_SEVEN_BILLION},
}

#: What a name's ``config.json`` says, as far as it differs from the defaults of its type.
STAND_INS: dict[str, dict[str, Any]] = {
    "facebook/opt-125m": _OPT,
    "facebook/opt-350m": {
        **_OPT,
        "hidden_size": 1024,
        "ffn_dim": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "word_embed_proj_dim": 512,
        "do_layer_norm_before": False,
    },
    "Qwen/Qwen3-0.6B": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen1.5-7B": {**_QWEN2, **_SEVEN_BILLION, "max_position_embeddings": 32768},
    "llava-hf/llava-1.5-7b-hf": _WITH_ENCODER,
    "Qwen/Qwen2.5-VL-3B-Instruct": _WITH_ENCODER,
}

#: 30 seconds are 2304 frames, and the encoder makes one token of four: LLaVA's 576 an image.
_FEATURES = {
    "processor_class": "Qwen2AudioProcessor",
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "chunk_length": 30,
    "sampling_rate": 7680,
    "hop_length": 100,
    "n_fft": 400,
}

_WORDS = ["[UNK]", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]

_REVISION = "0" * 40


def write_hub_cache(cache: Path) -> None:
    """Write every stand-in below ``cache``, a folder for the variable ``HF_HUB_CACHE``."""
    for name, config in STAND_INS.items():
        model = cache / f"models--{name.replace('/', '--')}"
        snapshot = model / "snapshots" / _REVISION
        snapshot.mkdir(parents=True, exist_ok=True)
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / "main").write_text(_REVISION)
        _write_json(snapshot / "config.json", config)
        if config is _WITH_ENCODER:
            _write_processor(snapshot)


def _write_processor(snapshot: Path) -> None:
    from tokenizers import Tokenizer, models

    _write_json(snapshot / "processor_config.json", {"processor_class": "Qwen2AudioProcessor"})
    _write_json(snapshot / "preprocessor_config.json", _FEATURES)
    words = {word: number for number, word in enumerate(_WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=_WORDS[0]))
    tokenizer.save(str(snapshot / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": _WORDS[0]}
    _write_json(snapshot / "tokenizer_config.json", settings)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
