"""Rows that are held in registers and read once."""
