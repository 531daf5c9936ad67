"""What racecheck reports, read: which instructions, and whether it is a copy that mbarriers order."""
from tests.helpers.process.machine_code import entry_of
from tests.helpers.sanitizer.racecheck_report import by_copy, by_store, described, instructions, races
from tkq.attention.backward.plan import plan, recipe
from tkq.attention.backward.spec import BackwardSpec
from tkq.testing import sass

REPORT = """========= COMPUTE-SANITIZER
ok  varlen_gradients: D128
========= Error: Race reported between Write access at kernel_a+0x20
=========     and Read access at kernel_a+0x40 [96 hazards]
=========     and Read access at kernel_a+0x50 [1 hazard]
=========
========= Warning: Race reported between Read access at kernel_b+0x10 in a.cu:3
=========     and Write access at kernel_b+0x30 in a.cu:4 [32 hazards]
========= RACECHECK SUMMARY: 2 hazards displayed (1 errors, 1 warnings)
"""
CODE = {0x20: "@!P1 UBLKCP.S.G [UR18], [UR24], UR22", 0x40: "LDS.64 R10, [R2+UR35+0x30100]", 0x50: "LDS.64 R12, [R2]"}


def test_a_report_is_read():
    a, b = races(REPORT)
    assert a == ("kernel_a", (("Write", 0x20, 0), ("Read", 0x40, 96), ("Read", 0x50, 1)))
    assert b.accesses == (("Read", 0x10, 0), ("Write", 0x30, 32)) and b.kernel == "kernel_b"
    assert races("no race was reported") == []


def test_only_copies_and_reads_are_a_copy():
    race = races(REPORT)[0]
    assert by_copy(race, [{"another": CODE}, {"kernel_a_and_more": CODE}])
    assert not by_copy(race, []) and not by_copy(race, [{"another": CODE}]), "nothing is known of it"
    assert not by_copy(race, [{"kernel_a": {**CODE, 0x20: "STS.64 [R2], R10"}}]), "a store"
    assert not by_copy(race, [{"kernel_a": {**CODE, 0x50: "STS.64 [R2], R10"}}]), "one of the others is a store"
    assert not by_copy(race, [{"kernel_a": {**CODE, 0x20: "UBLKCP.G.S [UR2], [UR4]"}}]), "a copy the other way"
    assert not by_store(race, [{"kernel_a": CODE}])
    other_way_round = race._replace(accesses=race.accesses[1:2] + race.accesses[:1])
    assert by_copy(other_way_round, [{"kernel_a": CODE}])


def test_only_stores_and_reads_are_a_store():
    race, stored = races(REPORT)[0], {**CODE, 0x20: "@P0 STS [UR24+0x3800c], RZ"}
    assert by_store(race, [{"kernel_a": stored}]) and not by_copy(race, [{"kernel_a": stored}])
    assert not by_store(race, [{"kernel_a": {**stored, 0x50: "STS [R2], R10"}}]), "two stores"
    assert not by_store(race, []), "nothing is known of it"


def test_it_says_which_instructions():
    race = races(REPORT)[0]
    twice = [{"kernel_a": CODE}, {"kernel_a2": {**CODE, 0x40: "LDS R3, [R4]"}}]
    assert len(instructions(race, twice)) == 2
    assert described(race, twice).splitlines()[1:] == [
        "  Write at 0x20: @!P1 UBLKCP.S.G [UR18], [UR24], UR22",
        "  Read at 0x40 [96]: LDS.64 R10, [R2+UR35+0x30100] or LDS R3, [R4]", "  Read at 0x50 [1]: LDS.64 R12, [R2]"]
    assert "Write at 0x20: ?" in described(race, [])


def test_addresses_of_a_kernel_of_ours():
    """What the statistics of attention's backward are read from comes by a bulk copy."""
    spec = BackwardSpec("bf16", 128, right=True)
    path = entry_of(recipe(spec, plan(spec))).path
    listing = sass.by_address(path)
    name, code = next((name, code) for name, code in listing.items() if "BackwardPreprocess" not in name)
    assert "tkqattentionbackward" in name and not sass.by_address(path, ("another",))
    copy, read = (next(at for at, text in code.items() if word in text) for word in ("UBLKCP.S", "LDS.64"))
    one, other = (f"{what} access at {name[:150]}+{at:#x}" for what, at in (("Write", copy), ("Read", read)))
    assert by_copy(*races(f"Race reported between {one}\n and {other} [1 hazards]"), [listing])
