"""What each codec makes of real training state: size, speed, error.

The state is that of a GPT-2 of 25 million parameters, trained on the text that ships with
Python: parameters, first and second moments at a key-frame and 1 and 10 steps after it. It is
trained once (minutes) and kept in a folder (1 GB).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from time import thread_time
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asymcheck.codec.codec import Codec
from asymcheck.codec.floats import bytes_of, narrow
from asymcheck.codec.table import CODECS
from asymcheck.planning.layout import CHUNK_BYTES
from asymcheck_lab.bench import append_record
from asymcheck_lab.data import BatchLoader, load_text
from asymcheck_lab.errors import RunError
from asymcheck_lab.models import FAMILIES, Size
from asymcheck_lab.recipe import seed_everything, vary
from asymcheck_lab.record import measured_when

SIZE = Size(
    context=128,
    batch=4,
    learning_rate=6e-4,
    warmup_steps=20,
    config={"n_layer": 8, "n_embd": 512, "n_head": 8},
)
KEY_FRAME = 200
GAPS = (1, 10)
KINDS = ("parameters", "exp_avg", "exp_avg_sq")
BFLOAT16 = "parameters bf16"

State = npt.NDArray[Any]

NO_SESSION: Mapping[str, Any] = MappingProxyType({})


def states(
    folder: Path, size: Size = SIZE, key_frame: int = KEY_FRAME
) -> Callable[[str, int], State]:
    """The state of a training, from ``folder`` when it was trained before; else blocks for it.

    Returns:
        A function of a kind and a step that reads one flat float32 array.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "done.json"
    recipe = {"size": repr(size), "key_frame": key_frame}
    if not done.exists() or json.loads(done.read_text(encoding="utf-8")) != recipe:
        done.unlink(missing_ok=True)
        _train(folder, size, key_frame)
        done.write_text(json.dumps(recipe), encoding="utf-8")

    def read(kind: str, step: int) -> State:
        state: State = np.load(folder / f"{kind}-{step}.npy")
        return state

    return read


def _train(folder: Path, size: Size, key_frame: int) -> None:
    """The recipe of ``asymcheck_lab.train`` without checkpoints; keeps what ``states`` reads."""
    seed_everything(0)
    family = FAMILIES["gpt2"]
    model = family.build(size)
    loader = BatchLoader(load_text(), context=size.context, batch=size.batch, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(
        optimizer, start_factor=1 / size.warmup_steps, total_iters=size.warmup_steps
    )
    for step in range(1, key_frame + GAPS[-1] + 1):
        family.loss(model, *vary(next(loader))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step - key_frame not in (0, *GAPS):
            continue
        for kind in KINDS:
            leaves = [
                p.detach() if kind == "parameters" else optimizer.state[p][kind]
                for p in model.parameters()
            ]
            flat = torch.cat([leaf.flatten() for leaf in leaves]).numpy()
            if not np.isfinite(flat).all():
                raise RunError(f"step {step}: {kind} is not finite; nothing can be measured")
            np.save(folder / f"{kind}-{step}.npy", flat)


def figures(
    folder: Path, *, size: Size = SIZE, key_frame: int = KEY_FRAME, repeats: int = 3
) -> Iterator[dict[str, Any]]:
    """Measure every codec on every kind that it is for; yields a row as soon as there is one.

    Speeds are raw bytes by seconds that the thread was on a core, the best of ``repeats``, each
    over all chunks: what else runs on the machine counts for less that way. Every chunk is
    decoded, and compared where the codec is lossless.

    Args:
        folder: See ``states``.
        size: See ``states``.
        key_frame: See ``states``.
        repeats: Times that each codec runs.

    Yields:
        ``kind``, ``gap`` in steps to the key-frame, ``label``, ``raw_bytes``, ``stored_bytes``,
        ``ratio``, ``encode_gb_per_s``, ``decode_gb_per_s``, ``max_error``, ``mean_error``, and
        ``refused``, the chunks that are stored raw.

    Raises:
        RunError: What a lossless codec decoded is not what it was given.
    """
    read = states(folder, size, key_frame)
    for kind in (*KINDS, BFLOAT16):
        base = _chunks(read, kind, key_frame)
        for gap in (0, *GAPS):
            chunks = _chunks(read, kind, key_frame + gap)
            for codec in CODECS:
                if codec.label != "raw" and codec.needs_base == (gap > 0) and _is_for(codec, kind):
                    yield {"kind": kind, "gap": gap, **_measure(codec, kind, chunks, base, repeats)}


def write_figures(
    folder: Path,
    into: Path,
    session: Mapping[str, Any] = NO_SESSION,
    **options: Any,  # noqa: ANN401
) -> list[dict[str, Any]]:
    """Append a JSON line for each row of ``figures`` to ``into``, and return the rows.

    Args:
        folder: See ``states``.
        into: The file.
        session: What every row begins with.
        options: Further ones of ``figures``.
    """
    rows = []
    for figure in figures(folder, **options):
        row = {**session, **figure}
        append_record(into, row)
        rows.append(row)
    return rows


def _is_for(codec: Codec, kind: str) -> bool:
    """Quantized are moments, each by its own law. ExCP's codecs need all three kinds at once."""
    law = {"exp_avg": "signed", "exp_avg_sq": "log"}.get(kind, "none")
    if codec.chains:
        return False
    return codec.lossless or codec.needs_base or codec.label.endswith(law)


def _chunks(read: Callable[[str, int], State], kind: str, step: int) -> list[memoryview]:
    state = read(KINDS[0] if kind == BFLOAT16 else kind, step)
    raw = bytes_of(narrow(state, "bfloat16") if kind == BFLOAT16 else state)
    return [raw[at : at + CHUNK_BYTES] for at in range(0, len(raw), CHUNK_BYTES)]


def _measure(
    codec: Codec, kind: str, chunks: list[memoryview], base: list[memoryview], repeats: int
) -> dict[str, Any]:
    dtype = "bfloat16" if kind == BFLOAT16 else "float32"
    memory = memoryview(bytearray(CHUNK_BYTES))
    memory[:] = b"\1" * CHUNK_BYTES  # touched: the first use of a page is no decoding
    encode_s, decode_s = [], []
    for _ in range(repeats):
        spent_s, back_s = 0.0, 0.0
        taken: list[tuple[int, int, float, float]] = []
        for raw, old in zip(chunks, base, strict=True):
            begin_s = thread_time()
            encoding = codec.encode(raw, dtype, old)
            spent_s += thread_time() - begin_s
            if encoding is None:
                continue
            taken.append((len(raw), len(encoding.data), encoding.max_error, encoding.mean_error))
            into = memory[: len(raw)]
            begin_s = thread_time()
            codec.decode(memoryview(encoding.data), into, old)
            back_s += thread_time() - begin_s
            if codec.lossless and into != raw:
                raise RunError(f"{codec.label}: a chunk of {kind} did not come back as it was")
        encode_s.append(spent_s)
        decode_s.append(back_s)
    raw_bytes = sum(map(len, chunks))
    stored_bytes = raw_bytes + sum(stored - raw for raw, stored, _, _ in taken)
    return {
        "label": codec.label,
        "raw_bytes": raw_bytes,
        "stored_bytes": stored_bytes,
        "ratio": stored_bytes / raw_bytes,
        "encode_gb_per_s": raw_bytes / min(encode_s) / 1e9,
        "decode_gb_per_s": sum(raw for raw, *_ in taken) / max(min(decode_s), 1e-9) / 1e9,
        "max_error": max((greatest for _, _, greatest, _ in taken), default=0.0),
        "mean_error": sum(raw * mean for raw, _, _, mean in taken) / raw_bytes,
        "refused": len(chunks) - len(taken),
    }


def render(records: list[dict[str, Any]]) -> str:
    """The rows of one session as Markdown."""
    first = records[0]
    lines = [
        f"{measured_when(first['session'], first['commit'])}, with "
        f"`{first['command']}`, on one thread of {first['machine']['cpu']}: a GPT-2 of 25 million "
        f"parameters after {KEY_FRAME} updates, and 1 and 10 updates later for those that need a "
        f"key-frame. Ratio is stored bytes by raw bytes; speeds are raw bytes by CPU seconds, the "
        f"best of several passes; errors are in units of the elements.",
        "",
        "| kind | steps after the key-frame | codec | ratio | encode, GB/s | decode, GB/s | "
        "greatest error | mean error |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in records:
        errors = [f"{row[name]:.1e}" if row[name] else "0" for name in ("max_error", "mean_error")]
        lines.append(
            f"| {row['kind']} | {row['gap'] or ''} | `{row['label']}` | {row['ratio']:.3f} | "
            f"{row['encode_gb_per_s']:.2f} | {row['decode_gb_per_s']:.2f} | {' | '.join(errors)} |"
        )
    return "\n".join(lines) + "\n"
