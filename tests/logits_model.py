"""The changes of logits as plain equations in float64, and random parameters for them."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxpaged import SamplingParams

NEUTRAL = vars(SamplingParams())  # values that change nothing
CHANGES = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
)
FUNCTION_SIZES = dict(num_logits_ints=1, num_logits_floats=1)  # options of an engine with `forbid_repeats`


def processed(logits, prompt, new, params):
    """The logits [vocab] after a prompt and new tokens, as the parameters change them."""
    x = np.array(logits, np.float64)
    if params.allowed_token_ids is not None:
        x[~np.isin(np.arange(len(x)), params.allowed_token_ids)] = -np.inf
    for *before, last in params.bad_words:
        if len(before) <= len(new) and list(new[len(new) - len(before) :]) == before:
            x[last] = -np.inf
    if len(new) < params.min_tokens:
        x[list(params.stop_token_ids)] = -np.inf
    for token, bias in params.logit_bias.items():
        x[token] += bias
    count = np.bincount(np.array(new, int), minlength=len(x))
    is_seen = np.isin(np.arange(len(x)), [*prompt, *new])
    scaled = np.where(x > 0, x / params.repetition_penalty, x * params.repetition_penalty)
    x = np.where(is_seen, scaled, x)
    return x - params.frequency_penalty * count - params.presence_penalty * (count > 0)


def forbid_repeats(logits, context):
    """An engine's `process_logits`: forbids the newest token again, and adds a float to the logit of an int."""
    rows = jnp.arange(len(logits))
    newest = context.tokens[context.seqs, context.lengths - 1]
    logits = logits.at[rows, newest].set(-jnp.inf)
    return logits.at[rows, context.ints[context.seqs, 0]].add(context.floats[context.seqs, 0])


def repeats_forbidden(logits, prompt, new, params):
    """The same for one sequence, after `processed`."""
    x = processed(logits, prompt, new, params)
    x[[*prompt, *new][-1]] = -np.inf
    x[params.logits_ints[0] if params.logits_ints else 0] += params.logits_floats[0] if params.logits_floats else 0
    return x


def random_changes(rng, vocab_size, max_tokens, *, all_used=False):
    """Some parameters, or all, that change logits. Two thirds of the tokens are allowed, so that one can be drawn."""

    def tokens(count):
        return rng.choice(vocab_size, count, replace=False).tolist()

    changes = dict(
        presence_penalty=float(rng.uniform(-2, 2)),
        frequency_penalty=float(rng.uniform(-1, 1)),
        repetition_penalty=float(rng.uniform(0.5, 2)),
        logit_bias={token: float(rng.normal() * 3) for token in tokens(4)},
        allowed_token_ids=tokens(2 * vocab_size // 3),
        bad_words=[tokens(1), *(rng.integers(0, vocab_size, 1 + i % 3).tolist() for i in range(9))],
        min_tokens=int(rng.integers(1, max_tokens + 1)),
    )
    used = CHANGES if all_used else [name for name in CHANGES if rng.random() < 0.4]
    return {name: changes[name] for name in used}


def with_changes(params, seed, vocab_size):
    """Sampling parameters with changes of the logits in two of three."""
    rng = np.random.default_rng(seed)
    return [
        dataclasses.replace(one, **random_changes(rng, vocab_size, one.max_tokens)) if i % 3 else one
        for i, one in enumerate(params)
    ]
