"""A tiny random Llama checkpoint in Hugging Face format, and its forward pass in NumPy without paging."""

import contextlib
import json
from pathlib import Path

import numpy as np
import safetensors.numpy
import tokenizers

VOCAB, CONTEXT, FEATURES, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 300, 128, 48, 96, 6, 2, 8
THETA, EPSILON, EOS = 500.0, 1e-5, 299
LAYER = {
    "input_layernorm": (FEATURES,),
    "post_attention_layernorm": (FEATURES,),
    "self_attn.q_proj": (HEADS * HEAD_DIM, FEATURES),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, FEATURES),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, FEATURES),
    "self_attn.o_proj": (FEATURES, HEADS * HEAD_DIM),
    "mlp.gate_proj": (HIDDEN, FEATURES),
    "mlp.up_proj": (HIDDEN, FEATURES),
    "mlp.down_proj": (FEATURES, HIDDEN),
}


def write_checkpoint(
    folder: Path, *, seed: int = 2, tied: bool = False, num_layers: int = 1, **changes
) -> dict[str, np.ndarray]:
    """Writes a folder and returns its tensors. More layers compile longer: use two only where their order matters."""
    shapes = {"model.embed_tokens.weight": (VOCAB, FEATURES), "model.norm.weight": (FEATURES,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, FEATURES)
    for i in range(num_layers):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in LAYER.items()}
    config = dict(
        model_type="llama",
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        hidden_size=FEATURES,
        intermediate_size=HIDDEN,
        num_hidden_layers=num_layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=EPSILON,
        rope_theta=THETA,
        tie_word_embeddings=tied,
        eos_token_id=EOS,
    )
    return write_folder(folder, config | changes, shapes, seed)


def write_folder(folder: Path, config: dict, shapes: dict, seed: int) -> dict[str, np.ndarray]:
    """Writes config.json, model.safetensors, tokenizer.json and tokenizer_config.json; returns the tensors."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors = {
        name: (rng.normal(size=shape) * (0.25 if len(shape) > 1 else 1)).astype(np.float32)
        for name, shape in shapes.items()
    }
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return tensors


@contextlib.contextmanager
def changed_tensors(file: Path):
    """The tensors of a file. Changes inside the context are written back."""
    tensors = safetensors.numpy.load_file(file)
    yield tensors
    safetensors.numpy.save_file(tensors, file)


def write_adapter(folder: Path, *, seed: int, rank: int, layers: tuple[str, ...], **changes) -> dict[str, np.ndarray]:
    """Writes a LoRA in PEFT's format for these layers. Returns the checkpoint's tensors that merging changes."""
    rng = np.random.default_rng(seed)
    folder.mkdir(exist_ok=True)
    factors, merged = {}, {}
    for layer in layers:
        outputs, features = LAYER[layer]
        a, b = (rng.normal(size=shape).astype(np.float32) * 0.4 for shape in ((rank, features), (outputs, rank)))
        name = f"base_model.model.model.layers.0.{layer}"
        factors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        merged[f"model.layers.0.{layer}.weight"] = b @ a * (3 / rank)
    safetensors.numpy.save_file(factors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 3, "bias": "none", "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    return merged


def write_tokenizer(folder: Path) -> None:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(alphabet)} | {"<eos>": EOS}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<eos>{{ m.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<eos>"}))


def next_logits(tensors: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """The logits after `tokens`, in float64."""
    t = {name.removeprefix("model."): tensor.astype(np.float64) for name, tensor in tensors.items()}
    turn = np.exp(1j * np.outer(np.arange(len(tokens)), THETA ** (-2 * np.arange(HEAD_DIM // 2) / HEAD_DIM)))[:, None]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * t[f"{name}.weight"]

    def rotate(x: np.ndarray) -> np.ndarray:
        turned = (x[..., : HEAD_DIM // 2] + 1j * x[..., HEAD_DIM // 2 :]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    x = t["embed_tokens.weight"][tokens]
    for i in range(sum(name.endswith("q_proj.weight") for name in t)):
        w = {name.removeprefix(f"layers.{i}."): tensor for name, tensor in t.items()}
        h = norm(x, f"layers.{i}.input_layernorm")
        q, k, v = (
            (h @ w[f"self_attn.{name}_proj.weight"].T).reshape(len(tokens), -1, HEAD_DIM) for name in ("q", "k", "v")
        )
        k, v = (np.repeat(kv, HEADS // KV_HEADS, axis=1) for kv in (rotate(k), v))
        logits = np.einsum("shd,thd->hst", rotate(q), k) / np.sqrt(HEAD_DIM)
        weights = np.exp(np.where(np.tri(len(tokens), dtype=bool), logits, -np.inf))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hst,thd->shd", weights, v).reshape(len(tokens), -1) @ w["self_attn.o_proj.weight"].T
        h = norm(x, f"layers.{i}.post_attention_layernorm")
        gate = h @ w["mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    return norm(x[-1], "norm") @ t.get("lm_head.weight", t["embed_tokens.weight"]).T


def greedy(tensors: dict[str, np.ndarray], prompt: list[int], count: int, eos: int | None = EOS) -> list[int]:
    """Up to `count` greedy tokens after the prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(next_logits(tensors, tokens).argmax()))
        if tokens[-1] == eos:
            break
    return tokens[len(prompt) :]
