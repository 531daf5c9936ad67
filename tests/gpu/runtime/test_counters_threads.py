"""Counters that are first asked for where nothing has bound CUDA's context: in a new thread, whose memory is cached."""
import threading

import torch

from tkq.runtime.call import counters


def test_a_new_thread(monkeypatch):
    torch.cuda.synchronize()
    for name in ("_of_stream", "_scratch", "_of_graphs"):
        monkeypatch.setattr(counters, name, {})
    found = []

    def ask():
        try:
            found.extend((counters.counter(0), counters.with_scratch(0, 9)))
        except BaseException as problem:  # for the thread that waits
            found.append(problem)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert [x.tolist() for x in found] == [[0], [0] * 9]


def test_while_another_thread_captures(monkeypatch):
    """The first call on a new stream, of a device whose store is there: neither it nor the capture fails."""
    counters.counter(0)
    x, found = torch.ones(1000, device="cuda"), []

    def ask():
        with torch.cuda.stream(torch.cuda.Stream()):
            try:
                found.extend((counters.counter(0), counters.with_scratch(0, 11)))
            except BaseException as problem:
                found.append(problem)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    graph.replay()
    assert torch.equal(y, x + 1)
    assert [x.tolist() for x in found] == [[0], [0] * 11]
