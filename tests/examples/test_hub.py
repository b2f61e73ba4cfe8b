"""Models by name on the Hugging Face hub, without a network."""

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("huggingface_hub")

import huggingface_hub

import serve
from lib import hub
from lib.checkpoint import CheckpointError, read_checkpoint
from tests.examples.tiny_checkpoint import write_checkpoint

NAME = Path("some-org/Tiny-0.1B")
NEEDED = [
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
]


def test_a_name_is_downloaded_with_the_files_that_are_read(tmp_path, monkeypatch):
    def snapshot_download(name, *, allow_patterns, ignore_patterns):
        files = [
            *NEEDED,
            "README.md",
            "pytorch_model.bin",
            "consolidated.safetensors",
            "original/a.json",
            "onnx/a.jinja",
        ]
        patterns = dict(allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        assert list(huggingface_hub.utils.filter_repo_objects(files, **patterns)) == NEEDED
        write_checkpoint(tmp_path / name)
        return str(tmp_path / name)

    (tmp_path / NAME).parent.mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert read_checkpoint(NAME).config.num_layers == 1
    assert serve.model_name(NAME) == str(NAME)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty hub cache, and an unreachable hub."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    return tmp_path / "hub"


def test_a_model_in_the_cache_needs_no_network(cache, tmp_path):
    write_checkpoint(tmp_path / "model")
    repository = cache / "models--some-org--Tiny-0.1B"
    snapshot = repository / "snapshots" / ("0" * 40)
    for folder in (snapshot, repository / "refs", repository / "blobs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    for file in (tmp_path / "model").iterdir():
        file.rename(repository / "blobs" / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs", file.name))
    assert read_checkpoint(NAME).config.num_layers == 1


def test_without_a_network_the_command_to_type_is_named(cache):
    with pytest.raises(CheckpointError, match=r"downloaded \(.+\); .* type: hf download some-org/Tiny-0.1B$") as error:
        read_checkpoint(NAME)
    assert len(str(error.value).splitlines()) == 1


def test_a_model_that_needs_a_login_is_reported(monkeypatch):
    def snapshot_download(*_, **options):
        response = SimpleNamespace(headers={}, request=None)
        raise huggingface_hub.errors.GatedRepoError("401 Client Error.\nAccess is restricted.", response=response)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(NAME)
    assert "(401 Client Error. Access is restricted)" in str(error.value)
    assert str(error.value).endswith("type: hf auth login && hf download some-org/Tiny-0.1B")


def test_an_unresponsive_hub_times_out(cache, monkeypatch):
    monkeypatch.setattr(hub, "SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(CheckpointError, match="hf download some-org/"):
            read_checkpoint(NAME)


@pytest.mark.parametrize("path", ["missing", "/a/b", "a/b/c", "a/b.gguf", "../b", "a/.."])
def test_a_path_is_not_looked_up_on_the_hub(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(CheckpointError, match=r"^There is no checkpoint at \S+\.$"):
        read_checkpoint(Path(path))
