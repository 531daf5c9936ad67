"""Chunks block by block: a block of 16 tokens is a warp's, and the state takes it up before it meets the next one."""
