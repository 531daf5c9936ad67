"""tkq's version, which entries of caches and bundles name. `pyproject.toml` has the same one."""
__version__ = "0.2.0"
