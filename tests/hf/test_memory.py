"""An exchange holds no model: its memory is bounded by its layers, measured in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.running import ROOT
from tests.environment import of_child
from tests.hf.random_folder import TINY_LLAMA, write_folder

_MIB = 2**20
_LAYERS = 16
_CODE = """
import re, sys
from pathlib import Path
from rrfp_jax.commands.main import module_of
from importlib import import_module

import_module(module_of(sys.argv[1])).main(sys.argv[2:])
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


def peak_bytes(command: str, *arguments: object) -> int:
    """The most memory of a process that runs a command."""
    words = [sys.executable, "-c", _CODE, command, *map(str, arguments)]
    done = subprocess.run(words, cwd=ROOT, env=of_child(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1]) * 1024


@pytest.mark.slow
@pytest.mark.parametrize(("hidden", "inner"), [(1024, 4096), (2048, 4096)])
def test_an_exchange_takes_less_than_three_layers_and_200_mib(tmp_path: Path, hidden: int, inner: int):
    """Libraries included, whether the model comes in or goes back."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": _LAYERS}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    source = write_folder(tmp_path / "theirs", TINY_LLAMA | sizes | heads, shard_bytes=100 * _MIB)
    layer = 4 * (4 * hidden**2 + 3 * hidden * inner)
    most = 3 * layer + 200 * _MIB
    assert layer * _LAYERS > 2 * most, "the model itself would not fit"
    assert peak_bytes("convert", "import", source, tmp_path / "ours") < most
    assert peak_bytes("convert", "export", tmp_path / "ours", tmp_path / "back") < most
