"""Published peak rates of accelerators: the denominator of MFU.

Dense figures (data sheets often print the doubled one "with sparsity"), in TFLOP/s at the full power limit. A card with
a lower limit cannot reach them, which is its property and stays visible in the MFU. fp32 means without TF32.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    """`words`: all of them occur in the device's name as the driver prints it (lower case)."""

    words: tuple[str, ...]
    bf16: float
    fp8: float | None = None
    fp32: float | None = None
    source: str = ""


_NVIDIA = "vendor data sheet, dense"
_SURVEY = "stas00/ml-engineering, compute/accelerator table"

# More words first: the first match counts ("H100 PCIe" before "H100").
ACCELERATORS = (
    Accelerator(("gb300",), 2500, 5000, source=_SURVEY),
    Accelerator(("gb200",), 2500, 5000, source=_SURVEY + "; another table of the vendor says 2450"),
    Accelerator(("b300",), 2250, 4500, source=_SURVEY),
    Accelerator(("b200",), 2250, 4500, source=_SURVEY),
    Accelerator(("gh200",), 989, 1979, 67, source=_NVIDIA),
    Accelerator(("h200", "nvl"), 835, 1671, 60, source=_NVIDIA),
    Accelerator(("h200",), 989, 1979, 67, source=_NVIDIA),
    Accelerator(("h100", "pcie"), 756, 1513, 51, source=_NVIDIA),
    Accelerator(("h100", "nvl"), 835, 1671, 60, source=_NVIDIA),
    Accelerator(("h100",), 989, 1979, 67, source=_NVIDIA + "; SXM"),
    Accelerator(("h800",), 989, 1979, 67, source="an H100 SXM with slower links"),
    Accelerator(("h20",), 148, 296, 44, source=_NVIDIA),
    Accelerator(("a100",), 312, None, 19.5, source=_NVIDIA),
    Accelerator(("a800",), 312, None, 19.5, source="an A100 with slower links"),
    Accelerator(("l40s",), 362, 733, 91.6, source=_NVIDIA),
    Accelerator(("rtx 4090",), 165, 330, 82.6, source=_NVIDIA + "; fp32 accumulation"),
    Accelerator(("rtx 3090",), 71, None, 35.6, source=_NVIDIA + "; fp32 accumulation"),
    Accelerator(("mi355x",), 2500, 5000, source=_SURVEY),
    Accelerator(("mi325x",), 1307, 2614, source=_SURVEY),
    Accelerator(("mi300x",), 1307, 2614, source=_SURVEY),
    Accelerator(("mi250x",), 383, None, source=_SURVEY + "; both dies"),
)


def find_accelerator(device_name: str) -> Accelerator | None:
    """By the name that the driver prints ("NVIDIA H100 80GB HBM3"). None when unknown, or for a MIG slice of a card."""
    name = device_name.lower()
    if " mig " in f" {name} ":
        return None
    return next((a for a in ACCELERATORS if all(word in name for word in a.words)), None)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense peak of one device in FLOP/s for dtype "bf16", "fp16", "fp8" or "fp32"; None when not published here.

    None must end as "MFU n/a", never as a guess.
    """
    accelerator = find_accelerator(device_name)
    if accelerator is None:
        return None
    rate = {"bf16": accelerator.bf16, "fp16": accelerator.bf16, "fp8": accelerator.fp8, "fp32": accelerator.fp32}
    tera = rate.get(dtype)
    return tera * 1e12 if tera else None
