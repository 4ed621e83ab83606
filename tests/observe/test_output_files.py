"""Files appear whole or not at all."""

from pathlib import Path

import pytest

from rrfp_jax.observe.output_files import replacing


def test_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "picture.png"
    with replacing(target) as temporary:
        assert temporary.suffix == ".png"
        temporary.write_text("new")
        assert not target.exists()
    assert target.read_text() == "new"
    assert list(target.parent.iterdir()) == [target]


def test_old_file_stays_when_the_block_fails(tmp_path: Path) -> None:
    target = tmp_path / "picture.png"
    target.write_text("old")

    def fail() -> None:
        with replacing(target) as temporary:
            temporary.write_text("half")
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        fail()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
