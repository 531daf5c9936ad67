"""Property tests have no deadline: how long an example takes says more about what else the machine does. Files that
tests write and then load are not writable by a group, whatever the umask outside."""
import os

import hypothesis

hypothesis.settings.register_profile("tkq", deadline=None)
hypothesis.settings.load_profile("tkq")
os.umask(os.umask(0o077) | 0o022)
