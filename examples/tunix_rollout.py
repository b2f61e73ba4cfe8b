"""Uses a `jaxpaged.Engine` as the rollout engine of Tunix, and trains Tunix's Qwen3 with GRPO on a toy task, on a CPU.

    pip install google-tunix
    python examples/tunix_rollout.py

Pass `EngineRollout`, or a `functools.partial` of it, as `ClusterConfig.rollout_engine`. A prompt that Tunix repeats for
several generations is computed once, and new weights are passed by reference. In the toy task the reward is the
fraction of a completion's letters that equal the prompt's letter.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxpaged
from lib.caches import create_caches
from lib.extras import imports

with imports(__doc__):
    import optax
    from tunix.generate.base_sampler import BaseSampler, SamplerOutput
    from tunix.generate.tokenizer_adapter import TokenizerAdapter
    from tunix.models.qwen3.model import ModelConfig, Qwen3
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
    from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

    from tunix_qwen3 import paged

OPTIONS = jaxpaged.EngineOptions(max_num_seqs=64, prefix_cache=True)


class EngineSampler(BaseSampler):
    """Tunix's sampler on a `jaxpaged.Engine`, for models on one device.

    Args:
        transformer: the model, a Tunix Qwen3. For other models, write a function like `paged` in tunix_qwen3.py.
        tokenizer: any tokenizer that Tunix accepts.
        max_model_len: the most tokens of a prompt and its completion.
        block_size: tokens per block.
        options: options of the engine. `max_num_seqs` completions run at once, and `seed` makes completions of equal
            prompts differ.
    """

    def __init__(
        self,
        transformer: Qwen3,
        tokenizer: Any,
        max_model_len: int,
        *,
        block_size: int = 16,
        options: jaxpaged.EngineOptions = OPTIONS,
    ):
        self._model, self.tokenizer = transformer, TokenizerAdapter(tokenizer)
        apply, weights, head = paged(transformer)
        self._arrays = jax.tree.leaves(weights)  # the engine's arrays
        config = transformer.config
        caches = create_caches(
            options,
            max_model_len,
            num_layers=config.num_layers,
            block_size=block_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self._arrays[0].dtype,
        )
        options = dataclasses.replace(options, vocab_size=config.vocab_size, max_model_len=max_model_len)
        self.engine = jaxpaged.Engine(apply, weights, caches, head=head, options=options)

    @property
    def transformer(self) -> Qwen3:
        return self._model

    @property
    def transformer_state(self) -> nnx.State:
        return nnx.state(self._model)

    def __call__(
        self,
        input_strings: str | Sequence[str],
        max_generation_steps: int,
        max_prompt_length: int | None = None,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        beam_size: int | None = None,
        seed: Any = None,
        multi_sampling: int = 1,
        return_logits: bool = False,
        echo: bool = False,
        pad_output: bool = False,
        *,
        return_logprobs: bool = False,
        eos_tokens: Sequence[int] | None = None,
    ) -> SamplerOutput:
        """Samples a completion for each prompt. Tokens are not padded, and end with the end token if it was sampled."""
        if beam_size or multi_sampling != 1 or return_logits or echo or pad_output:
            raise ValueError(
                "EngineSampler returns one completion per prompt, without its prompt, logits or padding; got "
                f"{beam_size=}, {multi_sampling=}, {return_logits=}, {echo=}, {pad_output=}. "
                "Repeat a prompt for several completions."
            )
        self.refresh()
        tokens = [self.tokenize(x) for x in ([input_strings] if isinstance(input_strings, str) else input_strings)]
        params = [
            jaxpaged.SamplingParams(
                max_tokens=max_generation_steps,
                temperature=temperature,
                top_p=1.0 if top_p is None else top_p,
                top_k=0 if top_k is None else top_k,
                stop_token_ids=tuple(eos_tokens or (self.tokenizer.eos_id(),)),
                logprobs=return_logprobs,
                seed=None if seed is None else seed_of(seed, i),
            )
            for i in range(len(tokens))
        ]
        completions = [output.outputs[0] for output in self.engine.generate(tokens, params)]
        width = max(max_prompt_length or 0, max(map(len, tokens)))
        padded = np.full((len(tokens), width), self.tokenizer.pad_id(), np.int32)
        for row, prompt in zip(padded, tokens, strict=True):
            row[width - len(prompt) :] = prompt
        return SamplerOutput(
            text=[self.tokenizer.decode(of_one.token_ids) for of_one in completions],
            logits=None,
            tokens=[np.asarray(of_one.token_ids, np.int32) for of_one in completions],
            padded_prompt_tokens=padded,
            logprobs=[np.asarray(of_one.logprobs, np.float32) for of_one in completions] if return_logprobs else None,
        )

    def tokenize(self, input_string: str) -> list[int]:
        begin = [self.tokenizer.bos_id()] if self.tokenizer.bos_id() else []
        return self.tokenizer.dedup_bos_ids(begin + list(self.tokenizer.encode(input_string)))

    def refresh(self) -> None:
        """Updates the engine's weights if the model's variables have changed, for example in a trainer."""
        weights = nnx.state(self._model)
        arrays = jax.tree.leaves(weights)
        if any(new is not old for new, old in zip(arrays, self._arrays, strict=True)):
            self.engine.update_weights(weights)
            self._arrays = arrays


class EngineRollout(BaseRollout):
    """Tunix's rollout worker on an `EngineSampler`.

    Args:
        rollout_actor: the model.
        tokenizer: any tokenizer that Tunix accepts.
        rollout_config: its maximum prompt and completion lengths set the engine's `max_model_len`.
        mesh: not used; Tunix passes it.
        options: options of `EngineSampler`.
    """

    def __init__(
        self, rollout_actor: Qwen3, tokenizer: Any, rollout_config: RolloutConfig, mesh: Any = None, **options: Any
    ):
        del mesh
        max_model_len = rollout_config.max_prompt_length + rollout_config.max_tokens_to_generate
        self.sampler = EngineSampler(rollout_actor, tokenizer, max_model_len, **options)

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any) -> RolloutOutput:
        output = self.sampler(
            prompts,
            rollout_config.max_tokens_to_generate,
            rollout_config.max_prompt_length,
            rollout_config.temperature,
            rollout_config.top_p,
            rollout_config.top_k,
            seed=rollout_config.seed,
            return_logprobs=rollout_config.return_logprobs,
            eos_tokens=rollout_config.eos_tokens,
            **kwargs,
        )
        return RolloutOutput(output.text, output.logits, output.tokens, output.padded_prompt_tokens, output.logprobs)

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """Log probability of each completion token, float32 in the shape of the completions; 0 after a completion's
        end."""
        self.sampler.refresh()
        prompts = [row[np.argmax(row != self.pad_id()) :].tolist() for row in np.asarray(prompt_tokens)]
        completions = [self._without_padding(row) for row in np.asarray(completion_tokens)]
        logprobs = np.zeros(np.shape(completion_tokens), np.float32)
        for row, score in zip(logprobs, self.sampler.engine.score(prompts, completions), strict=True):
            row[: len(score.logprobs)] = score.logprobs
        return jnp.asarray(logprobs)

    def update_params(self, params: Any, filter_types: Any = None) -> None:
        """Updates the model's weights. `params` holds all of them, or only the types in `filter_types`."""
        del filter_types  # params has no others
        nnx.update(self.model(), params)
        self.sampler.refresh()

    def pad_id(self) -> int:
        return self.sampler.tokenizer.pad_id()

    def eos_id(self) -> int:
        return self.sampler.tokenizer.eos_id()

    def model(self) -> Qwen3:
        return self.sampler.transformer

    def _without_padding(self, tokens: np.ndarray) -> list[int]:
        """The tokens up to the first end of sequence, or without trailing padding; at least one token."""
        is_end = tokens == self.eos_id()
        length = (
            np.argmax(is_end) + 1 if is_end.any() else np.max(np.flatnonzero(tokens != self.pad_id()), initial=0) + 1
        )
        return tokens[:length].tolist()


def seed_of(seed: Any, index: int) -> int:
    return int(np.random.SeedSequence([*np.ravel(np.asarray(seed)).tolist(), index]).generate_state(1)[0])


class Letters:
    """A tokenizer for the letters a to y; ids 0 to 2 are padding, begin and end."""

    def encode(self, text: str) -> list[int]:
        return [3 + ord(letter) - ord("a") for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + i - 3) for i in ids if i > 2)

    def pad_id(self) -> int:
        return 0

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return 2


def toy_model(seed: int = 0) -> Qwen3:
    config = ModelConfig(
        num_layers=1,
        vocab_size=28,
        embed_dim=64,
        hidden_dim=128,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-6,
    )
    return Qwen3(config, rngs=nnx.Rngs(seed))


def train(num_rounds: int, seed: int = 0) -> list[float]:
    """Trains with Tunix's GRPO, and returns the mean reward of each round."""
    rng, rewards = np.random.default_rng(seed), []

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        shares = [text.count(prompt[0]) / 8 for prompt, text in zip(prompts, completions, strict=True)]
        rewards.append(float(np.mean(shares)))
        return shares

    def batches() -> Iterator[dict[str, np.ndarray]]:
        for _ in range(num_rounds):
            yield {"prompts": np.array([chr(ord("a") + i) * 8 for i in rng.integers(0, 25, 8)])}

    mesh = jax.sharding.Mesh(np.reshape(jax.devices()[:1], (1, 1)), ("fsdp", "tp"))
    model = toy_model(seed)
    cluster = RLCluster(
        actor=model,
        tokenizer=Letters(),
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
            rollout_engine=functools.partial(EngineRollout, block_size=4),
            training_config=RLTrainingConfig(
                actor_optimizer=optax.adam(3e-3), eval_every_n_steps=10**6, max_steps=num_rounds
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=8, max_prompt_length=12, temperature=1.0, return_logprobs=True
            ),
        ),
    )
    GRPOLearner(cluster, GRPOConfig(num_generations=16, beta=0.0), reward).train(batches())
    return rewards


def main() -> None:
    for i, reward in enumerate(train(60)):
        if i % 10 == 9:
            print(f"round {i}: mean reward {reward:.3f}")


if __name__ == "__main__":
    main()
