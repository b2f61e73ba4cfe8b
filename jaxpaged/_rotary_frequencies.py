"""Rotary frequencies, for long contexts scaled as the `rope_scaling` of a Hugging Face config says.

linear     f' = f / factor
llama3     f' = f where a rotation is short, f / factor where it is long, blended between
yarn       as llama3, blended over the pairs of dimensions; logits are multiplied by attention_factor ** 2
dynamic    f'_i = f_i / growth ** (i / (pairs - 1)), growth = factor * max_length / context - (factor - 1)
longrope   f'_i = f_i / long_factor_i, or short_factor_i within the context of training; attention_factor as with yarn
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

CONTEXT = "original_max_position_embeddings"  # tokens of the model's training context
KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")


def rotary_frequencies(
    head_dim: int,
    theta: float | None = None,
    scaling: Mapping[str, Any] | None = None,
    *,
    max_length: int | None = None,
) -> tuple[float, ...]:
    """The angle per token of each pair of dimensions, `theta ** (-2 i / head_dim)`, `head_dim // 2` numbers.

    The scalings "dynamic" (NTK) and "longrope" depend on the length of a sequence. A cache holds rotated keys, so all
    its keys need the same frequencies: those for `max_length`. Hugging Face transformers uses other frequencies while a
    sequence is shorter, and does not rotate the cached keys again when it switches. Both agree for a prompt of
    `max_length` tokens, and everywhere if `max_length` is within the training context.

    Args:
        head_dim: the number of rotated dimensions. With `partial_rotary_factor` in `scaling`: all dimensions of a head,
            of which that part is rotated.
        theta: the base. None: `rope_theta` of `scaling`, or 10,000.
        scaling: `rope_scaling` (or `rope_parameters`) of a Hugging Face config, of type "linear", "llama3", "yarn",
            "dynamic" or "longrope". "yarn" and "longrope" also need `rotary_attention_factor`. "dynamic" and "longrope"
            need `original_max_position_embeddings`, and the attention factor of "longrope" needs `factor`: if the
            config has them elsewhere, add them.
        max_length: the most tokens of a sequence, needed by "dynamic" and "longrope".

    Raises:
        ValueError: an odd number of dimensions to rotate; a theta that differs from the scaling's; an unknown scaling,
            or a missing field.

    Example:
        >>> import jaxpaged
        >>> jaxpaged.rotary_frequencies(4)
        (1.0, 0.01)
        >>> jaxpaged.rotary_frequencies(16, scaling={"partial_rotary_factor": 0.25, "rope_theta": 10_000.0})
        (1.0, 0.01)
    """
    scaling = {} if scaling is None else scaling
    theta, rotary_dims = _read_theta(scaling, theta), _read_rotary_dims(scaling, head_dim)
    frequencies = tuple(theta ** (-2 * i / rotary_dims) for i in range(rotary_dims // 2))
    return _scaled(frequencies, theta, scaling, max_length)


def _read_theta(scaling: Mapping[str, Any], theta: float | None) -> float:
    if scaling.get("rope_theta") is None:
        return 10_000.0 if theta is None else theta
    found = _number(scaling, "rope_theta")
    if theta not in (None, found):
        raise ValueError(
            f"theta must be rope_theta of the rotary scaling, or None; got {theta=} and rope_theta={found}."
        )
    return found


def _read_rotary_dims(scaling: Mapping[str, Any], head_dim: int) -> int:
    """The dimensions of a head that are rotated."""
    part = 1.0 if scaling.get("partial_rotary_factor") is None else _number(scaling, "partial_rotary_factor")
    rotary_dims = int(part * head_dim)  # as transformers rounds
    if not 2 <= rotary_dims <= head_dim or rotary_dims % 2:
        raise ValueError(
            "a rotary embedding turns an even number of dimensions, up to head_dim; got "
            f"{head_dim=} and partial_rotary_factor={part:g}."
        )
    return rotary_dims


def _scaled(
    frequencies: tuple[float, ...], theta: float, scaling: Mapping[str, Any], max_length: int | None
) -> tuple[float, ...]:
    match _read_kind(scaling):
        case "default":
            return frequencies
        case "dynamic":
            return _by_dynamic_ntk(frequencies, scaling, max_length)
        case "longrope":
            return _by_longrope(frequencies, scaling, max_length)
        case "linear":
            kept = [0.0] * len(frequencies)
        case "llama3":
            kept = _kept_by_llama3(frequencies, scaling)
        case "yarn":
            kept = _kept_by_yarn(len(frequencies), theta, scaling)
    factor = _number(scaling, "factor")
    return tuple(share * f + (1 - share) * f / factor for share, f in zip(kept, frequencies, strict=True))


def rotary_attention_factor(scaling: Mapping[str, Any] | None) -> float:
    """The factor by which a `rope_scaling` multiplies q and k: 1 except for "yarn" and "longrope".

    If whole heads are rotated, pass `scale=head_dim**-0.5 * factor**2` to the attention; the cached keys do not include
    the factor. If only a part of each head is rotated, multiply that part of q and k by the factor. With
    `mscale_all_dim`, as in DeepSeek's models, the logits have another factor: see `scale` of `LatentSettings`.

    Args:
        scaling: as in `rotary_frequencies`.

    Raises:
        ValueError: an unknown scaling, or a missing field.

    Example:
        >>> import jaxpaged
        >>> round(jaxpaged.rotary_attention_factor({"rope_type": "yarn", "factor": 4.0}), 4)
        1.1386

    References:
        Peng et al., YaRN, 2023 (https://arxiv.org/abs/2309.00071), section 3.4.
        Ding et al., LongRoPE, 2024 (https://arxiv.org/abs/2402.13753).
    """
    if scaling is None or _read_kind(scaling) not in ("yarn", "longrope"):
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor = _number(scaling, "factor")
    if _read_kind(scaling) == "longrope":
        return math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(_number(scaling, CONTEXT)))

    def of(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return of(mscale) / of(mscale_all_dim) if mscale and mscale_all_dim else of(1.0)


def _read_kind(scaling: Mapping[str, Any]) -> str:
    if nested := [name for name, value in scaling.items() if isinstance(value, Mapping)]:
        raise ValueError(f"pass the rotary scaling of one type of layers: {' or '.join(nested)}.")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in KINDS:
        raise ValueError(f"a rotary scaling must be one of {', '.join(KINDS)}; got {kind!r}.")
    return kind


def _kept_by_llama3(frequencies: tuple[float, ...], scaling: Mapping[str, Any]) -> list[float]:
    context = _number(scaling, CONTEXT)
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    if low >= high:
        raise ValueError(f"low_freq_factor must be below high_freq_factor; got {low} and {high}.")
    turns = (context * f / (2 * math.pi) for f in frequencies)  # in the training context
    return [min(max((n - low) / (high - low), 0.0), 1.0) for n in turns]


def _kept_by_yarn(num_pairs: int, theta: float, scaling: Mapping[str, Any]) -> list[float]:
    context = _number(scaling, CONTEXT)

    def pair_index(turns: float) -> float:  # of the pair with this many turns in the training context
        return num_pairs * math.log(context / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair_index(scaling.get("beta_fast") or 32.0), pair_index(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    width = last - first or 0.001
    return [1.0 - min(max((i - first) / width, 0.0), 1.0) for i in range(num_pairs)]


def _by_dynamic_ntk(
    frequencies: tuple[float, ...], scaling: Mapping[str, Any], max_length: int | None
) -> tuple[float, ...]:
    factor, context = _number(scaling, "factor"), _number(scaling, CONTEXT)
    growth = factor * max(_known(max_length, "dynamic"), context) / context - (factor - 1)
    last = max(len(frequencies) - 1, 1)
    return tuple(f * growth ** (-i / last) for i, f in enumerate(frequencies))


def _by_longrope(
    frequencies: tuple[float, ...], scaling: Mapping[str, Any], max_length: int | None
) -> tuple[float, ...]:
    is_long = _known(max_length, "longrope") > _number(scaling, CONTEXT)
    name = "long_factor" if is_long else "short_factor"
    factors = scaling.get(name)
    if not isinstance(factors, list | tuple) or len(factors) != len(frequencies):
        raise ValueError(f"the rotary scaling needs {name}, a list of {len(frequencies)} numbers; got {factors!r}.")
    return tuple(f / _number({name: factor}, name) for f, factor in zip(frequencies, factors, strict=True))


def _known(max_length: int | None, kind: str) -> int:
    if max_length is None:
        raise ValueError(f"a rotary scaling of type {kind!r} depends on the length of sequences; pass max_length.")
    return max_length


def _number(scaling: Mapping[str, Any], name: str) -> float:
    value = scaling.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"the rotary scaling needs {name}, a number above 0; got {value!r}.")
    return float(value)
