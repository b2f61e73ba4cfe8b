"""examples/decode_loop.py, and the message of each program without the packages of its extra."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxpaged
from decode_loop import BLOCK_SIZE, HEAD_DIM, KV_HEADS, MAX_BLOCKS, NUM_BLOCKS, SEQS, decode, weights

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN_WITHOUT_EXTRAS = """
import contextlib, io, json, runpy, sys
sys.path.insert(0, sys.argv[1])
from lib.extras import PIP

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in PIP:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Finder())
for line in sys.stdin:
    sys.argv = json.loads(line)
    code, out, err = 0, *(io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as done:
            code = done.code
    print(json.dumps([code, *(stream.buffer.getvalue().decode() for stream in (out, err))]))
"""


def test_a_program_without_its_extra_has_help_and_names_the_extra(tmp_path):
    model = [f"--model={tmp_path}"]
    readers = "generate", "data_parallel", "parallel_sampling", "beam_search", "speculative"
    options = {name: [*model, "--prompt=a"] for name in readers} | dict(serve=[*model, "--port=0"])
    options |= dict(gemma_linen=[], skyrl_tx=[], tunix_qwen3=[], tunix_rollout=[])
    assert options.keys() | {"decode_loop", "rollout", "router_replay"} == {
        file.stem for file in EXAMPLES.glob("*.py")
    }  # all of the programs
    runs = [[f"{EXAMPLES / name}.py", *words] for name in options for words in (["--help"], options[name])]
    command = [sys.executable, "-c", RUN_WITHOUT_EXTRAS, EXAMPLES]
    lines = "\n".join(map(json.dumps, runs))
    done = subprocess.run(command, input=lines, check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    for (program, *words), (code, out, err) in zip(runs, map(json.loads, done.splitlines()), strict=True):
        if words == ["--help"]:
            assert (code, err) == (0, ""), program
            assert len(out.splitlines()) > 3
        else:
            assert code == 2, (program, out, err)
            pattern = rf"{Path(program).name}: The package \w+ is not installed: pip install \S+\n"
            assert re.fullmatch(pattern, err), (program, err)


def test_decode_loop_runs_as_a_script():
    command, x64 = [sys.executable, EXAMPLES / "decode_loop.py"], os.environ | {"JAX_ENABLE_X64": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=x64).stdout.splitlines()
    assert len(done) == SEQS + 1
    assert done[-1].endswith("blocks are free")


def test_decode_loop_stops_frees_and_survives_a_pool_that_is_too_small():
    def run(num_blocks):
        sizes = dict(num_blocks=num_blocks, block_size=BLOCK_SIZE)
        heads = dict(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
        seqs = dict(num_seqs=SEQS, max_blocks_per_seq=MAX_BLOCKS)
        cache = jaxpaged.KVCache.create(**sizes, **heads, dtype="float32")
        allocator = jaxpaged.BlockAllocator.create(**sizes, **seqs)
        tokens = jnp.arange(SEQS)
        _, allocator, generated = jax.jit(decode)(weights, cache, allocator, tokens)
        return allocator, np.asarray(generated)

    _, plenty = run(NUM_BLOCKS)
    allocator, scarce = run(7)
    for full, cut in zip(plenty, scarce, strict=True):
        count = (cut >= 0).sum()
        assert (full[:count] == cut[:count]).all()
        assert (cut[count:] == -1).all()
    assert (scarce >= 0).sum() < (plenty >= 0).sum()
    assert int(allocator.num_free) == 6 - int(-(-allocator.lengths // BLOCK_SIZE).sum())
