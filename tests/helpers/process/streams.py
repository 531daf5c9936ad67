"""What the order of launches must not change: inputs that come late on a stream, and launches under the end of the one
before. For tests on a GPU."""
import torch


def on_a_side_stream(call, x):
    """``call`` of x, on another stream than the current one and behind what writes it there: elsewhere it would read
    zeros. Its kernel is compiled."""
    stream, late = torch.cuda.Stream(), torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(x)
        found = call(late)
    stream.synchronize()
    return found


def check_back_and_forth(run, first, weights, pairs, captured):
    """``run(source, weight, target)`` with one weight there and with the other back, ``pairs`` times: each reads what
    the one before wrote, and writes what that one read. Bit for bit as with a pause after each launch. captured: from a
    graph."""
    def back_and_forth(x, y, times, wait=lambda: None):
        for _ in range(times):
            for source, weight, target in ((x, weights[0], y), (y, weights[1], x)):
                run(source, weight, target)
                wait()

    want, got = ((first.clone(), torch.empty_like(first)) for _ in range(2))
    back_and_forth(*want, pairs, torch.cuda.synchronize)
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            back_and_forth(*got, 10)
        for _ in range(pairs // 10):
            graph.replay()
    else:
        back_and_forth(*got, pairs)
    torch.cuda.synchronize()
    assert want[0].float().abs().mean() > 0.1, "nothing is left to compare"
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(got, want))
