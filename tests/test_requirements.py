"""What is pinned goes together: for each Python one JAX, and for each accelerator the plugins of that JAX."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rrfp_jax.hardware import OLDEST_DRIVER, PACKAGES, TPU

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = [*PACKAGES]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"constraints-{name}.txt").read_text().splitlines()
    return {
        canonicalize_name(package): at for line in lines if "==" in line for package, _, at in [line.partition("==")]
    }


def needed(extra: str | None = None) -> dict[str, Requirement]:
    texts = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    return {each.name: each for each in map(Requirement, texts)}


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_is_jaxs_own_with_the_same_floor(extra: str) -> None:
    own, jax = needed(extra)["jax"], needed()["jax"]
    assert (own.extras, own.specifier) == ({extra}, jax.specifier)
    if extra != TPU:
        nccl = needed(extra)[f"nvidia-nccl-{extra.replace('cuda', 'cu')}"]
        assert "2.30.7" not in nccl.specifier, "pipelines over several GPUs hang with it"
        assert "2.31.2" in nccl.specifier


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("python", ["py311", "py312"])
def test_the_plugins_of_the_pinned_jax_are_pinned(python: str, extra: str) -> None:
    base, beside = pins(python), pins(f"{python}-{extra}")
    assert not base.keys() & beside.keys()
    assert {*PACKAGES[extra]} <= beside.keys()
    if extra in OLDEST_DRIVER:
        assert {beside[package] for package in PACKAGES[extra]} == {base["jax"]}
        for requirement in needed(extra).values():
            assert {**base, **beside}[requirement.name] in requirement.specifier


@pytest.mark.parametrize("python", ["py311", "py312"])
def test_what_is_needed_is_pinned_within_its_bounds(python: str) -> None:
    for name, requirement in needed().items():
        assert pins(python)[canonicalize_name(name)] in requirement.specifier, name
