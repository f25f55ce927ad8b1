"""Compare quantized GGUF files with llama.cpp's own quantizer: the type and every byte of each tensor.

    npm pack @node-llama-cpp/linux-x64 && tar xf node-llama-cpp-*.tgz
    python benchmarks/gguf_quantizer.py --library package/bins/linux-x64

Writes a tiny random model of every family, and deeper and narrower ones, as f32 and in each type. `llama_model_quantize`
of the library, in a child process, makes its own files from the f32 file. Prints the tensors that differ, and exits with 1
if there are any in a type that needs llama.cpp. The types of 32 weights per block keep the output head in q8_0, where
llama.cpp takes q6_k.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import gguf
import gguf_models

from crosstune.core.quantization import GGUF_BLOCKS, GGUF_RECIPES
from crosstune.models.gguf_writer import write_gguf

SHAPES: list[tuple[str, int, dict[str, Any]]] = [
    *((name, 256, {}) for name in gguf_models.FAMILIES),
    ("llama-2", 64, {"num_hidden_layers": 32, "intermediate_size": 256}),
    ("llama-2", 256, {"num_hidden_layers": 80, "num_attention_heads": 8, "num_key_value_heads": 1}),
    ("smollm2", 320, {"num_hidden_layers": 30}),
    ("llama-2", 72, {}),
    ("mixtral", 256, {"num_hidden_layers": 16}),
    ("gemma-2", 256, {"num_hidden_layers": 26}),
    ("qwen3-moe", 256, {"num_hidden_layers": 8, "num_experts": 16}),
    ("phi-3", 256, {"num_hidden_layers": 24}),
]
"""Family, hidden size, options of the config."""


class Parameters(ctypes.Structure):
    _fields_ = (
        ("num_threads", ctypes.c_int32),
        ("file_type", ctypes.c_int32),
        ("rest", ctypes.c_ubyte * 248),
    )


def quantize(folder: Path, source: str, target: str, file_type: int) -> None:
    """Quantize a file with the libraries of a folder."""
    for pattern in ("libggml-base*.so", "libggml.*so"):
        ctypes.CDLL(str(next(folder.glob(pattern))), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(next(folder.glob("libllama.*so"))))
    library.llama_model_quantize_default_params.restype = Parameters
    parameters = library.llama_model_quantize_default_params()
    parameters.num_threads, parameters.file_type = 1, file_type
    if library.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(parameters)):
        raise SystemExit("llama.cpp cannot quantize the file")


def tensors(path: Path) -> dict[str, tuple[str, bytes]]:
    return {each.name: (each.tensor_type.name, each.data.tobytes()) for each in gguf.GGUFReader(path).tensors}


def compare(name: str, hidden: int, options: dict[str, Any], library: Path) -> int:
    """Print the differences of one model in all types, and return their number in types that need llama.cpp."""
    model_type, tokenizer, known = gguf_models.FAMILIES[name]
    gguf_models.FAMILIES["model"] = (model_type, tokenizer, known | options)
    num_wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        folder = gguf_models.write_family("model", place / "model", hidden=hidden)
        write_gguf(folder, place / "f32.gguf", kind="f32")
        for kind in (*GGUF_RECIPES, *GGUF_BLOCKS):
            write_gguf(folder, place / "ours.gguf", kind=kind)
            file_type = gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"].value
            words = [str(place / "f32.gguf"), str(place / "theirs.gguf"), str(file_type)]
            command = [sys.executable, __file__, "--library", str(library), "--quantize", *words]
            subprocess.run(command, check=True, capture_output=True)
            ours, theirs = tensors(place / "ours.gguf"), tensors(place / "theirs.gguf")
            different = [each for each in ours if ours[each] != theirs.get(each)]
            num_wrong += len(different) * (kind in GGUF_RECIPES)
            shown = ", ".join(
                f"{each} {ours[each][0]} instead of {theirs[each][0]}" for each in different[:3]
            )
            print(
                f"{name} {hidden} {options or ''} {kind}: {len(ours)} tensors, {len(different)} differ  {shown}",
                flush=True,
            )
    return num_wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", type=Path, required=True, help="folder with libllama and libggml")
    parser.add_argument("--quantize", nargs=3, help=argparse.SUPPRESS)
    own = parser.parse_args()
    if own.quantize:
        quantize(own.library, *own.quantize[:2], int(own.quantize[2]))
        return
    num_wrong = sum(compare(*shape, own.library) for shape in SHAPES)
    print(f"{num_wrong} tensors differ in {', '.join(GGUF_RECIPES)}")
    raise SystemExit(num_wrong > 0)


if __name__ == "__main__":
    main()
