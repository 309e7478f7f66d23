"""The DFlash drafter: model, mask, attention, loss, checkpoint format, decoding. Knows no run, device or workflow."""
