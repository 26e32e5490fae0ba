"""A tiny random Qwen3 that a real engine can serve offline, built in seconds.

It writes everything ``vllm serve DIR`` reads: config, float32 weights, a byte-level BPE
tokenizer trained on generated words, a chat template and a generation config. No download,
no torch: the weights come from numpy with a fixed seed, so two machines build the same model.

Three properties are made on purpose, because the replay and the output tests lean on them:

- Each context of a conversation is a textual and a token prefix of the next one.
- The rows of the output matrix for tokens that are not whole words are zero. The greedy token
  is therefore a word: outputs decode and re-encode to the same tokens and the model never ends
  a turn by itself.
- The attention is sharp (the query norm is scaled), so that a wrong KV block shows in the text.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vllm_thunder.replay.words import lexicon

__all__ = ["TinyModel", "build_tiny_model", "default_cache"]

CHAT_TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif -%}"
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"
)
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_FORMAT = 1  # raise when the same TinyModel no longer means the same files
_COMPLETE = "tiny_model.json"


@dataclass(frozen=True)
class TinyModel:
    """The shape of the model. The default prefills about 4,000 tokens/s on two CPU cores."""

    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 32768
    seed: int = 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of float32 keys and values that one token keeps in the KV cache."""
        return 2 * 4 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    @property
    def fingerprint(self) -> str:
        """Names the files that this model is built into."""
        text = json.dumps([_FORMAT, asdict(self), CHAT_TEMPLATE, lexicon()])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def default_cache() -> Path:
    """Where built models are kept between runs: below the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vllm_thunder" / "models"


def build_tiny_model(cache: Path, model: TinyModel | None = None) -> Path:
    """The model's directory below ``cache``, built if it is not there yet.

    A directory appears under its final name only when it is complete, so an interrupted or a
    concurrent build leaves nothing that could be mistaken for a model.
    """
    model = model or TinyModel()
    directory = cache / f"tiny-qwen3-{model.fingerprint}"
    if (directory / _COMPLETE).is_file():
        return directory
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".tiny-qwen3-", dir=cache))
    try:
        _write_model(unfinished, model)
        unfinished.chmod(0o755)
        try:
            os.rename(unfinished, directory)
        except OSError:
            if not (directory / _COMPLETE).is_file():  # else somebody else built it meanwhile
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return directory


def _write_model(directory: Path, model: TinyModel) -> None:
    vocabulary = _write_tokenizer(directory, model.max_position_embeddings)
    token_ids = {"bos_token_id": None, "eos_token_id": vocabulary["<|im_end|>"]}
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(vocabulary),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": model.num_hidden_layers,
        "torch_dtype": "float32",
        **{name: value for name, value in asdict(model).items() if name != "seed"},
        **token_ids,
    }
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"do_sample": False, **token_ids})
    _write_weights(directory / "model.safetensors", model, vocabulary)
    _write_json(directory / _COMPLETE, {"format": _FORMAT, **asdict(model)})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(directory: Path, context_length: int) -> dict[str, int]:
    """Train the tokenizer until every word with a space before it is one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=100_000,  # no limit: training ends when every word has become one token
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(_SPECIAL_TOKENS),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" " + " ".join(lexicon())], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context_length,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return tokenizer.get_vocab()


def _write_weights(path: Path, model: TinyModel, vocabulary: dict[str, int]) -> None:
    from safetensors.numpy import save_file

    save_file(dict(_weights(model, vocabulary)), str(path), metadata={"format": "pt"})


def _weights(
    model: TinyModel, vocabulary: dict[str, int]
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Name and value of every tensor, in a fixed order: the order fixes the random draws."""
    rng = np.random.default_rng(model.seed)
    hidden, wide = model.hidden_size, model.intermediate_size
    queries = model.num_attention_heads * model.head_dim
    keys = model.num_key_value_heads * model.head_dim
    # Each layer adds two terms to the residual stream; scaled so that their sum stays near one.
    residual = (2 * model.num_hidden_layers) ** -0.5

    def matrix(rows: int, columns: int, gain: float = 1.0) -> NDArray[np.float32]:
        values = rng.standard_normal((rows, columns), dtype=np.float32)
        return values * np.float32(gain * columns**-0.5)

    def ones(size: int, gain: float = 1.0) -> NDArray[np.float32]:
        return np.full(size, gain, dtype=np.float32)

    yield "model.embed_tokens.weight", matrix(len(vocabulary), hidden, gain=hidden**0.5)
    for layer in range(model.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", ones(hidden)
        yield f"{prefix}.self_attn.q_proj.weight", matrix(queries, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", matrix(keys, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", matrix(keys, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", matrix(hidden, queries, gain=2 * residual)
        yield f"{prefix}.self_attn.q_norm.weight", ones(model.head_dim, gain=3.0)
        yield f"{prefix}.self_attn.k_norm.weight", ones(model.head_dim)
        yield f"{prefix}.post_attention_layernorm.weight", ones(hidden)
        yield f"{prefix}.mlp.gate_proj.weight", matrix(wide, hidden)
        yield f"{prefix}.mlp.up_proj.weight", matrix(wide, hidden)
        yield f"{prefix}.mlp.down_proj.weight", matrix(hidden, wide, gain=2 * residual)
    yield "model.norm.weight", ones(hidden)
    output = matrix(len(vocabulary), hidden, gain=3.0)
    whole_words = np.zeros(len(vocabulary), dtype=bool)
    whole_words[[vocabulary["Ġ" + word] for word in lexicon()]] = True
    output[~whole_words] = 0.0
    yield "lm_head.weight", output
