"""A page that an extractor does not take."""


class Refused(Exception):
    """rule: of the drop ("extract.too_deep"). value: what was measured, for people."""

    def __init__(self, rule: str, value: str):
        super().__init__(f"{rule}: {value}")
        self.rule, self.value = rule, value
