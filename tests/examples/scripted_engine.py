"""An engine whose answers are given, with the model's tokenizer and service around it."""

import collections
import dataclasses
from types import SimpleNamespace

from jaxpaged import Completion, EngineStats, RequestOutput
from lib.engine_thread import EngineThread
from lib.engines import Engines
from lib.tool_formats import FORMATS
from tests.examples.serving import KEY
from tests.examples.tool_tokenizers import make_tokenizer


class ScriptedEngine:
    """Gives each new request the next answer of a script, some tokens in a step.

    Attributes:
        script: tokens of the answers to come. The same answer is given to all completions of a request.
        prompts: prompts of the requests so far.
        tokens_per_step: tokens between two reports.
    """

    seconds_to_spare = 0.0
    # `serving.running` checks at its end that all blocks came back.
    _options = SimpleNamespace(num_blocks=1)
    _runner = SimpleNamespace(state=SimpleNamespace(allocator=SimpleNamespace(num_free=0)))

    def __init__(self, tokens_per_step=3):
        self.script, self.prompts = collections.deque(), []
        self.tokens_per_step, self._running = tokens_per_step, {}

    @property
    def has_unfinished_requests(self):
        return bool(self._running)

    def stats(self):
        return EngineStats(num_running=len(self._running))

    def add_request(self, prompt, params):
        self.prompts.append(prompt)
        answer = self.script.popleft()[: params.max_tokens]
        reason = "stop" if answer and answer[-1] in params.stop_token_ids else "length"
        whole = Completion(answer, [-0.5] * len(answer) if params.logprobs else None, reason)
        self._running[len(self.prompts)] = [whole] * params.n, [Completion([], None, None)] * params.n
        return len(self.prompts)

    def abort(self, request_id, completion=None):
        """Ends completions where they are. As in an engine, the next step reports that."""
        wholes, parts = self._running.get(request_id, ([], []))
        for k in range(len(wholes)) if completion is None else [completion][: len(wholes)]:
            wholes[k] = dataclasses.replace(parts[k], finish_reason="abort")

    def step(self, *, may_wait=()):  # may return them anyway
        outputs = []
        for request_id, (wholes, parts) in list(self._running.items()):
            for k, whole in enumerate(wholes):
                end = len(parts[k].token_ids) + self.tokens_per_step
                logprobs = whole.logprobs and whole.logprobs[:end]
                is_last = end >= len(whole.token_ids)
                parts[k] = whole if is_last else Completion(whole.token_ids[:end], logprobs, None)
            is_finished = all(part.finish_reason is not None for part in parts)
            outputs.append(RequestOutput(request_id, list(parts), is_finished))
            if is_finished:
                del self._running[request_id]
        return outputs


def scripted_service(form, *, tokens_per_step=3, **changes):
    """A service with a scripted engine, of a model with this form of tool calls."""
    from lib.service import Service  # from the extra "serve"

    tokenizer = make_tokenizer(form == "openai")
    config = SimpleNamespace(vocab_size=tokenizer.tokenizer.get_vocab_size())
    engines = Engines([EngineThread(ScriptedEngine(tokens_per_step))], most_completions=8)
    options = dict(
        served_names=("model",), max_model_len=5000, api_key=KEY, max_body_bytes=10**5, tool_format=FORMATS.get(form)
    )
    checkpoint = SimpleNamespace(config=config, tokenizer=tokenizer)
    return Service(engines, checkpoint, **options | changes)


def engine_of(service):
    return service.engines.runners[0].engine


def answer_with(service, *texts, cut=0):
    """Puts answers into the script. With `cut`, the last tokens of each answer and its end are left out."""
    encode, (eos,) = service.checkpoint.tokenizer.encode, service.checkpoint.tokenizer.eos_ids
    for text in texts:
        tokens = encode(text)
        engine_of(service).script.append(tokens[: len(tokens) - cut] if cut else [*tokens, eos])


def prompt_of(service):
    """Text of the last prompt."""
    return service.checkpoint.tokenizer.decode(engine_of(service).prompts[-1], skip_special_tokens=False)


def merged(chunks):
    """The choices of a stream, joined as the openai client joins them for its users."""
    choices = {}
    for chunk in chunks:
        for choice in chunk.choices:
            whole = choices.setdefault(choice.index, SimpleNamespace(content=None, reasoning="", calls=[], reason=None))
            assert whole.reason is None, "a chunk after the last"
            whole.reason = choice.finish_reason
            whole.reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            if choice.delta.content is not None:
                whole.content = (whole.content or "") + choice.delta.content
            for call in choice.delta.tool_calls or []:
                if call.id is not None:  # the name comes first, once
                    assert (call.index, call.type, call.function.arguments) == (len(whole.calls), "function", "")
                    whole.calls.append([call.function.name, ""])
                else:
                    whole.calls[call.index][1] += call.function.arguments
    return [choices[index] for index in sorted(choices)]


def parts(choice):
    """The same for a choice of a whole answer."""
    message = choice.message
    calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or []]
    assert all(call.type == "function" and call.id for call in message.tool_calls or [])
    reasoning = getattr(message, "reasoning_content", None) or ""
    return SimpleNamespace(content=message.content, reasoning=reasoning, calls=calls, reason=choice.finish_reason)
