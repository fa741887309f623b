"""Compile some Gated DeltaNet CuTe kernels for a target without a GPU; one JSON object a line. See ``offline_cute``."""

import json
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from replayssm_cute.gdn_types import GdnGeometry, GdnProblem
from replayssm_cute.kernels.gdn import compile_gdn
from replayssm_cute.kernels.gdn_config import heuristic
from replayssm_cute.kernels.targets import TARGETS
from replayssm_tune.resources import resource_usage
from tests.offline_cute import opcodes
from tests.ptx.kernels import shared_memory

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
#: (label, dtypes of checkpoint and ring, tokens, exact fold, batch)
KERNELS = (("decode bf16 b256", BF16, BF16, 0, False, 256), ("decode fp32 b1", F32, BF16, 0, False, 1),
           ("decode fp32, ring fp32 b256", F32, F32, 0, False, 256),
           ("decode fp16, ring fp16 b256", F16, F16, 0, False, 256),
           ("ring fp32 b256", F32, BF16, 4, False, 256), ("exact bf16 b256", BF16, BF16, 4, True, 256))


def main(target: str) -> None:
    for label, state, ring, tokens, exact, batch in KERNELS:
        problem = GdnProblem(GdnGeometry(16, 32), 16, state, BF16, ring, (BF16, BF16, F32, F32), tokens=tokens,
                             flag_dtype=torch.int8 if tokens else None, exact_fold=exact)
        config = heuristic(problem, batch, TARGETS[target])
        assert config is not None, label
        with tempfile.TemporaryDirectory() as folder:
            compiled: Any = compile_gdn(problem, config, target, TARGETS[target].sms,
                                        f"--keep-cubin --dump-dir {folder}")
            cubin = next(Path(folder).glob("*.cubin"))
            print(json.dumps({"label": label, "config": asdict(config), "warps": config.warps, "exact": exact,
                              **resource_usage(cubin), "opcodes": dict(Counter(opcodes(cubin))),
                              "shared": shared_memory(str(compiled.ir_module))}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
