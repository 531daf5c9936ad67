"""The workspace of `two_phase.SingleLaunch`: where its halves are, as host and kernels count. Pure Python."""

LINE = 32  # numbers in a cache line: the tickets have one, and so has each half's count


def workspace_size(largest: int) -> int:
    """Fewest numbers of a workspace in which ``largest`` maxima are found."""
    return LINE + 2 * (LINE + largest)


def half_of(size):
    """Numbers of each half, of a workspace of ``size``."""
    return (size - LINE) // 2


def first_of(size, number):
    """The first of half ``number``."""
    return LINE + number * half_of(size)
