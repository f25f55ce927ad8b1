"""Open llama.cpp, the library inside the xllamacpp package: quantize rows, and query a model file in a child process.

Only this module reads xllamacpp. llama.cpp ends its process on some faulty files, so a model is loaded in a child.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.process.limited_child import main_of
from crosstune.process.this_process import num_cores

_INSTALL = "pip install 'crosstune[llamacpp]'"
_PARAMETER_BYTES = 512
"""More than any parameter structure of llama.cpp; it reads and writes its own part only."""
_THREADED_VALUES = 1 << 20
_LEAST_WEIGHT = 1e-12
_LAST_LINES = 4
_QUESTION = "question.json"
"""The file of a question in the folder of its answers."""


class LlamaCppFailed(UserError):
    """llama.cpp cannot load or run a file."""


def is_installed() -> bool:
    return importlib.util.find_spec("xllamacpp") is not None


def require_llama_cpp(request: str) -> None:
    """Raise a UserError unless xllamacpp is installed; `request` is the first sentence of the error."""
    if not is_installed():
        raise UserError(request, why="it needs llama.cpp, and xllamacpp is not installed.", do=_INSTALL)


def quantize_rows(
    values: NDArray[np.float32], kind: int, row_bytes: int, importance: NDArray[np.float32] | None = None
) -> NDArray[np.uint8]:
    """Return rows in a GGML type, quantized on all cores. `importance` has a weight for each column."""
    library = _library()
    rows = np.ascontiguousarray(values, dtype=np.float32)
    num_rows, width = rows.shape
    packed = np.empty((num_rows, row_bytes), dtype=np.uint8)
    weights = None if importance is None else _scaled(importance)
    pointer = None if weights is None else weights.ctypes.data
    step = max(1, _THREADED_VALUES // width)

    def work(start: int) -> int:
        count = min(step, num_rows - start)
        return int(
            library.ggml_quantize_chunk(
                kind, rows.ctypes.data, packed.ctypes.data, start * width, count, width, pointer
            )
        )

    with ThreadPoolExecutor(num_cores()) as pool:
        written = sum(pool.map(work, range(0, num_rows, step)))
    assert written == packed.nbytes, (written, packed.nbytes)
    return packed


def _scaled(importance: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the weights of columns divided by their mean, and none of them 0: llama.cpp would lose a block of columns without
    weight, and overflows at large ones."""
    weights = importance.astype(np.float64)
    weights /= weights.mean() or 1.0
    return np.maximum(weights, _LEAST_WEIGHT).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The answers of llama.cpp about a model file, in the order of the questions."""

    tokens: list[list[int]]
    """The token ids of each text."""
    logits: list[NDArray[np.float32]]
    """The logits of each prompt at every position."""
    continuations: list[list[int]]
    """The greedy tokens after each prompt, without the end token."""
    ends: list[int]
    """The given token ids that end an answer."""
    template: str | None
    special: dict[str, int]
    """bos, eos and eot; -1 if the file has none."""
    adds_bos: bool


def ask(
    path: Path,
    *,
    texts: Sequence[str] = (),
    prompts: Sequence[Sequence[int]] = (),
    starts: Sequence[Sequence[int]] = (),
    max_new_tokens: int = 0,
    tokens: Sequence[int] = (),
    adapter: Path | None = None,
    show: Callable[[int], None] = lambda done: None,
) -> Answers:
    """Load a GGUF file in llama.cpp: tokenize `texts`, compute the logits of `prompts`, continue `starts` greedily, and
    return which of `tokens` end an answer. `adapter` is a GGUF adapter to apply; `show` receives the number of finished
    prompts every second."""
    require_llama_cpp(f"Cannot open {path} in llama.cpp.")
    question = {
        "path": str(path),
        "adapter": None if adapter is None else str(adapter),
        "texts": list(texts),
        "prompts": [list(map(int, prompt)) for prompt in prompts],
        "starts": [list(map(int, start)) for start in starts],
        "max_new_tokens": max_new_tokens,
        "tokens": list(map(int, tokens)),
        "vocab_only": not prompts and not starts,
    }
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / _QUESTION).write_text(json.dumps(question), encoding="utf-8")
        child = subprocess.Popen(
            main_of(__name__, scratch),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"GOMP_SPINCOUNT": "1000", **os.environ},
        )
        answer, said = _wait(child, lambda: show(len(list(Path(scratch).glob("*.npy")))))
        if child.returncode:
            lines = said.decode(errors="replace").strip().splitlines()[-_LAST_LINES:]
            raise LlamaCppFailed(
                f"llama.cpp cannot use {path}.",
                why=" ".join(" ".join(lines).split())[:500] or f"it ended with code {child.returncode}.",
                do="report it as a bug with this message",
            )
        reply: dict[str, Any] = json.loads(answer)
        logits = [np.load(Path(scratch) / f"{number}.npy") for number in range(len(prompts))]
    return Answers(**reply, logits=logits)


def _wait(child: subprocess.Popen[bytes], show: Callable[[], None]) -> tuple[bytes, bytes]:
    """Return what the child wrote on both streams; call `show` every second."""
    try:
        while True:
            try:
                return child.communicate(timeout=1.0)
            except subprocess.TimeoutExpired:
                show()
    except BaseException:
        child.kill()
        child.wait()
        raise


class _Parameters(ctypes.Structure):
    """The parameters of a model or context. Fields are set at their offset after a check of the defaults."""

    _fields_ = (("raw", ctypes.c_ubyte * _PARAMETER_BYTES),)

    def number(self, offset: int) -> int:
        return ctypes.c_int32.from_buffer(self, offset).value

    def set(self, offset: int, value: int) -> None:
        ctypes.c_int32.from_buffer(self, offset).value = value


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


_GPU_LAYERS, _VOCAB_ONLY = 16, 72
_NUM_CONTEXT, _NUM_BATCH, _NUM_MICRO_BATCH, _THREADS, _BATCH_THREADS = 0, 4, 8, 28, 32
_FLASH, _TYPE_K, _TYPE_V = 52, 104, 108
_MODEL_DEFAULTS = {_GPU_LAYERS: -1, _VOCAB_ONLY: 0x10000}
_CONTEXT_DEFAULTS = {_NUM_CONTEXT: 512, _NUM_BATCH: 2048, _NUM_MICRO_BATCH: 512, 12: 1, _FLASH: -1}
_CONTEXT_DEFAULTS |= {_TYPE_K: 1, _TYPE_V: 1, _THREADS: 4, _BATCH_THREADS: 4}
"""Offset -> default; a version with a different layout has other values there."""
_F32 = 0


@functools.cache
def _library() -> Any:
    """Load the library and declare the functions in use; raise a UserError if its structures have a different layout."""
    spec = importlib.util.find_spec("xllamacpp")
    found = [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.glob("xllamacpp*"))
    paths = [path for path in found if path.suffix in (".so", ".pyd", ".dylib")]
    if not paths:
        raise _unsupported("its library was not found")
    library = ctypes.CDLL(str(paths[0]))
    pointer, number, text = ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p
    functions: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "ggml_quantize_chunk": (
            ctypes.c_size_t,
            (ctypes.c_int, pointer, pointer, *[ctypes.c_int64] * 3, pointer),
        ),
        "llama_model_default_params": (_Parameters, ()),
        "llama_context_default_params": (_Parameters, ()),
        "llama_model_load_from_file": (pointer, (text, _Parameters)),
        "llama_init_from_model": (pointer, (pointer, _Parameters)),
        "llama_model_get_vocab": (pointer, (pointer,)),
        "llama_model_chat_template": (text, (pointer, text)),
        "llama_tokenize": (number, (pointer, text, number, pointer, number, ctypes.c_bool, ctypes.c_bool)),
        "llama_vocab_n_tokens": (number, (pointer,)),
        "llama_vocab_is_eog": (ctypes.c_bool, (pointer, number)),
        "llama_vocab_get_add_bos": (ctypes.c_bool, (pointer,)),
        **{f"llama_vocab_{role}": (number, (pointer,)) for role in ("bos", "eos", "eot")},
        "llama_adapter_lora_init": (pointer, (pointer, text)),
        "llama_set_adapters_lora": (number, (pointer, pointer, ctypes.c_size_t, pointer)),
        "llama_batch_init": (_Batch, (number, number, number)),
        "llama_decode": (number, (pointer, _Batch)),
        "llama_get_logits": (ctypes.POINTER(ctypes.c_float), (pointer,)),
        "llama_get_memory": (pointer, (pointer,)),
        "llama_memory_clear": (None, (pointer, ctypes.c_bool)),
        "llama_log_set": (None, (pointer, pointer)),
    }
    for name, (result, arguments) in functions.items():
        if not hasattr(library, name):
            raise _unsupported(f"it does not have the function {name}")
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    for name, defaults in (("model", _MODEL_DEFAULTS), ("context", _CONTEXT_DEFAULTS)):
        given: _Parameters = getattr(library, f"llama_{name}_default_params")()
        if any(given.number(offset) != value for offset, value in defaults.items()):
            raise _unsupported(f"its {name} parameters have a different layout")
    return library


def _unsupported(why: str) -> UserError:
    return UserError(
        "This version of xllamacpp is not supported.",
        why=f"{why}.",
        do="pip install xllamacpp==2026.10.11549",
    )


class _Model:
    """A model that the child has loaded."""

    def __init__(self, path: str, *, vocab_only: bool) -> None:
        self._library = _library()
        parameters = self._library.llama_model_default_params()
        parameters.set(_GPU_LAYERS, 0)
        parameters.set(_VOCAB_ONLY, _MODEL_DEFAULTS[_VOCAB_ONLY] | vocab_only)
        self.handle = self._library.llama_model_load_from_file(path.encode(), parameters)
        if not self.handle:
            raise SystemExit(1)  # llama.cpp has written the reason
        self.vocab = self._library.llama_model_get_vocab(self.handle)
        self.num_tokens: int = self._library.llama_vocab_n_tokens(self.vocab)
        self._context: Any = None

    def open_context(self, length: int, adapter: str | None) -> None:
        parameters = self._library.llama_context_default_params()
        for offset in (_NUM_CONTEXT, _NUM_BATCH, _NUM_MICRO_BATCH):
            parameters.set(offset, max(length, 32))
        for offset in (_THREADS, _BATCH_THREADS):
            parameters.set(offset, num_cores())
        parameters.set(_FLASH, 0)
        parameters.set(_TYPE_K, _F32)  # rounding of the cache would hide small differences
        parameters.set(_TYPE_V, _F32)
        self._context = self._library.llama_init_from_model(self.handle, parameters)
        if not self._context:
            raise SystemExit(1)
        self._batch = self._library.llama_batch_init(max(length, 32), 0, 1)
        if adapter is not None:
            lora = self._library.llama_adapter_lora_init(self.handle, adapter.encode())
            if not lora:
                raise SystemExit(1)
            handles, scales = (ctypes.c_void_p * 1)(lora), (ctypes.c_float * 1)(1.0)
            if self._library.llama_set_adapters_lora(self._context, handles, 1, scales):
                raise SystemExit("llama.cpp cannot apply the adapter")

    def tokenize(self, text: str) -> list[int]:
        raw = text.encode()
        buffer = (ctypes.c_int32 * (len(raw) + 16))()
        count = self._library.llama_tokenize(self.vocab, raw, len(raw), buffer, len(buffer), False, True)
        if count < 0:
            raise SystemExit(f"llama.cpp needs {-count} tokens for a text of {len(raw)} bytes")
        return list(buffer[:count])

    def logits(self, tokens: Sequence[int], *, start: int = 0) -> NDArray[np.float32]:
        """Return the logits after each token; a `start` above 0 continues the previous call."""
        if not start:
            self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)
        batch = self._batch
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, start + place
            batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, 0, 1
        if self._library.llama_decode(self._context, batch):
            raise SystemExit(f"llama.cpp cannot compute the logits of {len(tokens)} tokens")
        found = self._library.llama_get_logits(self._context)
        return np.ctypeslib.as_array(found, shape=(len(tokens), self.num_tokens)).copy()

    def continue_greedily(self, start: Sequence[int], max_new_tokens: int) -> list[int]:
        tokens, made = list(start), list[int]()
        place = 0
        while len(made) < max_new_tokens:
            last = self.logits(tokens[place:], start=place)[-1]
            place, token = len(tokens), int(last.argmax())
            made.append(token)
            tokens.append(token)
            if self._library.llama_vocab_is_eog(self.vocab, token):
                break
        return made


def _answer(question: Mapping[str, Any], scratch: Path) -> dict[str, Any]:
    library = _library()
    model = _Model(question["path"], vocab_only=question["vocab_only"])
    prompts, starts, limit = question["prompts"], question["starts"], question["max_new_tokens"]
    if prompts or starts:
        length = max([len(each) for each in prompts] + [len(each) + limit for each in starts])
        model.open_context(length, question["adapter"])
    for number, prompt in enumerate(prompts):
        np.save(scratch / f"{number}.npy", model.logits(prompt))
    template = library.llama_model_chat_template(model.handle, None)
    roles = ("bos", "eos", "eot")
    return {
        "tokens": [model.tokenize(text) for text in question["texts"]],
        "continuations": [model.continue_greedily(start, limit) for start in starts],
        "ends": [token for token in question["tokens"] if library.llama_vocab_is_eog(model.vocab, token)],
        "template": None if template is None else template.decode(),
        "special": {role: getattr(library, f"llama_vocab_{role}")(model.vocab) for role in roles},
        "adds_bos": bool(library.llama_vocab_get_add_bos(model.vocab)),
    }


def main() -> None:
    """Answer the question in the folder; llama.cpp's warnings and errors go to standard error."""
    signature = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
    last = [0]

    def log(level: int, text: bytes, _: Any) -> None:
        level = last[0] if level == 5 else level  # 5 continues a line
        last[0] = level
        if level >= 4:
            sys.stderr.write(text.decode(errors="replace"))

    callback = signature(log)
    _library().llama_log_set(callback, None)
    scratch = Path(sys.argv[1])
    reply = _answer(json.loads((scratch / _QUESTION).read_text(encoding="utf-8")), scratch)
    sys.stdout.write(json.dumps(reply))
    sys.stdout.flush()
    os._exit(0)  # the log callback must not outlive Python
