"""Imported by the process that the examples are forked from: it has read tkq's sources, all of which count for kernels
of a module that imports tkq itself, and each of a dozen processes would parse them anew for two seconds."""
from tkq.runtime.compile import sources

for _name, _path in sources.reached(("tkq",)).items():
    sources._parsed(_name, _path)
