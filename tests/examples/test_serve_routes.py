"""Paths of examples/serve.py that generate nothing: models, the tokenizer, requests' ids, other origins, logs."""

import json
import re

import pytest

import jaxpaged
from tests.examples.serving import KEY, PROMPT, ask, body, chat, complete, running, wait_for


def test_models_have_a_date_and_a_length(server):
    models = list(server.client.models.list())
    found = [(model.id, model.root, model.parent, model.max_model_len) for model in models]
    assert found == [("model", "model", None, 128), ("small", "small", "model", 128), ("large", "large", "model", 128)]
    assert 1.7e9 < models[0].created == models[2].created
    assert ask(server, "/v1/models/other")[0] == 404


def test_a_model_has_several_names_and_answers_with_the_first(server):
    with running(server.service, served_names=("org/first", "second")) as named:
        assert [model.id for model in named.client.models.list()] == ["org/first", "second", "small", "large"]
        assert named.client.models.retrieve("org/first").id == "org/first"
        for options in (dict(model="second"), dict(model="org/first")):
            assert complete(named, max_tokens=1, **options).model == "org/first"
        assert json.loads(ask(named, body='{"prompt": "a"}')[2])["model"] == "org/first"
        assert complete(named, max_tokens=1, model="large").model == "large"
        status, _, answer = ask(named, body=body())
        assert (status, "there is 'org/first', 'second', 'small', 'large'." in answer) == (404, True)


def test_tokens_and_texts_are_converted(server, tiny):
    def post(path, **fields):
        status, _, answer = ask(server, path, json.dumps(fields))
        return status, json.loads(answer)

    prompt = "a<eos>\u00fc"
    tokens = tiny.tokenizer.encode(prompt)
    status, answer = post("/tokenize", prompt=prompt, model="small", add_special_tokens=False, return_token_strs=True)
    assert (status, answer["tokens"], answer["count"]) == (200, tokens, len(tokens))
    assert (answer["max_model_len"], answer["token_strs"][:2]) == (128, ["a", "<eos>"])
    assert post("/detokenize", tokens=tokens) == (200, {"prompt": prompt})
    assert post("/detokenize", tokens=[]) == (200, {"prompt": ""})
    messages = [{"role": "user", "content": PROMPT}]
    (expected,) = tiny.tokenizer.encode_conversations([messages])
    status, answer = post("/tokenize", messages=messages, add_generation_prompt=True)
    assert (status, answer["tokens"], answer["token_strs"]) == (200, expected, None)
    for path, fields, message in (
        ("/tokenize", {}, "The field 'prompt' is missing."),
        ("/tokenize", dict(prompt=7), "prompt must be a text; got 7."),
        ("/tokenize", dict(prompt="a", model="other"), "The model 'other' does not exist here"),
        ("/tokenize", dict(prompt="a", add_generation_prompt=True), "add_generation_prompt is not supported here"),
        ("/detokenize", dict(tokens=[300]), "tokens must hold token ids from 0 to 299."),
        ("/detokenize", dict(tokens="a"), "tokens must be a list of token ids."),
    ):
        status, answer = post(path, **fields)
        assert (status // 100, message in answer["error"]["message"]) == (4, True), answer


def test_lm_eval_finds_a_remote_tokenizer_if_the_server_shows_it(server, tiny):
    assert ask(server, "/tokenizer_info")[0] == 404
    with running(server.service, has_tokenizer_info=True) as shown:
        info = json.loads(ask(shown, "/tokenizer_info")[2])
        assert ask(shown, "/tokenizer_info", Authorization="")[0] == 401
    assert (info["eos_token"], info["bos_token"]) == ("<eos>", None)
    assert info["chat_template"] == tiny.tokenizer.chat_template
    assert isinstance(info["tokenizer_class"], str)


def test_the_version_equals_the_package(server):
    assert json.loads(ask(server, "/version", Authorization="")[2]) == {"version": jaxpaged.__version__}


def test_a_request_keeps_its_id_or_gets_one(server):
    _, headers, answer = ask(server, body=body(), **{"X-Request-Id": "mine-1"})
    assert (headers["x-request-id"], json.loads(answer)["id"]) == ("mine-1", "cmpl-mine-1")
    for sent in ("", "a" * 129, "caf\u00e9"):
        headers = ask(server, body="[]", **{"X-Request-Id": sent})[1]
        assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])
    with complete(server, max_tokens=1, stream=True) as stream:
        assert stream.response.headers["x-request-id"]


def test_pages_of_other_origins_need_an_option(server):
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    preflight |= {"Access-Control-Request-Headers": "authorization,content-type"}
    headers = ask(server, body=body(), **preflight)[1]
    assert "Access-Control-Allow-Origin" not in headers
    status, headers, _ = ask(server, "/v1/completions", method="OPTIONS", **preflight)
    assert (status, headers["Access-Control-Allow-Origin"]) == (405, None)
    with running(server.service, allowed_origins=("https://a.example",)) as opened:
        for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
            headers = ask(opened, body=body(max_tokens=1), Origin=origin)[1]
            assert headers["Access-Control-Allow-Origin"] == allowed
        status, headers, _ = ask(opened, method="OPTIONS", **preflight)
        assert (status, headers["Access-Control-Allow-Headers"]) == (200, "authorization,content-type")


@pytest.mark.usefixtures("server")  # starts a server first: its logging must not use capfd's stderr
def test_work_and_requests_are_logged(service, gate, monkeypatch, capfd):
    monkeypatch.setattr("lib.engine_metrics.REPORT_SECONDS", 0.05)
    with running(service, logs_requests=True) as server:
        stream = complete(server, max_tokens=4, n=5, stream=True, extra_headers={"x-request-id": "mine"})
        lines = []
        wait_for(lambda: lines.extend(capfd.readouterr().err.splitlines()) or "5 waiting" in "".join(lines))
        gate.set()
        list(stream)
        chat(server, "b", max_tokens=3, extra_headers={"x-request-id": "chat"})
        ask(server, body="[]", **{"X-Request-Id": "refused"})
        ask(server, "/health")
    lines += capfd.readouterr().err.splitlines()
    assert "0 running, 5 waiting, 0.0 tokens/s, 64 of 64 blocks free" in lines
    by_id = {name: rest for name, _, rest in (line.partition(": ") for line in lines)}
    pattern = r"POST '/v1/completions' 200 in \d+.\d\d s, model, 19 prompt tokens, \d+ of them cached, 20 new tokens, "
    assert re.fullmatch(pattern + "length, length, length, length, length", by_id["mine"])
    assert re.fullmatch(r"POST '/v1/chat/completions' 200 in .* 3 new tokens, length", by_id["chat"])
    assert re.fullmatch(r"POST '/v1/completions' 400 in \d+.\d\d s", by_id["refused"])
    assert not any("health" in line for line in lines)
    assert not any(text in line for text in (KEY, PROMPT) for line in lines)
