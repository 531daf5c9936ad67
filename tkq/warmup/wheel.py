"""A bundle as a package that pip installs and tkq finds by itself: ``tkq-kernels-cu13``, or ``-cu12``."""
from __future__ import annotations

import base64
import csv
import hashlib
import io
import pathlib
import platform
import re
import zipfile

from ..runtime.compile.bundle import NAME, PACKAGE
from ..version import __version__

MOST = 100_000_000  # bytes of a wheel
_OLDEST = 17  # glibc 2.17: what the tag manylinux_2_17 promises, the oldest one that pip knows
_INIT = '"""The kernels of tkq, compiled: one shared library, which tkq finds here."""\n'


def write(folder: pathlib.Path, bundle: pathlib.Path, cuda: str) -> pathlib.Path:
    """Make the wheel of a bundle in a folder, which is made.

    cuda: the major version that the bundle is for. The wheel is for tkq of this version and this kind of processor, and
    for the glibc that the library asks for.

    Raises:
        ValueError: the wheel would be larger than 100 MB, which indexes refuse.
    """
    library, package = bundle.read_bytes(), PACKAGE.format(cuda=cuda)
    info = f"{package}-{__version__}.dist-info"
    tag = f"py3-none-manylinux_2_{_glibc(library)}_{platform.machine()}"
    files = {f"{package}/__init__.py": _INIT.encode(), f"{package}/{NAME}": library,
             f"{info}/METADATA": _metadata(package, cuda).encode(),
             f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: tkq\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()}
    data = _zipped(files, f"{info}/RECORD")
    if len(data) > MOST:
        raise ValueError(f"the wheel has {len(data) / 1e6:.1f} MB, allowed are {MOST // 1_000_000}: choose fewer "
                         "kernels, by --ops or --models")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{package}-{__version__}-{tag}.whl"
    path.write_bytes(data)
    return path


def _metadata(package, cuda):
    return (f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: {__version__}\n"
            f"Summary: The kernels of tkq, compiled for NVIDIA Hopper and CUDA {cuda}\nLicense: Apache-2.0\n"
            f"Requires-Python: >=3.10\nRequires-Dist: tkq=={__version__}\n")


def _glibc(library):
    """The minor version of the newest symbol of glibc 2 that a library asks for."""
    return max([_OLDEST, *(int(n) for n in re.findall(rb"\0GLIBC_2\.(\d+)(?=[.\0])", library))])


def _zipped(files, record):
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        writer.writerow((name, f"sha256={digest}", len(data)))
    writer.writerow((record, "", ""))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in (*files.items(), (record, rows.getvalue().encode())):
            entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))  # the same bytes for the same kernels
            entry.external_attr, entry.compress_type = 0o100644 << 16, zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return out.getvalue()
