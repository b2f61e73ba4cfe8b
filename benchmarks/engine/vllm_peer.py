"""vLLM's engine on the requests of the engine's benchmarks, with its own defaults, where vllm is installed.

    python -m benchmarks.engine.vllm_peer --requests 2048 1024 512 --rates 5 10 20    # about four minutes on a GPU
    python -m benchmarks.engine.vllm_peer --requests --rates --rollout                # two minutes

A model of Llama-3-8B's shape or of --model, with random bfloat16 weights, greedy, no stop tokens, no text. vLLM runs
with its defaults, with its engine in a separate process. Rows are the same as in `benchmarks.engine.throughput`, in
both orders, and `benchmarks.engine.online`. JAX stays on the CPU, so that vLLM has the GPU. Run nothing else on the
machine: vLLM's scheduler computes on a CPU in each step. The largest number of --requests determines the requests of
both modules, so give both the same one.

--rollout runs the rounds of `benchmarks.engine.rollout`, at temperature 1, with logprobs of the drawn tokens. Between
rounds the prefix cache is emptied, as after an update of the weights. The update itself is neither run nor timed.
"""

import argparse
import json
import operator
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.checks import require
from benchmarks.engine.model import CONFIGS, PLAIN, YARN
from benchmarks.engine.online import add_arrivals, measure
from benchmarks.engine.rollout import COMPLETIONS, PROMPTS
from benchmarks.engine.workload import SIZES, Request, rollout_work, workload
from benchmarks.harness import add_output, open_store
from jaxpaged import Completion, RequestOutput, SamplingParams
from lib.llama_config import LlamaConfig

THETA = 500_000.0  # rotary base, as in benchmarks/engine/model.py


def hugging_face_config(config: LlamaConfig) -> dict[str, Any]:
    """The `config.json` of a Llama of this shape, or of a gpt-oss."""
    fields = dict(
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
        hidden_act="silu",
        tie_word_embeddings=config.tie_embeddings,
        bos_token_id=1,
        eos_token_id=2,
    )
    if config.clipped is None or config.windows is None:
        return fields | dict(rope_theta=THETA)
    return fields | dict(
        architectures=["GptOssForCausalLM"],
        model_type="gpt_oss",
        attention_bias=config.attention_bias,
        num_local_experts=config.num_experts,
        num_experts_per_tok=config.experts_per_token,
        swiglu_alpha=config.clipped.alpha,
        swiglu_limit=config.clipped.limit,
        sliding_window=config.windows[0],
        layer_types=["full_attention" if window is None else "sliding_attention" for window in config.windows],
        rope_parameters=YARN,
    )


def fill(model: Any) -> None:
    """Fills a torch model with random weights, as `benchmarks.engine.model.fill` does."""
    import torch

    with torch.inference_mode():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.fill_(1)
            else:
                weight.normal_(std=0.02)


class VllmEngine:
    """vLLM with the `add_request` and `step` of an `Engine`, and `generate`; greedy."""

    seconds_to_spare = 0.0  # a step starts at once, with the requests that have arrived

    def __init__(self, config: LlamaConfig, folder: str, *, max_length: int, num_gpus: int = 1):
        import vllm
        from vllm.platforms import current_platform

        self._vllm, self.version, self.device = vllm, vllm.__version__, current_platform.get_device_name()
        Path(folder, "config.json").write_text(json.dumps(hugging_face_config(config)))
        sizes = dict(max_model_len=max_length, tensor_parallel_size=num_gpus)
        llm = vllm.LLM(model=folder, load_format="dummy", skip_tokenizer_init=True, **sizes)
        if config.num_experts:  # vLLM's weights are so small that the router's bias alone chooses the experts
            llm.apply_model(fill)
        self._llm, self._engine, self._next_id = llm, llm.llm_engine, 0

    def settings(self) -> dict[str, Any]:
        scheduler = self._engine.vllm_config.scheduler_config
        return dict(
            engine=f"vllm {self.version}",
            num_seats=scheduler.max_num_seqs,
            step_tokens=scheduler.max_num_batched_tokens,
        )

    def forget_prompts(self) -> None:
        """Empties the prefix cache, so that a run finds no prompt of the previous run."""
        require(self._llm.reset_prefix_cache(), "vLLM's prefix cache is still in use")

    @property
    def has_unfinished_requests(self) -> bool:
        return self._engine.has_unfinished_requests()

    def _params(self, new: int, **more: Any) -> Any:
        given = dict(max_tokens=new, temperature=0.0, ignore_eos=True, detokenize=False) | more
        return self._vllm.SamplingParams(**given)

    def generate(self, work: Sequence[Request], **more: Any) -> int:
        """The number of tokens of all completions. `more`: parameters of each request."""
        prompts = [dict(prompt_token_ids=prompt) for prompt, _ in work]
        outputs = self._llm.generate(prompts, [self._params(new, **more) for _, new in work], use_tqdm=False)
        return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)

    def add_request(self, prompt: Sequence[int], params: SamplingParams) -> int:
        self._next_id += 1
        prompt_of_tokens = dict(type="token", prompt_token_ids=list(prompt))
        self._engine.add_request(str(self._next_id), prompt_of_tokens, self._params(params.max_tokens))
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


def timed_run(engine: VllmEngine, work: Sequence[Request], *, n: int = 1, **more: Any) -> dict[str, Any]:
    wanted = n * sum(new for _, new in work)
    begin = time.perf_counter()
    num_tokens = engine.generate(work, n=n, **more)
    seconds = time.perf_counter() - begin
    require(num_tokens == wanted, f"{num_tokens} tokens instead of {wanted}")
    return dict(requests=len(work), tokens=num_tokens, seconds=seconds, tokens_per_s=num_tokens / seconds)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=PLAIN)
    parser.add_argument("--devices", type=int, default=1, help="tensor parallel")
    parser.add_argument("--requests", nargs="*", type=int, default=[1024, 512], help="all at once")
    parser.add_argument("--rollout", action="store_true", help="64 prompts with 8 completions each, in two rounds")
    add_arrivals(parser)
    add_output(parser)
    options = parser.parse_args(arguments)
    options.toy = options.model.startswith("toy")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    jax.config.update("jax_platforms", "cpu")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # JAX has threads, which a fork would not copy
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # sends `fill` to the process of the engine
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        longest = SIZES[options.model].longest
        engine = VllmEngine(CONFIGS[options.model], folder, max_length=2 * longest, num_gpus=options.devices)
        print(f"made in {time.perf_counter() - begin:.0f} s", flush=True)
        measure_all(engine, options)


def measure_all(engine: VllmEngine, options: argparse.Namespace) -> None:
    settings = engine.settings() | dict(seconds=options.seconds, devices=options.devices)
    print(settings, flush=True)
    store = open_store(f"engine_vllm_{options.model}", options, device=engine.device, **settings)
    longest = SIZES[options.model].longest
    work = workload(max(options.requests, default=0), longest)
    engine.generate(work[:64] or rollout_work(64, longest, seed=2))
    orders = {"engine": list, "longest first": lambda work: sorted(work, key=operator.itemgetter(1), reverse=True)}
    for name, order in orders.items():
        for count in options.requests:
            engine.forget_prompts()
            point = timed_run(engine, order(work[:count]))
            store.add(f"{name} {count}", point)
            print(f"{name} {count:<6} {point['tokens_per_s']:8.0f} tokens/s, {point['seconds']:6.2f} s", flush=True)
    for version in range(2) if options.rollout else ():
        engine.forget_prompts()
        work = rollout_work(PROMPTS, longest, seed=version)
        point = timed_run(engine, work, n=COMPLETIONS, temperature=1.0, logprobs=0)
        store.add(f"round {version + 1}", point)
        print(f"round {version + 1}  {point['tokens_per_s']:8.0f} tokens/s, {point['seconds']:6.2f} s", flush=True)
    engine.forget_prompts()
    measure(engine, store, options.rates, seconds=options.seconds, longest=longest)


if __name__ == "__main__":
    main()
