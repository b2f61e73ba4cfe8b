"""vLLM's engine on random weights of a model's shape, with the methods of an `Engine`."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.models.llama_step import LlamaConfig
from jaxpaged import RequestOutput, SamplingParams
from jaxpaged._engine.records import Completion

THETA = 500_000.0  # of the rotary embedding, as benchmarks/engine/model.py has it


def hugging_face_config(config: LlamaConfig) -> dict[str, Any]:
    """The `config.json` of a Llama of this shape."""
    return dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        torch_dtype="bfloat16",
        vocab_size=config.vocab_size,
        hidden_size=config.features,
        intermediate_size=config.hidden_features,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.context,
        rms_norm_eps=config.norm_epsilon,
        rope_theta=THETA,
        hidden_act="silu",
        tie_word_embeddings=config.tie_embeddings,
        bos_token_id=1,
        eos_token_id=2,
    )


class VllmEngine:
    """`add_request` and `step` of vLLM's engine, which keeps its defaults; greedy, no stop tokens, no texts."""

    def __init__(self, config: LlamaConfig, *, max_length: int):
        import vllm

        self._vllm, self.version = vllm, vllm.__version__
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(hugging_face_config(config)))
            llm = vllm.LLM(model=folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=max_length)
        self._llm, self._engine, self._next_id = llm, llm.llm_engine, 0

    @property
    def has_unfinished_requests(self) -> bool:
        return self._engine.has_unfinished_requests()

    def add_request(self, prompt: Sequence[int], params: SamplingParams) -> int:
        self._next_id += 1
        theirs = self._vllm.SamplingParams(
            max_tokens=params.max_tokens, temperature=params.temperature, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(str(self._next_id), dict(type="token", prompt_token_ids=list(prompt)), theirs)
        return self._next_id

    def step(self) -> list[RequestOutput]:
        return [
            RequestOutput(
                int(output.request_id),
                [Completion(list(output.outputs[0].token_ids), None, output.outputs[0].finish_reason)],
                output.finished,
            )
            for output in self._engine.step()
        ]
