"""A GGUF file as a plain float32 Llama model with its tokenizer, as ``vllm serve DIR`` reads it.

    python -P convert_smollm2.py FILE.gguf OUT

Needs the packages gguf and accelerate beside transformers. A script of its own, so that they need
not be in the environment that serves. Ends non-zero unless the saved model, loaded again, gives
exactly the logits of the GGUF file's.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

_PROBE = "The capital of France is"
#: What only describes where the weights came from.
_ORIGIN = ("quantization_config", "_name_or_path", "transformers_version", "architectures")


def main() -> None:
    gguf, out = map(Path, sys.argv[1:])
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    read = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).eval()
    config = {k: v for k, v in read.config.to_dict().items() if k not in _ORIGIN}
    plain = LlamaForCausalLM(LlamaConfig(**config)).to(torch.float32)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(out)
    tokenizer.save_pretrained(out)

    saved = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    ids = tokenizer(_PROBE, return_tensors="pt")["input_ids"]
    if not torch.equal(
        ids, AutoTokenizer.from_pretrained(out)(_PROBE, return_tensors="pt").input_ids
    ):
        sys.exit("convert_smollm2.py: the saved tokenizer cuts text otherwise than the GGUF file's")
    with torch.inference_mode():
        wanted, found = read(ids).logits, saved(ids).logits
    if not torch.equal(wanted, found):
        sys.exit("convert_smollm2.py: the saved model's logits are not those of the GGUF file")
    print(f"{_PROBE}{tokenizer.decode(found[0, -1].argmax())}")


if __name__ == "__main__":
    main()
