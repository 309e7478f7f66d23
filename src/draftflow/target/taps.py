"""Which target layers the drafter sees."""

from draftflow.errors import DraftflowError


def tap_layers(num_hidden_layers: int, taps: int) -> list[int]:
    """Indices (from 0) of `taps` target layers, spread evenly from the second to the third from last.

    id_i = round(1 + i (T - 4) / (n - 1)), i = 0..n-1, for T layers and n taps; [T // 2] for one tap
    (PyPI's `dflash`). T = 36, n = 5 gives [1, 9, 17, 25, 33].

    Raises:
        DraftflowError: the target has too few layers for that many different taps.
    """
    if taps == 1:
        return [num_hidden_layers // 2]
    span = num_hidden_layers - 4
    layers = [round(1 + index * span / (taps - 1)) for index in range(taps)]
    if span < 0 or len(set(layers)) < taps:
        raise DraftflowError(
            f"A target of {num_hidden_layers} layers has no {taps} different layers to tap evenly.",
            "Lower drafter.taps, or name the layers in drafter.target_layers.",
            "drafter.taps",
        )
    return layers
