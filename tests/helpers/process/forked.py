"""Something done in a process forked from this one: as another user, with other limits, or to be killed."""
import json
import os
import select
import signal
import traceback
import warnings

OTHER, THIRD = 12345, 23456  # numbers of users who need not have names


def start(work, user=None):
    """(process, descriptor on which its result will be): a fork that calls work(), as this user where one is given."""
    reading, writing = os.pipe()
    process = os.fork()
    if process:
        os.close(writing)
        return process, reading
    try:
        os.close(reading)
        if user is not None:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        try:
            outcome = {"result": work()}
        except BaseException:
            outcome = {"problem": traceback.format_exc()}
        with os.fdopen(writing, "w") as out:
            json.dump(outcome, out)
    finally:
        os._exit(0)


def ended(process, reading, seconds=30.0):
    """What the work returned. AssertionError where it failed or does not end: it is killed then."""
    parts = []
    while select.select([reading], [], [], seconds)[0] and (part := os.read(reading, 1 << 16)):
        parts.append(part)
    os.close(reading)
    if not parts:
        os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    assert parts, f"no answer in {seconds} s"
    outcome = json.loads(b"".join(parts))
    assert "problem" not in outcome, outcome["problem"]
    return outcome["result"]


def done(work, user=None, seconds=30.0):
    """work() in a fork; what it returned, which JSON has to know."""
    return ended(*start(work, user), seconds)


def with_warnings(work):
    """(what work() returns, the warnings in words)."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = work()
    return found, [str(one.message) for one in said if issubclass(one.category, UserWarning)]
