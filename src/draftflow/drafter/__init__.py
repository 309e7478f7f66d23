"""The DFlash drafter: model, mask, attention, loss, checkpoint format. Knows no files of a run, no devices, no workflow."""
