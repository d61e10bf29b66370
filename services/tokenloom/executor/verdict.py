"""Remembers what the load gate's numeric probe said, so that a second start skips it.

Only a comparison that was made is remembered. A refusal because the model could not run may have had a cause that
passes, such as a lack of memory, and is found again if it has not.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from tokenloom import __version__
from tokenloom.common.model_files import ModelSource, cached_dir
from tokenloom.executor.attention import AttentionBackend
from tokenloom.executor.gate import ModelLayout, ModelRefused
from tokenloom.executor.model import PagedModel
from tokenloom.executor.probe import ModelDiverges, probe

_FILE = "verdict.json"


def require_probe(
    source: ModelSource, model: PagedModel, backend: AttentionBackend, layout: ModelLayout, block_size: int
) -> None:
    """Pass the numeric probe, or have passed it before with the same weights, code, torch, backend and CPU.

    Raises: ModelRefused with the reason.
    """

    def build(folder: Path) -> None:
        try:
            verdict = {"divergence": probe(model, backend, layout, block_size), "refusal": ""}
        except ModelDiverges as refusal:
            verdict = {"divergence": None, "refusal": str(refusal)}
        (folder / _FILE).write_text(json.dumps(verdict))

    key = _key(source, model, backend, block_size)
    verdict = json.loads((cached_dir("gate", key, build) / _FILE).read_text())
    if verdict["refusal"]:
        raise ModelRefused(verdict["refusal"])


def _key(source: ModelSource, model: PagedModel, backend: AttentionBackend, block_size: int) -> str:
    """Digest of everything that the probe's outcome depends on."""
    import transformers

    parts = [
        source.weights_fingerprint(),
        __version__,
        code_digest(),
        str(torch.__version__),
        transformers.__version__,
        backend.name,
        str(model.device.type),
        str(model.dtype),
        str(block_size),
        torch.backends.cpu.get_cpu_capability(),
        cpu_flags(),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def code_digest() -> str:
    """Digest of this stage's sources."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cpu_flags() -> str:
    """Instruction sets as Linux lists them; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
