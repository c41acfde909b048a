"""A small model with random weights and a whole tokenizer, to serve where only the server is tested."""

from __future__ import annotations

import json
from pathlib import Path

# Small, so that the longest reply is short.
CONTEXT = 512
# Bytes and what is common in prompts that describe tools, the marks of turns, and tokens that end a reply: so
# many that random replies are short.
PLAIN = 640
ENDS = 60
_TOOLS = Path(__file__).resolve().parent.parent / "engine" / "text" / "tools.py"
_TURN, _END = "<|im_start|>", "<|im_end|>"
_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_model(folder: Path) -> Path:
    """Write a Llama of two layers in Hugging Face's layout, with a byte-level tokenizer and a template."""
    import numpy
    from safetensors.numpy import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=PLAIN, initial_alphabet=alphabet, min_frequency=1, show_progress=False
    )
    tokenizer.train_from_iterator([_TOOLS.read_text()], trainer)
    plain = tokenizer.get_vocab_size()
    special = [_TURN, _END, *(f"<|end_{i}|>" for i in range(1, ENDS))]
    tokenizer.add_special_tokens([AddedToken(text) for text in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    vocab = plain + len(special)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": list(range(plain + 1, vocab)),
    }
    (folder / "config.json").write_text(json.dumps(config))
    named = {"eos_token": _END, "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    random = numpy.random.default_rng(11)
    weights = {
        name: numpy.ones(shape) if len(shape) == 1 else random.normal(0.0, 0.1, shape)
        for name, shape in _shapes(config).items()
    }
    weights = {name: values.astype(numpy.float32) for name, values in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _shapes(config: dict) -> dict[str, tuple[int, ...]]:
    wide, inner = config["hidden_size"], config["intermediate_size"]
    kv = wide // config["num_attention_heads"] * config["num_key_value_heads"]
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], wide),
        "model.norm.weight": (wide,),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        found |= {
            at + "input_layernorm.weight": (wide,),
            at + "post_attention_layernorm.weight": (wide,),
            at + "self_attn.q_proj.weight": (wide, wide),
            at + "self_attn.k_proj.weight": (kv, wide),
            at + "self_attn.v_proj.weight": (kv, wide),
            at + "self_attn.o_proj.weight": (wide, wide),
            at + "mlp.gate_proj.weight": (inner, wide),
            at + "mlp.up_proj.weight": (inner, wide),
            at + "mlp.down_proj.weight": (wide, inner),
        }
    return found
