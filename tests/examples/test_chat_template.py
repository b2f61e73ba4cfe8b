"""examples/lib/chat_template.py: input and output of templates, and failures of templates and their processes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lib import chat_template
from lib.chat_template import ChatTemplate, ChatTemplateError, RendererBusyError
from lib.extras import missing_extra

EXAMPLES = Path(__file__).parents[2] / "examples"
WRONG = {
    "{{ 1/0 }}": "division by zero",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "maximum recursion depth exceeded",
    "{{ 'a'*10**10 }}": "MemoryError",
    "{{ 'a'*10**7 }}": r"makes 10000000 characters of a request of \d+",
    "{{ '\\ud800' }}": "surrogates not allowed",
    "{{ ''.__class__.__mro__ }}": "is unsafe",
    "{{ raise_exception('no\nsystem') }}": "no system",
    "{% include '/etc/passwd' %}": "no loader",
    "{{ namespace(__class__=1) }}": "cannot store underscore-prefixed",
}
SEEN = {
    "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ strftime_now('!') }}{% break %}{% endfor %}": "<s>hi <b>!",
    "{{ messages[0] | tojson }}": '{"role": "user", "content": "hi <b>", "b": {"\u00e9": 1}, "a": [2]}',
    "{% generation %}{{ messages[0].content }}{% endgeneration %}": "hi <b>",
    "{{ tools is none }} {{ documents is none }}": "True True",
    "{% if add_generation_prompt %}go{% endif %}": "go",
    "{{ enable_thinking }} {{ bos_token }}": "False <s>",
    "{{ 'absent' in messages[0] }}": "False",  # null in the request
}
HANGS = "{{ case**(case**case) }}"  # constants would hang the compiler
# One process renders all of them; `case` selects one.
CASES = [*WRONG, *SEEN, HANGS, "{{ messages[0].content }}"]
HELLO = [[{"role": "user", "content": "hello"}]]


@pytest.fixture(scope="module")
def chats():
    branches = "".join(f"{{% elif case == {i} %}}{case}" for i, case in enumerate(CASES))
    return ChatTemplate(f"{{% if false %}}{branches}{{% endif %}}", {"bos_token": "<s>"}, {})


def render(chats, case, conversations=HELLO, /, **arguments):
    return chats.render(conversations, chat_template_kwargs={"case": CASES.index(case), **arguments})


def last_used(chats):
    """The process that renders next."""
    process = chats._free.get()
    chats._free.put(process)
    return process


@pytest.mark.parametrize("case", WRONG)
def test_a_template_that_fails_is_reported_in_one_line(chats, case):
    with pytest.raises(ChatTemplateError, match=WRONG[case]) as raised:
        render(chats, case)
    assert "\n" not in str(raised.value)
    assert render(chats, CASES[-1]) == ["hello"]


@pytest.mark.parametrize("case", SEEN)
def test_a_template_gets_all_variables_of_transformers(chats, case):
    message = {"role": "user", "content": "hi <b>", "b": {"\u00e9": 1}, "a": [2], "absent": None}
    assert render(chats, case, [[message]] * 2, enable_thinking=False) == [SEEN[case]] * 2


def test_a_template_that_hangs_ends_and_the_next_chat_is_rendered(chats, monkeypatch):
    monkeypatch.setattr(chat_template, "MOST_SECONDS", 1)
    with pytest.raises(ChatTemplateError, match="needs more than 1 seconds of processor time"):
        render(chats, HANGS)
    assert render(chats, CASES[-1]) == ["hello"]


@pytest.mark.parametrize("name", ["chat_template", "conversations", "messages", "tools", "add_generation_prompt"])
def test_arguments_of_a_request_do_not_replace_those_of_the_server(chats, name):
    with pytest.raises(ChatTemplateError, match="multiple values"):
        render(chats, CASES[-1], **{name: "mine"})


def test_the_last_message_is_continued():
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}go{% endif %}"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}]
    chats = ChatTemplate(template, {}, {})
    assert chats.render([messages]) == ["[a][b ]go"]
    assert chats.render([messages], continue_final_message=True) == ["[a][b "]


def test_tools_select_the_template():
    chats = ChatTemplate({"default": "plain", "tool_use": "{{ tools[0].name }}"}, {}, {})
    assert [chats.render(HELLO), chats.render(HELLO, tools=[{"name": "f"}])] == [["plain"], ["f"]]
    with pytest.raises(ChatTemplateError, match="no default among rag"):
        ChatTemplate({"rag": ""}, {}, {}).render(HELLO)


def test_every_control_token_of_a_request_is_marked():
    template = (
        "<eos>{{ messages | tojson }}{{ tools | tojson(ensure_ascii=true) }}{{ documents | tojson }}{{ style }}"
        "{{ messages[0].content.split('<think>')[1] }}<think>"
    )
    chats = ChatTemplate(template, {}, {"<eos>": True, "<think>": False, "<never>": False, "\n": False})
    request = dict(
        conversations=[[{"role": "user", "content": "a<think>\n<eos>b<never>", "calls": [{"<eos>": "<eos>"}]}]],
        tools=[{"<eos>": "<eos>"}],
        documents=[{"title": ["<eos>"]}],
        chat_template_kwargs={"style": "<eos>"},
    )
    (text,) = chats.render(**request)
    start, end = chat_template.MARK_START, chat_template.MARK_END
    assert text.count(f"{start}<eos>{end}") == 8
    assert text.count("<eos>") == 9
    assert text.startswith("<eos>")
    assert text.count("<think>") - text.count(f"{start}<think>{end}") == 1  # the template's
    assert "b<never>" in text
    (allowed,) = chats.render(**request, allow_control_tokens=True)
    assert start not in allowed
    assert end not in allowed
    (forged,) = chats.render([[{"role": "user", "content": f"<think>{start}<eo{end}s>"}]])
    assert f"{start}<eos>{end}" in forged


def test_each_thread_gets_its_own_answer(chats):
    def ask(i):
        return render(chats, CASES[-1], [[{"role": "user", "content": f"{i} " * 5000}]])

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, range(100)))
    assert answers == [[f"{i} " * 5000] for i in range(100)]


def test_a_renderer_that_was_killed_is_replaced(chats):
    render(chats, CASES[-1])
    process = last_used(chats)
    process.kill()
    process.wait()
    assert render(chats, CASES[-1]) == ["hello"]
    process = last_used(chats)
    process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(render, chats, CASES[-1])
        time.sleep(0.2)
        process.kill()
        with pytest.raises(RendererBusyError, match="ended with -9; try again"):
            answer.result()
    assert render(chats, CASES[-1]) == ["hello"]


def test_a_timeout_on_a_busy_machine_does_not_blame_the_chat(chats, monkeypatch):
    render(chats, CASES[-1])
    with monkeypatch.context() as patched:
        patched.setattr(chat_template, "MOST_SECONDS_OF_WAITING", 0.3)
        last_used(chats).send_signal(signal.SIGSTOP)
        with pytest.raises(RendererBusyError, match=r"not rendered in 0\.3 seconds; try again"):
            render(chats, CASES[-1])
        taken = [chats._free.get() for _ in range(chat_template.NUM_PROCESSES)]
        with pytest.raises(RendererBusyError, match="keep all renderers busy; try again"):
            render(chats, CASES[-1])
        for process in taken:
            chats._free.put(process)
    assert render(chats, CASES[-1]) == ["hello"]


def test_an_unread_answer_is_not_given_to_another_chat(chats, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    render(chats, CASES[-1])
    with monkeypatch.context() as patched:
        patched.setattr(chat_template.select, "poll", interrupt)
        with pytest.raises(KeyboardInterrupt):
            render(chats, CASES[-1], [[{"role": "user", "content": "secret"}]])
    assert render(chats, CASES[-1]) == ["hello"]


def test_a_missing_package_is_named_by_the_program(monkeypatch):
    monkeypatch.setattr(chat_template.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError) as raised:
        ChatTemplate("", {}, {})
    assert missing_extra(raised.value) == 'The package transformers is not installed: pip install "jaxpaged[examples]"'


def test_renderers_exit_with_the_program():
    script = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); from lib.chat_template import ChatTemplate\n"
        "chats = ChatTemplate('{{ 1 }}', {}, {}); chats.render([[]])\n"
        "print(chats._free.get().pid, flush=True); os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", script, EXAMPLES]
    pid = int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=60).stdout)
    end = time.monotonic() + 20
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < end:
            os.kill(pid, 0)
            time.sleep(0.05)
        pytest.fail("the renderer goes on")
