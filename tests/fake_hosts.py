"""Hosts with accelerators that are not there: a stand-in for nvidia-smi, and packages that look installed."""

from pathlib import Path

NO_DRIVER = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."


def fake_smi(folder: Path, driver: str | None) -> Path:
    """Make ``folder``, to stand first on the PATH; its nvidia-smi knows two GPUs with this driver, or fails."""
    folder.mkdir(parents=True, exist_ok=True)
    script = f'echo "{NO_DRIVER}"; exit 9' if driver is None else f"echo {driver}; echo {driver}"
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)
    return folder


def fake_package(folder: Path, name: str, version: str = "0.10.2") -> Path:
    """Make ``folder``, to stand on PYTHONPATH, say that a package is installed."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def fake_plugin(folder: Path, body: str) -> Path:
    """Make ``folder``, to stand on PYTHONPATH, hold a plugin for JAX whose ``initialize`` does this."""
    package = folder / "jax_plugins" / "xla_cuda13"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"def initialize():\n    {body}\n")
    return fake_package(folder, "jax-cuda13-plugin")
