"""A dry run, which has no GPU, names the kernels that the same calls take on one."""
import base64
import json
import pathlib
import pickle
import subprocess
import sys

import pytest

from tkq.runtime.device import arch
from tkq.warmup import models

CHECKOUT = pathlib.Path(__file__).resolve().parents[3]
TINY = (models.Model(256, 4, 2, 64, 512, 1024, head_norm=True),
        models.Model(512, 4, 4, 128, 1536, 2000, bias=True, offset=1.0, activation="geglu", window=100, score_cap=50.0,
                     logit_cap=30.0))
ON_THE_GPU = """
import base64, json, pickle, sys
from tkq.warmup import models
found = models.rehearsed([models.Model(*one) for one in json.loads(sys.argv[1])], "cuda")
print(base64.b64encode(pickle.dumps([kernel.recipe for kernel in found])).decode())
"""


@pytest.mark.parametrize("model", [pytest.param(TINY[0], marks=pytest.mark.slow), TINY[1]])
def test_the_same_kernels(model):
    if arch.num_sms("cuda") != 132:
        pytest.skip("plans are for 132 multiprocessors")
    done = subprocess.run([sys.executable, "-c", ON_THE_GPU, json.dumps([model])], cwd=CHECKOUT, capture_output=True,
                          check=True)
    here = pickle.loads(base64.b64decode(done.stdout.splitlines()[-1]))
    assert {kernel.recipe for kernel in models.kernels([model])} == set(here)
