"""An import holds no model: its memory is bounded by its layers, measured in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.running import ROOT
from tests.environment import of_child
from tests.exchange.random_folder import TINY_LLAMA, write_folder

_MIB = 2**20
_LAYERS, _HIDDEN, _INNER = 24, 512, 2048
_CODE = """
import re, sys
from pathlib import Path
from rrfp_jax.commands.common.process import use_cpu
use_cpu(1)
from rrfp_jax.exchange.importing import plan_import, write_import

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

plan = plan_import(Path(sys.argv[1]))
before = peak()
write_import(plan, Path(sys.argv[2]))
print(peak() - before)
"""


@pytest.mark.slow
def test_an_import_takes_less_than_three_layers_and_200_mib(tmp_path: Path):
    sizes = {"hidden_size": _HIDDEN, "intermediate_size": _INNER, "num_hidden_layers": _LAYERS}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    source = write_folder(tmp_path / "theirs", TINY_LLAMA | sizes | heads, shard_bytes=100 * _MIB)
    command = [sys.executable, "-c", _CODE, str(source), str(tmp_path / "ours")]
    done = subprocess.run(command, cwd=ROOT, env=of_child(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    layer = 4 * (4 * _HIDDEN**2 + 3 * _HIDDEN * _INNER)
    assert layer * _LAYERS > 3 * layer + 200 * _MIB, "the model itself would not fit"
    assert int(done.stdout) < 3 * layer + 200 * _MIB
