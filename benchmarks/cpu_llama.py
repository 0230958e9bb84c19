"""llama.cpp by llama-cpp-python's bindings of its C functions, for `cpu.py`; greedy."""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np
from cpu_work import SHORT, Rates, Work, main


class Model:
    """A model with room for the streams."""

    def __init__(
        self, path: str, streams: int, context: int, threads: int, *, repacks: bool
    ) -> None:
        llama_cpp.llama_log_set(_SILENT, None)
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        options.use_extra_bufts = repacks
        options.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), options)
        if not self._model:
            raise SystemExit(f"llama.cpp does not open {path}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = context, 512, 512
        settings.n_seq_max = streams
        settings.n_threads, settings.n_threads_batch = threads, threads
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab = llama_cpp.llama_vocab_n_tokens(vocab)
        self._batch = llama_cpp.llama_batch_init(512, 0, 1)

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Rows of (token, position, sequence, whether it is sampled): the tokens sampled."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if (code := llama_cpp.llama_decode(self._context, batch)) != 0:
            raise SystemExit(f"llama_decode says {code}")
        return [self._best(i) for i, row in enumerate(rows) if row[3]]

    def _best(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab,)).argmax())

    def forget(self) -> None:
        """Empties the KV cache."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def read(self, length: int, sequence: int) -> int:
        """Reads a prompt: the first token."""
        tokens = [3 + (i * 7 + sequence) % 1000 for i in range(length)]
        rows = [(token, i, sequence, i == length - 1) for i, token in enumerate(tokens)]
        return self.decode(rows)[0]


def instructions() -> str:
    """What llama.cpp was built for and finds here: "AVX2 FMA F16C", for instance."""
    info = llama_cpp.llama_print_system_info().decode()
    found = [part.split("=")[0].split()[-1] for part in info.split("|") if "= 1" in part]
    return " ".join(name for name in found if name not in ("LLAMAFILE", "OPENMP", "REPACK"))


@llama_cpp.llama_log_callback
def _SILENT(level: int, text: bytes, user: ctypes.c_void_p) -> None:
    pass


def measure(work: Work) -> Rates:
    """See `cpu_work.Work`."""
    rates = Rates(
        weight_bytes=Path(work.model).stat().st_size,
        computes=f"{instructions()}, {work.threads} threads",
    )
    most = max(work.streams)
    # A sequence gets an equal part of the context.
    room = most * max(512, work.prompt + 256)
    model = Model(work.model, most, room, work.threads, repacks=work.repacks)
    model.read(SHORT, 0)
    model.forget()
    if work.prompt:
        with rates.timed("prompt", work.prompt):
            model.read(work.prompt, 0)
    for streams in work.streams:
        model.forget()
        last = [model.read(SHORT, sequence) for sequence in range(streams)]
        with rates.timed(str(streams), streams * work.tokens):
            for position in range(SHORT, SHORT + work.tokens):
                last = model.decode([(t, position, s, True) for s, t in enumerate(last)])
    return rates


if __name__ == "__main__":
    main(measure)
