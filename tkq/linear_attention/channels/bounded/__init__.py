"""Kimi's delta rule whose gates' function and lower bound are the kernel's own."""
