from types import SimpleNamespace

import pytest

from lib.checkpoint import load_model, read_checkpoint
from tests.examples.tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The tiny random model of `tiny_checkpoint`: its path, tensors, config, tokenizer and the model itself."""
    path = tmp_path_factory.mktemp("tiny") / "model"
    tensors = write_checkpoint(path)
    read = read_checkpoint(path)
    model = load_model(read, "float32")
    return SimpleNamespace(path=path, tensors=tensors, config=read.config, tokenizer=read.tokenizer, model=model)
