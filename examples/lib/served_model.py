"""Loads the model of examples/serve.py and creates its engine, in this process or in another one."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jaxpaged
from jaxpaged.grammar import Vocabulary
from lib.adapters import adapt, read_adapter
from lib.checkpoint import Checkpoint, load_model, read_checkpoint
from lib.command_line import matmul_precision
from lib.llama import Llama
from lib.replicas import Replica, create_replica_engine, load_replica


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """A recipe for an engine: files and options, which pickle.

    Attributes:
        path: the checkpoint.
        adapters: the folders of the adapters in the first slots.
        num_empty: number of empty slots after these.
        most_rank: the largest rank of an adapter in an empty slot.
        tensor_parallel: number of devices.
        num_blocks: blocks of the engine's pool; None: room for all seats.
    """

    path: Path
    options: jaxpaged.EngineOptions
    dtype: str
    block_size: int
    adapters: Sequence[Path] = ()
    num_empty: int = 0
    most_rank: int = 0
    tensor_parallel: int = 1
    num_blocks: int | None = None
    vocabulary: Vocabulary | None = None

    def load(self, checkpoint: Checkpoint | None = None) -> Replica:
        """The model with its adapters. Raises `CheckpointError` and `DevicesError`."""
        read = checkpoint or read_checkpoint(self.path)
        return load_replica(lambda: self._load_adapted(read), read.config, tensor_parallel=self.tensor_parallel)

    def _load_adapted(self, checkpoint: Checkpoint) -> Llama:
        model = load_model(checkpoint, self.dtype)
        if self.adapters or self.num_empty:
            factors = [read_adapter(folder) for folder in self.adapters]
            sizes = dict(num_empty=self.num_empty, most_rank=self.most_rank)
            adapt(model, checkpoint.config, factors, self.dtype, **sizes)
        return model

    def create(self, replica: Replica) -> jaxpaged.Engine:
        with matmul_precision(self.dtype):
            return create_replica_engine(
                replica,
                self.options,
                block_size=self.block_size,
                dtype=self.dtype,
                num_blocks=self.num_blocks,
                vocabulary=self.vocabulary,
            )
