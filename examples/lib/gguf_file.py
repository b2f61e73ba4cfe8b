"""Reads a GGUF file of the Llama family: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md"""

import re
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import tokenizers

import jaxpaged
from lib.checkpoint import Checkpoint, CheckpointError, one_line
from lib.fields import MOST_FEATURES, MOST_HEAD_DIM, MOST_HEADS, MOST_LAYERS, MOST_TOKENS, THETAS, Fields
from lib.llama_config import LlamaConfig
from lib.tokenizer import Tokenizer

GGUF_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL, USER_DEFINED = 3, 4  # types of tokens that are matched before any merges


def read_gguf(path: Path) -> Checkpoint:
    if not path.is_file():
        raise CheckpointError(f"{path} is no regular file.")  # reading a pipe would wait
    reader = gguf.GGUFReader(path)
    fields = Fields({name: field.contents() for name, field in reader.fields.items()})
    architecture = fields.get("general.architecture", None)
    if architecture != "llama":
        raise CheckpointError(f"{path} is of the architecture {architecture!r}; only 'llama' is known here.")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    num_heads = fields.whole("llama.attention.head_count", 1, MOST_HEADS)
    features = fields.whole("llama.embedding_length", 1, MOST_FEATURES)
    head_dim = fields.whole("llama.attention.key_length", 1, MOST_HEAD_DIM, features // num_heads)
    if fields.get("llama.rope.scaling.type", "none") != "none":
        raise CheckpointError(f"{path} scales its rotary embedding in a way that is not known here.")
    theta = fields.real("llama.rope.freq_base", *THETAS, 10_000.0)
    frequencies = np.asarray(jaxpaged.rotary_frequencies(head_dim, theta))
    if "rope_freqs.weight" in tensors:
        frequencies = frequencies / tensors["rope_freqs.weight"].data
    config = LlamaConfig(
        vocab_size=len(fields.get("tokenizer.ggml.tokens")),
        context=fields.whole("llama.context_length", 1, MOST_TOKENS),
        features=features,
        hidden_features=fields.whole("llama.feed_forward_length", 1, MOST_FEATURES),
        num_layers=fields.whole("llama.block_count", 1, MOST_LAYERS),
        num_heads=num_heads,
        num_kv_heads=fields.whole("llama.attention.head_count_kv", 1, MOST_HEADS, num_heads),
        head_dim=head_dim,
        norm_epsilon=fields.real("llama.attention.layer_norm_rms_epsilon", 0, 1),
        rotary_frequencies=tuple(map(float, frequencies)),
        attention_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        tie_embeddings="output.weight" not in tensors,
    )

    def reading(tensor: gguf.ReaderTensor) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
                # The file interleaves the two halves of a head that rotary embedding pairs; Llama separates them.
                pairs = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])
                values = pairs.swapaxes(1, 2).reshape(values.shape)
            return values

        return read

    return Checkpoint(
        config, _gguf_tokenizer(path, fields), {_hugging_face_name(name): reading(t) for name, t in tensors.items()}
    )


def _hugging_face_name(name: str) -> str:
    """blk.3.attn_q.weight -> layers.3.self_attn.q_proj.weight"""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in GGUF_NAMES:
        return name
    layer = f"layers.{match[1]}." if match[1] else ""
    return f"{layer}{GGUF_NAMES[match[2]]}.{match[3]}"


def _gguf_tokenizer(path: Path, fields: Fields) -> Tokenizer:
    model, pre = fields.get("tokenizer.ggml.model", None), fields.get("tokenizer.ggml.pre", "default")
    if model != "gpt2" or pre not in ("smollm", "gpt-2", "default"):
        raise CheckpointError(
            f"{path} has the tokenizer {model!r} ({pre!r}), not known here; use its Hugging Face folder."
        )
    tokens, kinds = fields.get("tokenizer.ggml.tokens"), fields.get("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("tokenizer.ggml.merges")]
    try:
        bpe = tokenizers.models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    except Exception as error:  # tokenizers raises plain Exception
        raise CheckpointError(f"{path} has a broken tokenizer: {one_line(error)}.") from error
    tokenizer = tokenizers.Tokenizer(bpe)
    # Same as transformers, which ignores the field "pre". Its value "smollm" would also split before each digit, which
    # gives other tokens if two or more white-space characters precede a digit.
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    for kind in (CONTROL, USER_DEFINED):
        added = [token for token, its_kind in zip(tokens, kinds, strict=True) if its_kind == kind]
        tokenizer.add_tokens([tokenizers.AddedToken(t, special=kind == CONTROL, normalized=False) for t in added])
    eos_id = fields.whole("tokenizer.ggml.eos_token_id", 0, len(tokens) - 1)
    special_tokens = {"eos_token": tokens[eos_id]}
    add_bos = fields.flag("tokenizer.ggml.add_bos_token", False)
    if add_bos or "tokenizer.ggml.bos_token_id" in fields.values:
        bos_id = fields.whole("tokenizer.ggml.bos_token_id", 0, len(tokens) - 1)
        special_tokens["bos_token"] = tokens[bos_id]
    if add_bos:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=[tokens[bos_id], "$A"], special_tokens=[(tokens[bos_id], bos_id)]
        )
    return Tokenizer(tokenizer, (eos_id,), fields.get("tokenizer.chat_template", None), special_tokens)
