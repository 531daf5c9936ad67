"""A training step of a 1.2-billion-parameter Llama, patched with tkq and unpatched; and decoding.

    python -m bench.studies.llama [--sections eager,compiled,learning,generate] [--linear none,fp8_tensor]

bf16, S 4096, AdamW (torch's fused one, for all: part of every step), the model of examples/llama_train.py. Steps are
timed by the host's clock, in turns of two after one that does not count, with the same parameters, gradients and
optimizer for all; Python's collector leaves alone what was there before. The unpatched model has the fastest of torch's
attention backends, found before, in eager mode.
Compiled: each decoder layer and the loss; whole: all of the forward in one graph, which takes a minute to compile for
each; beside both the patched models in eager mode. Work: 6 operations a parameter and token, and attention's. Host:
until all of a step's work is asked for, the GPU being idle before; a step that takes hardly longer waits for the host.
Of each a profile of one step is saved. Learning: 200 steps from the same weights, of tkq's float8 layers too. Results
go to OUT/llama.json after every section, to llama_profile.json with every profile, and to llama_learning.json after
every 50 steps. Exit status 0 if every bound holds, 1 if not or if something did not run, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import pathlib
import statistics
import sys
import threading
import time
from collections.abc import Iterator

import torch

from bench.core import harness
from bench.core.results import Bound, Case, Cost, Environment, Report, run_here
from bench.studies import llama_profile
from tkq.testing import timing

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))
import llama_generate
import llama_train

SECTIONS = ("eager", "compiled", "whole", "learning", "generate")
AT_LEAST = {"eager": 1.15, "compiled": 1.03, "whole": 1.03}
APART = 0.005  # curves of losses, relatively
SEQLEN, STEPS = 4096, 200
DECODE = ((1, 1024), (8, 1024))  # sequences, tokens of the prompt
DECODED = 128
CUDA_MEMORY = {"num_device_alloc": "allocations by CUDA", "num_alloc_retries": "retries"}  # while steps are timed


def operations(model, sizes, batch: int, seqlen: int) -> int:
    """Of a step: three times those of a forward. Embeddings are looked up, but they are the head's weight too."""
    parameters = sum(p.numel() for p in model.parameters())
    heads = sizes["num_hidden_layers"] * sizes["num_attention_heads"] * sizes["head_dim"]
    return 6 * parameters * batch * seqlen + 3 * 2 * batch * heads * seqlen**2  # causal: half of 4 S^2 D


@contextlib.contextmanager
def readings(every: float = 0.5) -> Iterator[list]:
    """The GPU's clock and power while something runs, read every ``every`` seconds."""
    found, monitor, over = [], harness.Monitor(), threading.Event()

    def read():
        while monitor.live and not over.wait(every):
            found.append(monitor.read())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield found
    finally:
        over.set()
        reader.join()


def by_regions(run):
    """The run, with each decoder layer and the loss compiled: of a model that is not compiled yet."""
    for layer in run.call.model.layers:
        layer.compile()
    run.call.loss_function = torch.compile(run.call.loss_function)


class Steps:
    """The models and ways to make a step, which share all parameters. out: a folder for profiles and curves.
    attention: of torch, None for the fastest."""

    def __init__(self, sizes, batch, seqlen, linears, out, attention=None):
        self.sizes, self.shape, self.out, self.begin = sizes, (batch, seqlen), out, time.perf_counter()
        self.profiles = {}  # of one step, by the run's name
        self.model = llama_train.make_model(sizes)
        self.batches = llama_train.language(batch, seqlen, STEPS, sizes["vocab_size"])
        self.optimizer = llama_train.make_optimizer(self.model, 0.0)  # the weights stay
        self.plain, self.backends = self.attention(attention)
        self.best = self.plain.name.partition("(")[2].rstrip(")")
        self.linears = {"tkq": "tkq", **{f"tkq, {each}": None if each == "none" else each for each in linears}}

    def attention(self, name):
        if name is None:
            return llama_train.with_best_attention("torch", self.model, self.batches, self.optimizer)
        return llama_train.Run(f"torch ({name})", self.model, llama_train.BACKENDS[name]), {}

    def ours(self, name: str):
        """A model of its own, with the same parameters."""
        return llama_train.patched(self.model, self.linears[name])[0]

    def introduce(self):
        """The compiler of PyTorch 2.11 writes out an operator's operands, and theirs, where it first meets it: in a
        deep model that takes minutes. So it meets all of them in one layer."""
        model = llama_train.make_model({**self.sizes, "num_hidden_layers": 1})
        for linears in self.linears.values():
            call = torch.compile(llama_train.patched(model, linears)[0])
            llama_train.Run("one layer", call).step(self.batches[0], llama_train.make_optimizer(model, 0.0))

    def runs(self, section: str) -> list:
        if section == "whole":
            self.introduce()
        made = [llama_train.Run(name, self.ours(name)) for name in self.linears]
        theirs = copy.deepcopy(self.model, {id(x): x for x in (*self.model.parameters(), *self.model.buffers())})
        made.append(llama_train.Run("torch", theirs, self.plain.backend))
        eager = [] if section == "eager" else [llama_train.Run(f"{name}, eager", self.ours(name))
                                               for name in self.linears]
        for run in made:
            if section == "whole":
                run.call = torch.compile(run.call)
            elif section == "compiled":
                by_regions(run)
        return made + eager

    def case(self, section: str, rounds: int) -> Case:
        runs, notes, failed = self.runs(section), {}, []
        say = lambda run, what: print(f"{section}: {run.name}: {what}; {time.perf_counter() - self.begin:.0f} s since "
                                      "the beginning", flush=True)
        for run in list(runs):
            say(run, "first steps")
            try:
                for _ in range(2):
                    run.step(self.batches[0], self.optimizer)
                most = llama_train.memory(run, self.batches[0], self.optimizer)
                notes[run.name] = f"{most / 2**30:.2f} GiB at most"
                say(run, notes[run.name])
            except Exception as problem:
                runs.remove(run)
                self.optimizer.zero_grad()
                failed.append(timing.Timing(run.name, "failed", note=f"{type(problem).__name__}: {str(problem)[:300]}"))
                say(run, failed[-1].note)
        hosts, before = {run.name: [] for run in runs}, torch.cuda.memory_stats()
        with readings() as read:
            found = llama_train.time_steps(runs, self.batches, self.optimizer, rounds, hosts=hosts)
        after = torch.cuda.memory_stats()
        asked = ", ".join(f"{after.get(key, 0) - before.get(key, 0)} {what}" for key, what in CUDA_MEMORY.items())
        launches = {run.name: self.look_into(run, section) for run in runs}
        notes["torch"] = f"{notes.get('torch', '')}, {self.best} attention; " + ", ".join(
            f"{name} {'-' if t is None else f'{1e3 * t:.1f} ms'}" for name, t in self.backends.items()) + f"; {asked}"
        timings = tuple(timing.Timing(name, "wall", tuple(1e3 * t for t in times), launches[name], note=notes[name],
                                      host_us=1e6 * statistics.median(hosts[name])) for name, times in found.items())
        batch, seqlen = self.shape
        work = operations(self.model, self.sizes, batch, seqlen)
        sizes = len(self.batches), batch * seqlen * 8, torch.cuda.get_device_properties(0).L2_cache_size
        return Case(section, f"training step, {section}", f"B{batch} S{seqlen}", "TFLOP/s", work,
                    timing.Comparison(timings + tuple(failed), *sizes), bound=Bound(("torch",), AT_LEAST[section]),
                    readings={"": tuple(read)})

    def look_into(self, run, section) -> int | None:
        """Keeps a profile of a step; how many launches it is, None where there is no profile."""
        name = run.name if section == "eager" or "eager" in run.name else f"{run.name}, {section}"
        try:
            self.profiles[name] = llama_profile.profiled(lambda: run.step(self.batches[0], self.optimizer))
        except Exception as problem:  # the times are there already
            print(f"PROBLEM no profile of {name}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
            return None
        (self.out / "llama_profile.json").write_text(
            json.dumps({"run": run_here(), **self.profiles}, indent=1) + "\n")
        return self.profiles[name]["launches"]

    def learning(self, rate: float, resume: bool = False) -> dict:
        """The losses of torch, of tkq, of tkq's float8 layers and of torch with another attention (how far two runs are
        apart whose results differ by roundings alone), and how far from torch's they are: as far as they are there,
        written after every 50 steps. resume: whole curves that the file has stay, and those runs are left out. "made"
        has each curve's day and time."""
        weights = [p.detach().clone() for p in self.model.parameters()]
        self.optimizer = None
        path = self.out / "llama_learning.json"
        here, (batch, seqlen) = Environment.here(), self.shape
        found = dict(at_most=APART, rate=rate, batch=batch, seqlen=seqlen, sizes=dict(self.sizes),
                     versions=here.versions, made={}, apart={}, losses={})
        if resume and path.exists():
            found = resumed_curves(json.loads(path.read_text()), found)
        others = [name for name in llama_train.BACKENDS if name != self.best and self.backends.get(name, 1.0)]
        runs = [self.plain, llama_train.Run("tkq", self.ours("tkq")),
                *(llama_train.Run(name, self.ours(name)) for name in self.linears if "fp8" in name),
                *(self.attention(x)[0] for x in others[:1])]
        for run in (run for run in runs if run.name not in found["losses"]):
            def seen(curve, name=run.name):
                found["losses"][name], found["made"][name] = curve, here.date
                found["apart"][name] = llama_train.apart(curve, found["losses"][self.plain.name])
                path.write_text(json.dumps(found, indent=1) + "\n")
                print(f"learning: {name}: {len(curve)} steps, {curve[0]:.3f} to {curve[-1]:.3f}, "
                      f"{100 * found['apart'][name]:.3f} % apart; {time.perf_counter() - self.begin:.0f} s", flush=True)

            llama_train.learn(run, self.model, self.batches, weights, rate, seen)
        return found


def resumed_curves(old: dict, new: dict) -> dict:
    """What a file has of whole curves that were made alike. Files had no seqlen, sizes, versions and days at first:
    what those say nothing of is taken to be alike, and their curves have the file's day, "" without."""
    for key in ("at_most", "rate", "batch", "seqlen", "sizes", "versions"):
        if old.get(key, new[key]) != new[key]:
            raise ValueError(f"{key}: the curves on file are of {old[key]}, this run of {new[key]}: begin a new file")
    whole = [name for name, curve in old["losses"].items() if len(curve) == STEPS]
    day = old.get("run", {}).get("date", "")
    made = {name: old.get("made", {}).get(name, day) for name in whole}
    return {**new, "made": made, **{key: {name: old[key][name] for name in whole} for key in ("apart", "losses")}}


def decoding(model, rounds: int = 6) -> Iterator[Cost]:
    """Microseconds of a prefill and of a token, of tkq and of torch in turns, each token by a CUDA graph."""
    model = model.eval()
    ours = llama_train.patched(model, attention="tkq")[0]
    model.set_attn_implementation("sdpa")
    for batch, length in DECODE:
        ids = torch.randint(1, model.config.vocab_size, (batch, length), device=model.device)
        decoders = {name: llama_generate.Decoder(each, ids, length + DECODED)
                    for name, each in (("tkq", ours), ("torch", model))}
        times = {name: [] for name in decoders}
        for i in range(rounds):
            for name in timing.turn_order(list(decoders), i):
                times[name].append(decoders[name].seconds(DECODED))
        for name, found in times.items():
            for what, column in (("prefill", 0), ("a token", 1)):
                us = [1e6 * t[column] for t in found]
                tokens = batch * (length if what == "prefill" else 1) / statistics.median(us) * 1e6
                yield Cost(f"{name}: {what}, B{batch} prompt {length}", statistics.median(us), min(us), max(us),
                           len(us), note=f"{tokens:.0f} tokens/s")


def run(options) -> int:
    report = Report(Environment.here(harness.Monitor().driver))
    sizes, seqlen = (llama_train.SMALL, 512) if options.small else (llama_train.SIZES, SEQLEN)
    options.out.mkdir(parents=True, exist_ok=True)
    steps = Steps(sizes, options.batch, seqlen, options.linear, options.out, options.attention)
    for section in options.sections:
        try:
            if section == "learning":
                found = steps.learning(options.rate, options.resume)
                report.problems += [f"learning: {name} {100 * by:.3f} % apart" for name, by in found["apart"].items()
                                    if name.startswith("tkq") and not by <= APART]
            elif section == "generate":
                with torch.no_grad():
                    report.costs.extend(decoding(steps.model))
                print("\n".join(harness.cost_lines(report.costs)), flush=True)
            else:
                report.cases.append(steps.case(section, options.rounds))
                print("\n".join(harness.case_lines(report.cases[-1])), flush=True)
                if steps.profiles:
                    print("\n".join(llama_profile.lines(steps.profiles)), flush=True)
        except Exception as problem:  # the other sections can still run
            report.problems.append(f"{section}: {type(problem).__name__}: {str(problem)[:300]}")
            print("PROBLEM", report.problems[-1], flush=True)
        report.save(options.out / "llama.json")
    missed = [case.op for case in report.cases if case.holds() is not True]
    return 1 if missed or report.problems else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.llama", description=__doc__.split("\n")[0])
    words = lambda text: tuple(filter(None, text.split(",")))
    parser.add_argument("--sections", type=words, default=SECTIONS, help=f"of {', '.join(SECTIONS)}, in this order")
    parser.add_argument("--linear", type=words, default=(), help="layers to time beside tkq's: none, fp8, fp8_block")
    parser.add_argument("--attention", choices=llama_train.BACKENDS, help="torch's; without it the fastest is found")
    parser.add_argument("--batch", type=int, default=2, help="sequences")
    parser.add_argument("--rate", type=float, default=llama_train.RATE, help="of learning")
    parser.add_argument("--resume", action="store_true", help="learning: keep the curves that OUT has")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="a small model: to try it")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench/results/h100"))
    options = parser.parse_args(argv)
    if unknown := sorted(set(options.sections) - set(SECTIONS)):
        parser.error(f"--sections: unknown {unknown}; allowed {list(SECTIONS)}")
    if not torch.cuda.is_available():
        print("bench.studies.llama times training: it needs a GPU, and PyTorch finds none here.")
        return 2
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
