"""Stands for a JAX with GPUs, as the doctor asks it."""

if __name__ == "__main__":
    print('{"platform": "gpu", "num_devices": 8, "kinds": ["H100"], "jax": "0.12.0", "jaxlib": "0.12.0"}')
