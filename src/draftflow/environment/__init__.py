"""The torch environment: which builds exist, locks, installation, fingerprint."""
