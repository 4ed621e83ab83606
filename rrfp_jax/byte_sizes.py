"""Numbers of bytes as people write them: ``512MiB``, ``1.5 KiB``, ``5GB``."""

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(text: str, what: str) -> int:
    """Returns the bytes of a text such as ``512MiB``; raises ValueError, which names ``what``, on anything else."""
    for unit, factor in reversed((_UNITS | _DECIMAL).items()):
        number = text.strip().removesuffix(unit)
        if number != text.strip():
            try:
                num_bytes = float(number) * factor
                if 1 <= num_bytes < float("inf"):
                    return int(num_bytes)
            except ValueError:
                break
    raise ValueError(f"{what} is {text!r}, which is no size: write a number and a unit, for example 512MiB or 2GiB")


def format_bytes(num_bytes: int) -> str:
    """Returns a number of bytes in words, ``1536`` as ``1.5 KiB``."""
    for unit, factor in reversed(_UNITS.items()):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.4g} {unit}"
    return "0 B"
