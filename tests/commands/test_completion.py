"""``rrfp config --completion``: scripts that shells accept, and what bash offers behind a half-written line."""

import shutil
import subprocess
from pathlib import Path

import pytest

from rrfp_jax.commands import config
from rrfp_jax.commands.main import COMMANDS
from rrfp_jax.commands.training.config_sources import preset_names
from rrfp_jax.schedules import schedule_names

BASH = shutil.which("bash")
DRIVER = """
set -u
source "$1"
complete -p rrfp
while IFS= read -r line; do
    read -ra COMP_WORDS <<<"$line"
    [[ $line == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _rrfp
    echo "${COMPREPLY[*]-}"
done
"""
OFFERED = {
    "rrfp ": {*COMMANDS},
    "rrfp tr": {"train"},
    "rrfp train --num-sta": {"--num-stages"},
    "rrfp train --vis": {"--vision"},
    "rrfp train --print": {"--print-config"},
    "rrfp train --tie-embeddings ": {"true", "false"},
    "rrfp train --steps 5 --consume s": {"strict"},
    "rrfp train --config cpu/": {name for name in preset_names() if name.startswith("cpu/")},
    "rrfp train --schedule zb": {name for name in schedule_names() if name.startswith("zb")},
    "rrfp simulate --show s": {"slots"},
    "rrfp convert ex": {"export"},
    "rrfp launch --bind ": {"cores", "none"},
    "rrfp launch --processes 4 -- ev": {"evaluate"},
    "rrfp launch --processes 4 -- train --config tpu/": {name for name in preset_names() if name.startswith("tpu/")},
    "rrfp launch --processes 4 -- simulate --num-micro": {"--num-microbatches"},
    "rrfp launch --max-": {"--max-restarts"},
    "rrfp config --explain pipeline.wind": {"pipeline.window"},
    "rrfp config --show tpu/v5e": {"tpu/v5e_16"},
    "rrfp config --completion z": {"zsh"},
    "rrfp replay mine": {"mine.yaml"},
    "rrfp train --config min": {"mine.yaml"},
    "rrfp train --run.seed ": set(),
    "rrfp train --zzz": set(),
}


@pytest.mark.skipif(BASH is None, reason="no bash here")
def test_bash_completes_commands_options_and_values(tmp_path: Path) -> None:
    script = tmp_path / "rrfp"
    script.write_text(config.completion_script("bash"))
    (tmp_path / "mine.yaml").touch()
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    done = subprocess.run(
        ["bash", "--norc", "-c", DRIVER, "bash", script],
        input="".join(f"{line}\n" for line in OFFERED),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    registered, *offered = done.stdout.splitlines()
    assert registered == "complete -o bashdefault -F _rrfp rrfp"
    assert {line: {*words.split()} for line, words in zip(OFFERED, offered, strict=True)} == OFFERED


@pytest.mark.parametrize("shell", config.SHELLS)
def test_the_script_of_a_shell_is_accepted_by_it(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert config.main(["--completion", shell]) == 0
    text = capsys.readouterr().out
    assert "num-stages" in text
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here to read its script")
    (tmp_path / "script").write_text(text)
    assert subprocess.run([shell, "-n", tmp_path / "script"], check=False, timeout=60).returncode == 0


def test_a_shell_without_a_script_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        config.main(["--completion", "cmd"])
    assert ended.value.code == 2
    assert "choose from" in capsys.readouterr().err
