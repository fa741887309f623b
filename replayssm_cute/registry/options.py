"""How a model is to be served: the options of ``supports_replayssm``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replayssm_cute.errors import ArgumentError, UnsupportedError
from replayssm_cute.registry.entries import DTYPES
from replayssm_cute.rounding import check_columns

CACHE_MODES = ("none", "align", "all")
STATE_DTYPES = {**DTYPES, "int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Options:
    """How the model is to be served; see ``supports_replayssm``.

    Raises:
        ArgumentError: a value is none of its kind. Whether it can be served is asked later.
    """

    tp: int
    state_dtype: torch.dtype | None
    buffer_len: int
    stochastic_rounding: bool
    speculative_tokens: int
    prefix_cache_mode: str | None
    kv_transfer: bool

    def __post_init__(self) -> None:
        for name, least in (("tp", 1), ("speculative_tokens", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ArgumentError(name, f"an integer of at least {least}", repr(value))
        if self.prefix_cache_mode not in (None, *CACHE_MODES):
            raise ArgumentError("prefix_cache_mode", f"None or one of {', '.join(CACHE_MODES)}",
                                repr(self.prefix_cache_mode))


def read_state_dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype that the user asks for; None for None and ``"auto"``.

    Raises:
        ArgumentError: no dtype of a checkpoint.
    """
    if value is None or value == "auto":
        return None
    dtype = STATE_DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else value
    if dtype not in STATE_DTYPES.values():
        raise ArgumentError("state_dtype", f"one of {', '.join(STATE_DTYPES)}, auto or None", repr(value))
    return dtype


def refuse_rounding(state_dtype: torch.dtype, columns: int) -> None:
    """Refuse stochastic rounding of a checkpoint with rows of ``columns`` where there is none.

    Raises:
        ArgumentError, UnsupportedError: the reason.
    """
    if state_dtype == torch.float32:
        raise UnsupportedError("stochastic_rounding", "a float32 checkpoint is not rounded; use float16")
    check_columns(state_dtype, columns)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
