"""Property tests have no deadline: how long an example takes says more about what else the machine does. Files that
tests write and then load are not writable by a group, whatever the umask outside."""
import os

import hypothesis
import pytest

from tests.helpers.process import read_ahead
from tkq.testing import sass

hypothesis.settings.register_profile("tkq", deadline=None)
hypothesis.settings.load_profile("tkq")
os.umask(os.umask(0o077) | 0o022)


@pytest.fixture
def machine_code(request):
    """Reports of the kernel that the test's mark names, read with those of tests behind it."""
    if sass.nvdisasm() is None:
        pytest.skip("nvdisasm is not installed")
    return read_ahead.reports(request.node)
