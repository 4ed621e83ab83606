"""Start JAX and print what it sees, as one line of JSON; run in a process of its own, which may fail or hang."""

import json
from importlib.metadata import version


def main() -> None:
    """Import, start, print."""
    import jax

    devices = jax.devices()
    kinds = list(dict.fromkeys(device.device_kind for device in devices))
    seen = {"platform": devices[0].platform, "num_devices": len(devices), "kinds": kinds}
    print(json.dumps({**seen, "jax": jax.__version__, "jaxlib": version("jaxlib")}))


if __name__ == "__main__":
    main()
