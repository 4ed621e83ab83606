"""``rrfp convert``: the refusals of its options; tests/exchange has the conversions themselves."""

from pathlib import Path

import pytest

from rrfp_jax.commands import convert
from rrfp_jax.commands.common.errors import BadInput


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--dtype", "float16"), "dtype is float16, in which no model here computes: give float32 or bfloat16"),
        (("--shard-size", "1GB"), "shard-size is about the files of an export"),
    ],
)
def test_an_import_refuses_what_only_an_export_takes(options: tuple[str, ...], words: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=words):
        convert.main(["import", str(tmp_path), str(tmp_path / "new"), *options])
    assert not (tmp_path / "new").exists()


def test_a_folder_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    for way in (convert.IMPORT, convert.EXPORT):
        with pytest.raises(BadInput, match=str(tmp_path)):
            convert.main([way, str(tmp_path), str(tmp_path)])
    assert (tmp_path / "kept").exists()
