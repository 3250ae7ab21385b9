"""The bytes of a long command, for a progress bar. No torch."""


class Meter:
    """Counts the bytes of one part of a command after the other. This one shows nothing: commands show a bar."""

    def begin(self, what: str, total: int) -> None:
        """Begin a part. what: a verb, like "fetching". total: the bytes that it will move or read."""

    def add(self, size: int) -> None:
        """Count `size` more bytes. Called from any thread."""


SILENT = Meter()
