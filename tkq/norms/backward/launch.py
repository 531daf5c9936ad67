"""The kernels of a norm's backward, of which a call takes the one that its number of rows is for: see `plan`."""
from ...rows.persistent import launch
from ...rows.persistent.spec import RowSpec
from ...runtime.compile import dry_run
from ...runtime.device import arch
from .plan import limits


class ByRows:
    """A launcher that calls the one of its launchers that is for a call's number of rows. makes: of each, the most rows
    and a function that makes it."""

    def __init__(self, makes: tuple):
        self.most = [most for most, _ in makes]
        self.makes = [make for _, make in makes]
        self.made = [None] * len(makes)

    def make_all(self) -> None:
        for i, make in enumerate(self.makes):
            self.made[i] = make()

    def __call__(self, loads, *others) -> None:
        rows, i = loads[0].shape[0], 0
        while self.most[i] is not None and rows > self.most[i]:
            i += 1
        run = self.made[i]
        if run is None:
            run = self.made[i] = self.makes[i]()
        run(loads, *others)


def launcher(spec: RowSpec, device):
    """What launches a spec's calls."""
    found = limits(spec.shape, arch.num_sms(device))
    makes = tuple((most, lambda p=p: launch.launcher(spec, device, p)) for most, p in found)
    if len(makes) == 1:
        return makes[0][1]()
    arch.require_hopper(device)
    run = ByRows(makes)
    if dry_run.under_way():  # a bundle has the kernels of all rows
        run.make_all()
    return run
