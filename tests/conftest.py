"""Options of the test run, and the GPU suite as a whole: it runs on an sm_90 device. Elsewhere it is skipped where it
is asked for, by a path in tests/gpu, and a run of all tests does not look at it: each worker would read thousands of
tests for nothing. One test in tests/cpu/testing/test_mutants.py collects it.

Most of the GPU suite's time is the compilation of its kernels. On a machine that starts with an empty cache they can
come from an earlier run, and only those are compiled whose sources have changed since:

    python -m pytest tests/gpu -n 16 --kernel-cache kernels.tar.xz

The file is unpacked before the run, where there is one, and made anew behind it; how many kernels each test file asked
for is printed. Where the GPU is the dearer machine,
`python -m tests.helpers.process.kernel_cache refresh kernels.tar.xz` compiles what has changed since ahead of the next
run, without a GPU. `tests/helpers/process/kernel_cache.py` says more.
"""
import gc
import os
import pathlib
import re

import pytest

from tests.helpers.process import kernel_cache, long_first, sampled

# Of several workers each has its share of the cores, before torch is imported: threads of PyTorch's operations wait for
# each other without giving up the core that the other worker's need.
if "PYTEST_XDIST_WORKER" in os.environ:
    _SHARE = len(os.sched_getaffinity(0)) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _SHARE)))
    # Nor has each worker processes of its own that compile for torch.compile: they import PyTorch once more.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

_GPU_TESTS = pathlib.Path(__file__).parent / "gpu"
_skipped = pytest.StashKey[int]()
_left_out = pytest.StashKey[str]()  # why the GPU suite is not looked at
_logs = pytest.StashKey[object]()  # pytest's plugin that keeps them


def pytest_addoption(parser):
    parser.addoption("--all-kernels", action="store_true",
                     help="compile every kernel that tkq ships, not only those that stand for the others")
    parser.addoption("--kernel-cache", metavar="FILE",
                     help="compiled kernels to begin with; when the tests are through, those that there are then")
    parser.addoption("--slow", action="store_true", help="the slow GPU tests too: repeats, huge tensors, every variant")


def pytest_configure(config):
    file = config.getoption("--kernel-cache")
    if file:
        of_gpu = lambda item: _GPU_TESTS in item.path.parents
        config.pluginmanager.register(kernel_cache.Carried(pathlib.Path(file), hasattr(config, "workerinput"), of_gpu))


def pytest_runtest_logreport(report):
    """A failure is printed where it happens, too: a run that is cut off, as on a lent machine, has no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nfailed: {report.nodeid}\n{str(report.longrepr)[-600:]}", flush=True)


def _why_no_gpu():
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"{torch.cuda.get_device_name()} is not an sm_90 device"
    return None


def _is_one_of_all(config):
    """Is the GPU suite looked at because all tests are, and not because a path in it was given?"""
    paths = [(config.invocation_params.dir / arg.partition("::")[0]).resolve() for arg in config.args]
    given = any(_GPU_TESTS in (path, *path.parents) for path in paths)
    return not given and any(path in _GPU_TESTS.parents for path in paths)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """What is read before the first test stays to the end, and takes the garbage collector a third of the time that
    reading it takes, and a tenth of what kernels take to compile: it does not look at these objects. Behind that it
    looks once in 50,000 new objects, at all of them once in 100,000,000: as Python has it, a twentieth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)
        gc.enable()


def pytest_collection_finish(session):
    """Logs are kept for those tests that ask for them: pytest hangs a handler on each logger of PyTorch three times a
    test and takes it off again, which is a quarter of what it takes to run a short one."""
    session.config.stash[_logs] = session.config.pluginmanager.unregister(name="logging-plugin")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    plugins, logs = item.config.pluginmanager, item.config.stash[_logs]
    if logs is None or "caplog" not in item.fixturenames:
        return (yield)
    plugins.register(logs, "logging-plugin")
    try:
        return (yield)
    finally:
        plugins.unregister(logs)


def pytest_ignore_collect(collection_path, config):
    if collection_path != _GPU_TESTS or config.option.collectonly or not _is_one_of_all(config):
        return None
    why = _why_no_gpu()
    if why:
        config.stash[_left_out] = why
        if hasattr(config, "workeroutput"):
            config.workeroutput["left_out"] = why
        return True
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Of pytest-xdist: a worker has ended."""
    if why := getattr(node, "workeroutput", {}).get("left_out"):
        node.config.stash[_left_out] = why


def pytest_collection_modifyitems(config, items):
    sampled.mark(items)
    if not config.getoption("--slow") and "slow" not in config.getoption("-m"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
    on_gpu = [item for item in items if _GPU_TESTS in item.path.parents]
    for item in on_gpu:
        item.add_marker(pytest.mark.gpu)
    why = _why_no_gpu() if on_gpu else None
    if on_gpu and not why and "PYTEST_XDIST_WORKER" in os.environ:
        by_name = {item.nodeid: item for item in items}
        items[:] = map(by_name.get, long_first.ordered([*by_name]))
    if why:
        config.stash[_skipped] = len(on_gpu)
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=f"GPU suite: {why}"))


def pytest_terminal_summary(terminalreporter, config):
    if why := config.stash.get(_left_out, None):
        terminalreporter.write_line(f"GPU suite left out: it needs an sm_90 GPU (H100, H200); {why}")
    # With pytest-xdist each worker counts for itself; the reports say it here, and why, so that this process, whose end
    # all wait for, needs no torch.
    said = [found[1] for report in terminalreporter.stats.get("skipped", ())
            if (found := re.search(r"GPU suite: ([^'\"]*)", str(report.longrepr)))]
    skipped = config.stash.get(_skipped, 0) or len(said)
    if skipped:
        why = said[0] if said else "not run here"
        terminalreporter.write_line(f"GPU suite skipped: {skipped} tests need an sm_90 GPU (H100, H200); {why}")
