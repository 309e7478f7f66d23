"""draftflow: reproducible training of DFlash draft models."""
