#!/usr/bin/env python3
"""JAX as others write it; prints a checksum. XLA_PYTHON_CLIENT_ALLOCATOR=platform: every array is a
cudaMalloc."""
import os
import sys
import zlib

os.environ.setdefault("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
import jax
import jax.numpy as jnp
import numpy


def main():
    @jax.jit
    def step(weights, x):
        def loss(w):
            return jnp.mean((jnp.tanh(x @ w) - 0.5) ** 2)
        value, gradient = jax.value_and_grad(loss)(weights)
        return weights - 0.1 * gradient, value

    assert jax.devices()[0].platform == "gpu", jax.devices()
    weights = jax.random.normal(jax.random.PRNGKey(0), (512, 512), dtype=jnp.float32)
    crc = 0
    for i in range(60):
        x = jax.random.normal(jax.random.PRNGKey(i % 7), (256 * (i % 3 + 1), 512))
        weights, value = step(weights, x)
        crc = zlib.crc32(numpy.asarray(value).tobytes(), crc)
    crc = zlib.crc32(numpy.asarray(weights).tobytes(), crc)
    print(f"checksum {crc:08x}")


if __name__ == "__main__":
    sys.exit(main())
