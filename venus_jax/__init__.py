"""venus_jax: Realtime-Venus in JAX, a full-duplex audio-visual assistant as a pure function."""

__version__ = "0.1.0"
