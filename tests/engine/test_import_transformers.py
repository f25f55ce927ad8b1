"""Names that `import_transformers` defers work when used, by crosstune and by other code that uses transformers."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

from crosstune.torch_engine.import_transformers import packages_distributions

PUT_OFF = "hqq.core.quantize", "scipy.optimize", "accelerate.hooks"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_packages_that_a_model_does_not_need_are_not_imported():
    found = run(
        "import sys\n"
        "from crosstune.torch_engine.import_transformers import import_transformers; import_transformers()\n"
        "import transformers.models.llama.modeling_llama, gc\n"
        f"print([name for name in {PUT_OFF} if name in sys.modules], gc.isenabled())"
    )
    assert found.strip() == "[] True"


@pytest.mark.slow
def test_what_was_put_off_works_in_transformers():
    pytest.importorskip("hqq")
    found = run(
        "from crosstune.torch_engine.import_transformers import import_transformers; import_transformers()\n"
        "import inspect, sys, torch, transformers.loss.loss_for_object_detection as loss\n"
        "from transformers.cache_utils import HQQQuantizedLayer\n"
        "from transformers.integrations import accelerate as used\n"
        "from transformers.utils import is_accelerate_available, is_hqq_available, is_scipy_available\n"
        "print(is_hqq_available(), is_scipy_available(), is_accelerate_available())\n"
        "layer = HQQQuantizedLayer(nbits=4, axis_key=1, axis_value=1)\n"
        "values = torch.randn(1, 2, 64, 64)\n"
        "layer.update(values, values)\n"
        "held = layer._dequantize(layer._quantized_keys)\n"
        "print(bool((held.float() - values).abs().mean() < 0.2))\n"
        "print(loss.linear_sum_assignment([[1, 0], [0, 1]])[1].tolist())\n"
        "import accelerate, scipy.optimize, hqq.core.quantize\n"
        "print(inspect.signature(used.dispatch_model) == inspect.signature(accelerate.dispatch_model))\n"
        "print(used.clean_device_map({'a': 0, 'b': 0}))\n"
        "from transformers.generation import utils\n"
        "from accelerate.hooks import AlignDevicesHook\n"
        "print(isinstance(AlignDevicesHook(), utils.AlignDevicesHook), isinstance(1, utils.AlignDevicesHook))"
    )
    assert found.splitlines() == ["True True True", "True", "[1, 0]", "True", "{'': 0}", "True False"]


@pytest.mark.slow
def test_a_package_that_is_imported_already_is_used_as_it_is():
    found = run(
        "import scipy.optimize, accelerate\n"
        "from crosstune.torch_engine.import_transformers import import_transformers; import_transformers()\n"
        "import transformers.loss.loss_for_object_detection as loss, sys\n"
        "print(loss.linear_sum_assignment is scipy.optimize.linear_sum_assignment)\n"
        "print(sys.modules['accelerate'] is accelerate, accelerate.__version__ > '1')"
    )
    assert found.split() == ["True", "True", "True"]


@pytest.mark.slow
def test_transformers_finds_the_same_classes_and_packages():
    show = (
        "import transformers, transformers.models\n"
        "from transformers.utils import import_utils as found\n"
        "names = {m: {k: sorted(v) for k, v in m._import_structure.items()} for m in (transformers, transformers.models)}\n"
        "print([sorted(each.items()) for each in names.values()])\n"
        "print([sorted(m._class_to_module.items()) for m in names])\n"
        "print({k: sorted(v) for k, v in sorted(found.PACKAGE_DISTRIBUTION_MAPPING.items())})\n"
        "print(found.fetch__all__.__name__)"
    )
    quickly = (
        "from crosstune.torch_engine.import_transformers import import_transformers; import_transformers()\n"
    )
    plain = run(show)
    assert "LlamaForCausalLM" in plain and plain.endswith("\nfetch__all__\n")
    assert run(quickly + show) == plain


def test_packages_are_found_as_python_finds_them(tmp_path, monkeypatch):
    for name, files in {
        "declared-1.0": {"top_level.txt": "one\ntwo\n", "RECORD": "three/a.py,,\n"},
        "listed-1.0": {
            "RECORD": "four/__init__.py,sha256=a,1\nfive.py,,\nfour/b/c.py,,\nlisted-1.0.dist-info/RECORD,,\n"
        },
        "bare-1.0": {},
    }.items():
        folder = tmp_path / f"{name}.dist-info"
        folder.mkdir()
        stated = name.partition("-")[0].capitalize()
        for path, text in {
            **files,
            "METADATA": f"Metadata-Version: 2.1\nName: {stated}\nVersion: 1.0\n",
        }.items():
            (folder / path).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    theirs, ours = importlib.metadata.packages_distributions(), packages_distributions()
    assert ours["one"] == ours["two"] == ["Declared"] and ours["four"] == ours["five"] == ["Listed"]
    assert {k: sorted(set(v)) for k, v in ours.items()} == {k: sorted(set(v)) for k, v in theirs.items()}


def test_garbage_is_collected_again_after_an_import_that_failed():
    found = run(
        "import gc, weakref\n"
        "from crosstune.torch_engine.import_transformers import without_collecting\n"
        "class Held: pass\n"
        "try:\n"
        "    with without_collecting():\n"
        "        held = Held(); held.me = held; there = weakref.ref(held); del held\n"
        "        raise ImportError\n"
        "except ImportError: print(gc.isenabled(), gc.get_freeze_count())\n"
        "gc.collect(); print(there())"
    )
    assert found.split() == ["True", "0", "None"]
