"""From the outputs of an engine to the pieces of an answer: text, logprobs and finish reasons."""

import math
from collections.abc import AsyncIterator, Sequence

from jaxpaged import RequestOutput
from lib.engine_thread import Generation
from lib.openai_answers import Piece
from lib.openai_forms import Ask
from lib.service import Service
from lib.text_stream import TextStream


async def make_pieces(
    service: Service, ask: Ask, generation: Generation, usage: dict[str, int]
) -> AsyncIterator[Piece]:
    """Yields pieces as they arrive, and counts their tokens in `usage`."""
    tokenizer = service.checkpoint.tokenizer
    has_offsets = ask.params.logprobs and not ask.is_chat
    texts = [TextStream(tokenizer, ask.stops, has_offsets=has_offsets) for _ in range(generation.num_completions)]
    open_ones = set(range(generation.num_completions))
    echoes: dict[int, Piece] = {}  # what completions begin with
    async for i, output in generation.outputs():
        if ask.params.prompt_logprobs and not (output.finished or is_scored(output)):
            continue  # another output follows, which has what this one has
        for k, completion in enumerate(output.outputs):
            index = i * ask.params.n + k
            if index not in open_ones:
                continue
            piece = Piece(index)
            if ask.is_echoed and index not in echoes:
                echoes[index] = make_echo(service, ask, generation.requests[i][0], output)
                piece.add(echoes[index])
            text = texts[index]
            start = text.num_tokens
            token_ids = completion.token_ids if ask.max_tokens != 0 else []  # the engine makes one
            piece.text += text.extend(token_ids, is_last=completion.finish_reason is not None)
            piece.finish_reason = "stop" if text.is_stopped else completion.finish_reason
            if ask.max_tokens == 0 and piece.finish_reason == "stop":
                piece.finish_reason = "length"
            if piece.finish_reason is not None:
                open_ones.remove(index)
            if completion.finish_reason is None and text.is_stopped:
                service.engine.end(generation, i, k)
            usage["completion_tokens"] += text.num_tokens - start
            usage["total_tokens"] += text.num_tokens - start
            if completion.logprobs is not None:
                new = slice(start, text.num_tokens)
                before = len(echoes[index].text) if ask.is_echoed else 0
                top_logprobs = completion.top_logprobs and completion.top_logprobs[new]
                add_tokens(service, piece, token_ids[new], completion.logprobs[new], top_logprobs)
                piece.offsets += [before + offset for offset in text.offsets[start:]]
            if piece.text or piece.finish_reason or piece.tokens:
                yield piece
        if not open_ones:
            return


def make_echo(service: Service, ask: Ask, prompt: list[int], output: RequestOutput) -> Piece:
    """The prompt, as its tokens are decoded."""
    text = TextStream(service.checkpoint.tokenizer, has_offsets=ask.params.logprobs)
    piece = Piece(0, text.extend(prompt, is_last=True))
    if output.prompt_logprobs is not None:
        logprobs = [None if p is None or math.isnan(p) else p for p in output.prompt_logprobs]
        add_tokens(service, piece, prompt, logprobs, output.prompt_top_logprobs)
        piece.offsets += text.offsets
    return piece


def add_tokens(
    service: Service,
    piece: Piece,
    token_ids: list[int],
    logprobs: Sequence[float | None],
    top_logprobs: Sequence[dict[int, float] | None] | None,
) -> None:
    piece.tokens += map(service.text_of, token_ids)
    piece.logprobs += logprobs
    for likely in top_logprobs or ():
        piece.top_logprobs.append([(service.text_of(token), logprob) for token, logprob in (likely or {}).items()])


def is_scored(output: RequestOutput) -> bool:
    """Whether the logprobs of all of the prompt's tokens are there: those of the last come last."""
    assert output.prompt_logprobs is not None
    last = output.prompt_logprobs[-1]
    return last is None or not math.isnan(last)
