"""The one exception that a user sees: what is wrong, where, and what to do."""


class DraftflowError(Exception):
    """A refusal that names its cause and its remedy; entry points print it without a traceback.

    Args:
        what: one sentence of what is wrong, with the offending value.
        remedy: one sentence of what to do.
        where: the file (and line), config key or command concerned, if there is one.
    """

    def __init__(self, what: str, remedy: str, where: str | None = None):
        self.what, self.remedy, self.where = what, remedy, where
        super().__init__(str(self))

    def parts(self) -> dict[str, str | None]:
        """What it was made from, to be raised again in another process."""
        return {"what": self.what, "remedy": self.remedy, "where": self.where}

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.what} {self.remedy}"
