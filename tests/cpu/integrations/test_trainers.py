"""Trainers on patched models: transformers' own, TRL's, axolotl's plug-in. The losses of the same model without tkq."""
import importlib
import sys
import types

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17", reason="transformers is not installed")

import tkq.integrations.transformers as tkq_transformers  # noqa: E402
from tests.cpu.integrations.test_transformers_cpu import BASE, NORMS  # noqa: E402

HOW = dict(max_steps=4, per_device_train_batch_size=2, use_cpu=True, report_to=[], logging_steps=1, seed=0,
           learning_rate=1e-2)


def model(attn):
    config = transformers.LlamaConfig(**BASE, bos_token_id=1, eos_token_id=2)
    config._attn_implementation = attn
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).bfloat16()


def losses(trainer):
    trainer.train()
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


def rows(lengths=(5, 9, 12, 7) * 2):
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(3, 96, (n,), generator=generator).tolist()} for n in lengths]


def test_trainer(tmp_path):
    """With tkq's loss, whose output has no logits."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    data = [dict(row, labels=row["input_ids"]) for row in rows((9,) * 8)]
    found = []
    for attn in ("sdpa", "tkq"):
        m = model(attn)
        if attn == "tkq":
            assert tkq_transformers.patch(m).replaced["LlamaForCausalLM"] == 1
        arguments = transformers.TrainingArguments(output_dir=tmp_path / attn, **HOW)
        found.append(losses(transformers.Trainer(m, arguments, train_dataset=data)))
    assert len(found[0]) == 4
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=0)


@pytest.mark.parametrize("packing", [False, True])
def test_trl(packing, tmp_path):
    """SFTTrainer, which has a fused loss of its own."""
    trl = pytest.importorskip("trl", minversion="1.16", reason="trl is not installed")
    import pyarrow
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(96)}, unk_token="t3"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t2")
    found = []
    for attn in ("sdpa", "tkq"):
        m = model(attn)
        if attn == "tkq":
            assert tkq_transformers.patch(m, loss=False).replaced["LlamaDecoderLayer"] == 2
        arguments = trl.SFTConfig(output_dir=tmp_path / attn, packing=packing, max_length=16, bf16=False,
                                  shuffle_dataset=False, dataset_kwargs={"skip_prepare_dataset": True}, **HOW)
        data = Dataset(InMemoryTable(pyarrow.Table.from_pylist(rows())), fingerprint="rows")
        found.append(losses(trl.SFTTrainer(m, args=arguments, train_dataset=data, processing_class=tokenizer)))
    assert len(found[0]) == 4
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=0)


class _Plugin:
    """As axolotl's BasePlugin is made."""

    def __init__(self):
        pass


@pytest.fixture
def plugin(monkeypatch):
    """On a stub of axolotl's interface."""
    name = "tkq.integrations.axolotl"
    stub = types.ModuleType("axolotl.integrations.base")
    stub.BasePlugin = _Plugin
    for part in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name).TkqPlugin()
    sys.modules.pop(name, None)


def test_axolotls_plugin(plugin, caplog):
    m = model("sdpa")
    ids = torch.tensor(rows((12,))[0]["input_ids"])[None]
    with torch.no_grad():
        want = m(ids).logits
        with caplog.at_level("INFO", logger="tkq"):
            plugin.post_model_build({"liger_rope": None}, m)
        torch.testing.assert_close(m(ids).logits, want, rtol=0.05, atol=0.02)
    assert f"{NORMS['Llama']} x LlamaRMSNorm" in caplog.text and "LlamaForCausalLM" not in caplog.text
    assert m.train()(ids, labels=ids).logits is not None


def test_axolotls_options_that_rewrite_the_same_modules(plugin):
    with pytest.raises(ValueError, match="got liger_rope, lora_mlp_kernel"):
        plugin.post_model_build({"liger_rope": True, "lora_mlp_kernel": True, "liger_rms_norm": False}, model("sdpa"))
