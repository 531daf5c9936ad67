"""Sequences of up to 32768 tokens in bf16, each of them in the shared memory of one thread block."""
