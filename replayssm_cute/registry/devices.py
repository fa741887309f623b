"""GPU products the registry knows by name, and which may stand in for which. Asks no driver."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from replayssm_cute.arch import Arch


@dataclass(frozen=True)
class Product:
    """One GPU product.

    Attributes:
        capability: CUDA compute capability, (0, 0) for AMD.
        donors: products whose tuned rows may stand in where this one has none, nearest first.
        kind: ``"cuda"`` or ``"hip"``.
    """

    capability: tuple[int, int]
    donors: tuple[str, ...] = ()
    kind: str = "cuda"


# Rows are lent to parts with the same multiprocessor and at least about as little bandwidth per
# multiprocessor. B300 crosses a capability (10.0 to 10.3) on purpose: the kernels use the same
# instructions on both. Nothing is lent downwards from an H100 to an H200, or from Hopper to
# Blackwell.
PRODUCTS = {
    "A100": Product((8, 0)),
    "L40S": Product((8, 9)),
    "H100": Product((9, 0), ("H200",)),
    "H200": Product((9, 0)),
    "GH200": Product((9, 0), ("H200",)),
    "B200": Product((10, 0)),
    "GB200": Product((10, 0), ("B200",)),
    "B300": Product((10, 3), ("B200",)),
    "GB300": Product((10, 3), ("B300", "B200")),
    "MI300X": Product((0, 0), kind="hip"),
    "MI355X": Product((0, 0), kind="hip"),
}


def product_of(device_name: str) -> str | None:
    """The product in a device name such as ``NVIDIA_H100_80GB_HBM3``; None where it is not known.

    A MIG slice is no product: it has a part of the multiprocessors and of the bandwidth.
    """
    words = re.split("[ _-]", device_name)
    if "MIG" in words:
        return None
    return next((word for word in words if word in PRODUCTS), None)


def arch_by_name(device_name: str) -> Arch | None:
    """The architecture behind a device name, without a device; None where it is not known.

    ``"NVIDIA_B200"``, ``"NVIDIA B200"`` and ``"B200"`` mean the same. The multiprocessor count
    is 0, because a name does not tell it.
    """
    product = product_of(device_name)
    if product is None:
        return None
    known = PRODUCTS[product]
    if device_name == product:
        device_name = ("NVIDIA_" if known.kind == "cuda" else "AMD_Instinct_") + product
    return Arch(known.kind, known.capability, device_name.replace(" ", "_"))


def nearest(device_name: str, tuned_devices: Iterable[str]) -> str | None:
    """The device whose rows serve ``device_name``, out of those that have rows.

    The device itself; else another name of the same product; else the product's donors in their
    order; within one product the first name in alphabetical order.
    """
    names = sorted(tuned_devices)
    if device_name in names:
        return device_name
    product = product_of(device_name)
    if product is None:
        return None
    for wanted in (product, *PRODUCTS[product].donors):
        for name in names:
            if product_of(name) == wanted:
                return name
    return None
