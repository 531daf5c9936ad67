"""What `python -m tkq bench` is asked for: options, shapes, cases and peers."""
import re
import shlex
import types

import pytest
import torch

import tkq.__main__
from bench import __main__ as front
from bench.core import command, command_line, ops
from bench.core.command import Bench
from bench.ops import attention_forward
from bench.report import readme_table
from tests.helpers.process.markdown import PAGES
from tkq.testing import timing

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")


def test_operations_may_stand_anywhere():
    given = command_line.parse(["--quick", "rmsnorm", "--against", "torch.compile", "swiglu", "--sections", "forward"])
    assert given.ops == ["rmsnorm", "swiglu"] and given.against == ("torch.compile",)
    assert given.sections == ("forward",) and given.quick


@NO_GPU
def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    assert front.main([]) == 2
    monkeypatch.setattr("sys.argv", ["tkq"])
    with pytest.raises(SystemExit) as left:
        tkq.__main__.main(["bench", "rmsnorm", "--against", "quack,liger"])
    assert left.value.code == 2
    assert capsys.readouterr().out.count("it needs a GPU, and PyTorch finds none here") == 2


@pytest.mark.parametrize("argv, words", (
    (["rmsnrom"], "op: unknown rmsnrom; did you mean rmsnorm? Valid: flash_attn, flash_attn_varlen, flash_attn_with_"),
    (["--against", "quack,fa4x"],
     "--against: unknown fa4x; did you mean fa4? Valid: torch.compile, cudnn, cublas, quack, quack-tuned, fa4, liger"),
    (["--sections", "zzz"], "--sections: unknown zzz. Valid: 128x128, 1x128, 1x128_128x128, 1x128_1x128,"),
    (["--part", "4/4"], "got '4/4', allowed is such as 0/4"),
    (["--again", "gemm"], "--again: unknown gemm. Valid: short, peers"),
    (["--rounds", "5"], "--rounds: at least 7, so that a median means something; got 5"),
    (["--compare", "nothing.json"], "nothing.json is not there"),
    (["--calls-only", "--no-calls"], "--calls-only and --no-calls: allowed is one of them"),
    (["rmsnorm", "sustained", "--calls-only"], "--calls-only: sustained has no calls to price; allowed are flash"),
))
def test_what_is_wrong_names_what_is_right(argv, words, capsys):
    with pytest.raises(SystemExit) as left:
        front.main(argv)
    assert left.value.code == 2 and words in capsys.readouterr().err


def test_what_holds_no_results_is_named(tmp_path, capsys):
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "broken.json").write_text("{")
    for path, words in ((tmp_path / "other.json", "has no results"), (tmp_path / "broken.json", "cannot be read")):
        for option in ("--compare", "--results"):
            with pytest.raises(SystemExit) as left:
                command_line.parse([option, str(path)])
            assert left.value.code == 2 and f"{path} {words}" in capsys.readouterr().err


def test_a_single_files_tables_do_not_replace_those_of_its_folder():
    file = readme_table.RESULTS / "norms.json"
    assert command_line.parse(["--results", str(file)]).out == command_line.OUT
    assert command_line.parse(["--results", str(file.parent)]).out == file.parent


def test_commands_in_the_docs_are_right(monkeypatch):
    monkeypatch.setattr(command_line, "_unreadable", lambda path: None)
    texts = [front.__doc__, *(page.read_text() for page in PAGES)]
    lines = [line for text in texts for line in re.findall(r"^ *python -m tkq bench\b(.*)$", text, re.MULTILINE)]
    lines = [line for line in lines if "FILE" not in line]  # of shapes
    assert len(lines) > 8
    for line in lines:
        command_line.parse(shlex.split(line.partition("   ")[0], comments=True))


def test_shapes_of_a_file():
    text = "# of a model\nrmsnorm 8192x4096 16x32  # two\n\nflash_attn 4096x128\n"
    assert command_line.read_shapes(text) == {"rmsnorm": ((8192, 4096), (16, 32)), "flash_attn": ((4096, 128),)}


@pytest.mark.parametrize("text, words", (
    ("rmsnrom 1x2", "did you mean rmsnorm?"), ("rope 1x2x3x4", "rope: its shapes cannot be chosen"),
    ("gemm 4096x4096", "gemm: got 4096x4096, allowed are such as 4096x4096x4096"),
    ("softmax 1x", "softmax: got 1x, allowed are such as 32768x1024"),
    ("softmax", "softmax: no shapes, such as 32768x1024")))
def test_shapes_that_are_wrong(text, words, tmp_path, capsys):
    with pytest.raises(ValueError, match=words.replace("?", r"\?")):
        command_line.read_shapes(text)
    (tmp_path / "shapes").write_text(text)
    with pytest.raises(SystemExit):
        command_line.parse(["--shapes", str(tmp_path / "shapes")])
    assert words in capsys.readouterr().err


def test_every_part_is_there_and_every_section_is_in_one():
    of = {}
    for part in (part for parts in ops.OPS.values() for part in parts):
        of.setdefault(part.bench, set()).update(part.sections)
    for name, sections in of.items():
        bench = ops.bench_of(name)
        assert bench.name == name and sections <= set(bench.sections)
        assert set(bench.sections) - sections <= {"variants", "gqa"}, name  # configurations, no peers; another file's
    assert set(tkq.__all__) >= set(ops.OPS)
    assert all(hasattr(ops.extra_of(name), "main") for name in ops.EXTRAS)


@NO_GPU
@pytest.mark.parametrize("name", ops.EXTRAS)
def test_files_with_a_main_of_their_own_say_that_they_need_a_gpu(name, capsys, tmp_path):
    assert ops.extra_of(name).main(["--out", str(tmp_path)]) == 2
    assert "needs a GPU" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_every_committed_case_has_a_title():
    for file, report in readme_table.drawn(readme_table.reports()).items():
        if file in ("gemm_sustained", "llama", "cold_start", "chapters"):
            continue
        for case in report.cases:
            assert ops.title(file, case.section, case.op), (file, case.section, case.op)


def options(*argv):
    return command_line.parse(list(argv))


def test_cases_are_those_of_the_operation_with_the_peers_that_are_asked_for():
    found = command_line.jobs_of("layernorm", options("--against", "quack", "--quick"))
    assert {(bench.name, job.question.op) for bench, job in found} == {
        ("norms", "layernorm"), ("norm_backward", "layernorm_backward")}
    assert {job.peer_names for _, job in found} == {("QuACK", "copy"), ("QuACK", "add")}
    assert not command_line.jobs_of("layernorm", options("--sections", "dense"))


def test_the_effort_is_the_files_own_but_for_what_is_asked():
    bench = Bench("made_up", "", {}, effort=timing.Effort(9, 0.3, graphs=False))
    assert front.effort(bench, options()) == bench.effort
    assert front.effort(bench, options("--quick")) == timing.Effort(
        command.QUICK.rounds, command.QUICK.round_seconds, graphs=False)
    assert front.effort(bench, options("--quick", "--rounds", "8", "--round-seconds", "2")).round_seconds == 2.0


@pytest.mark.parametrize("op", ("gemm", "fp8_gemm"))
def test_large_products_are_bursts_after_a_rest_unless_idle_says_otherwise(op):
    rests = {(job.question.section, job.question.shape.partition(" ")[0]): job.idle_seconds
             for _, job in command_line.jobs_of(op, options())}
    assert {rest for (section, _), rest in rests.items() if section not in ("few", "batched")} == {command.REST}
    assert {rest for (section, _), rest in rests.items() if section in ("few", "batched")} == {0.0}
    for idle in ("0", "0.5"):
        assert {job.idle_seconds for _, job in command_line.jobs_of(op, options("--idle", idle))} == {float(idle)}
    assert {job.idle_seconds for _, job in command_line.jobs_of("softmax", options())} == {0.0}


def test_a_small_product_takes_turns_without_rest():
    assert command.rest(2048, 2048, 2048) == 0.0 and command.rest(4096, 4096, 4096) == command.REST


def test_shapes_choose_cases(tmp_path):
    (tmp_path / "shapes").write_text("rmsnorm 64x32\n")
    chosen = options("--shapes", str(tmp_path / "shapes"))
    assert chosen.ops == ["rmsnorm"]
    assert [(job.question.section, job.question.shape) for _, job in command_line.jobs_of("rmsnorm", chosen)] == [
        (section, "M64 N32") for section in ("forward", "residual", "backward")]  # heads have shapes of their own


def test_gates_take_every_shape_that_is_named():
    chosen = options()
    usual = {op: [job.question.shape for _, job in command_line.jobs_of(op, chosen)] for op in ("swiglu", "geglu")}
    assert len(usual["swiglu"]) == 6 and set(usual["geglu"]) == {"M8192 N8192"}
    chosen.shapes = command_line.read_shapes("geglu 64x32 8x16")
    found = [job.question.shape for _, job in command_line.jobs_of("geglu", chosen)]
    assert len(found) == 8 and found.count("M64 N32") == found.count("M8 N16")  # two kinds, forward and backward


def test_cublas_is_behind_torch_where_torch_has_float8():
    job = types.SimpleNamespace(peer_op="fp8_gemm", peer_names=("torch", "QuACK", "plain"))
    assert ops.beside(job, ("cublas",)) == ("torch", "plain") and ops.beside(job, ("quack",)) == ("QuACK", "plain")
    assert ops.beside(types.SimpleNamespace(**{**vars(job), "peer_op": "softmax"}), ("cublas",)) == ("plain",)


def test_what_is_not_installed_is_named(monkeypatch):
    def none(name):
        raise ops.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(ops.metadata, "version", none)
    assert ops.absent(("quack", "torch", "fa4")) == {
        "quack": "quack-kernels is not installed", "fa4": "flash-attn-4 is not installed"}
    monkeypatch.setattr(ops.importlib.util, "find_spec", lambda name: None)
    assert ops.absent(("deepgemm", "fa3")) == {
        "deepgemm": "deep_gemm is not installed", "fa3": "flash_attn_interface is not installed"}
    monkeypatch.setattr(ops.importlib.util, "find_spec", lambda name: name == "vllm" or None)  # which brings DeepGEMM
    assert list(ops.absent(("deepgemm", "fa3"))) == ["fa3"]


def test_a_file_with_more_words_is_of_the_longest_name():
    assert ops.title("attention_forward_varlen", "varlen", "attention_forward") == "flash_attn_varlen"
    assert ops.title("attention_backward_varlen", "backward", "attention_backward_varlen") == (
        "flash_attn_varlen, backward")
    assert ops.title("gemm_sustained", "burst", "gemm bf16") is None
    assert attention_forward.BENCH.name == "attention_forward"
