"""CUDA machine code as it lies in ELF files: which kernels, their registers, stack and shared memory.

Layout of ELF: the System V ABI. The .nv.info attributes are not documented; those used here were compared with what
``cuobjdump -res-usage`` prints of the same files.
"""
from __future__ import annotations

import struct
from collections.abc import Iterator

_CUDA = 190  # e_machine
_REGISTERS, _FRAME, _MAX_THREADS, _THREADS = 0x2F, 0x11, 0x05, 0x10
_SIZED, _RELA, _NO_BITS = 4, 4, 8


def cubins(data: bytes) -> list[bytes]:
    """Every CUDA ELF file in the bytes: the bytes themselves, or embedded in a host's object."""
    found = []
    at = data.find(b"\x7fELF")
    while at >= 0:
        if len(data) >= at + 64 and struct.unpack_from("<H", data, at + 18)[0] == _CUDA:
            found.append(data[at:at + _length(data, at)])
        at = data.find(b"\x7fELF", at + 4)
    return found


def kernels(cubin: bytes) -> dict[str, dict]:
    """{kernel: {registers, stack, static_smem, threads}}; threads is the block's size, or its limit, or None."""
    sections = _sections(cubin, 0)
    found = {name[6:]: dict(registers=0, stack=0, static_smem=0, threads=None)
             for name, *_ in sections if name.startswith(".text.")}
    symbols = _symbol_names(cubin, sections)
    for name, _, offset, size, _ in sections:
        if name == ".nv.info":
            for attribute, value in _attributes(cubin, offset, size):
                key = {_REGISTERS: "registers", _FRAME: "stack"}.get(attribute)
                if key and len(value) == 8:
                    symbol, number = struct.unpack("<II", value)
                    if symbols(symbol) in found:
                        found[symbols(symbol)][key] = number
        elif name.startswith(".nv.info.") and name[9:] in found:
            for attribute, value in _attributes(cubin, offset, size):
                if attribute in (_MAX_THREADS, _THREADS) and len(value) >= 12:
                    x, y, z = struct.unpack_from("<3I", value)
                    found[name[9:]]["threads"] = x * y * z
        elif name.startswith(".nv.shared.") and name[11:] in found:
            found[name[11:]]["static_smem"] = size
    return found


def architecture(cubin: bytes) -> int:
    """90 for sm_90a: in the second byte of e_flags, in files before CUDA 13 (whose ABI is 7 at most) in the first."""
    flags, = struct.unpack_from("<I", cubin, 48)
    return flags >> 8 & 0xFF if cubin[8] > 7 else flags & 0xFF


def text(cubin: bytes) -> dict[str, bytes]:
    """{kernel: its instructions}."""
    return {name[6:]: cubin[offset:offset + size] for name, _, offset, size, _ in _sections(cubin, 0)
            if name.startswith(".text.")}


def code(cubin: bytes) -> dict[str, bytes]:
    """{kernel: its instructions}, with what the loader writes into them and the constants of the compiler's own behind:
    the same bytes for the same code, whatever names have become of its kernels."""
    sections = _sections(cubin, 0)
    symbols = _symbol_names(cubin, sections)
    names = [name[6:] for name, *_ in sections if name.startswith(".text.")]
    found = {}
    for kernel in names:
        parts = []
        for name, kind, offset, size, _ in sections:
            if name == f".text.{kernel}" or (name.startswith(".nv.constant") and name.endswith(f".{kernel}")):
                parts.append((name[:-len(kernel)], cubin[offset:offset + size]))
            elif name in (f".rela.text.{kernel}", f".rel.text.{kernel}"):
                of, row = (24, "<QQq") if kind == _RELA else (16, "<QQ")
                for at in range(offset, offset + size, of):
                    where, info, *addend = struct.unpack_from(row, cubin, at)
                    symbol = symbols(info >> 32)
                    own = next((i for i, one in enumerate(names) if symbol.endswith(one)), symbol)
                    parts.append((where, info & 0xFFFFFFFF, *addend, own))
        found[kernel] = b"".join(part if isinstance(part, bytes) else repr(part).encode()
                                 for row in parts for part in row)
    return found


def _length(data, at):
    """An embedded file ends where its last table or section does."""
    headers, = struct.unpack_from("<Q", data, at + 40)
    programs, = struct.unpack_from("<Q", data, at + 32)
    program_size, program_count, size, count = struct.unpack_from("<HHHH", data, at + 54)
    ends = [offset - at + n for _, kind, offset, n, _ in _sections(data, at) if kind != _NO_BITS]
    return max(headers + size * count, programs + program_size * program_count, *ends)


def _sections(data, at) -> list[tuple]:
    """(name, type, offset in data, size, link) of each section of the file that begins at ``at``."""
    headers, = struct.unpack_from("<Q", data, at + 40)
    size, count, names = struct.unpack_from("<HHH", data, at + 58)
    rows = [struct.unpack_from("<IIQQQQIIQQ", data, at + headers + i * size) for i in range(count)]
    return [(_text(data, at + rows[names][4] + row[0]), row[1], at + row[4], row[5], row[6]) for row in rows]


def _symbol_names(data, sections):
    table = next(s for s in sections if s[0] == ".symtab")
    strings = sections[table[4]][2]
    return lambda i: _text(data, strings + struct.unpack_from("<I", data, table[2] + 24 * i)[0])


def _attributes(data, offset, size) -> Iterator[tuple[int, bytes]]:
    end = offset + size
    while offset + 4 <= end:
        form, attribute, value = struct.unpack_from("<BBH", data, offset)
        offset += 4
        if form == _SIZED:
            yield attribute, data[offset:offset + value]
            offset += value
        else:
            yield attribute, struct.pack("<H", value)


def _text(data, at) -> str:
    return data[at:data.index(b"\0", at)].decode()
