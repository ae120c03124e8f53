"""What the user got wrong in flags, files or their combination; all problems at once."""

from collections.abc import Sequence


class ConfigError(ValueError):
    """One or more problems with the configuration, each a full sentence.

    Attributes:
        problems: the sentences, in the order in which they were found.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        if len(self.problems) == 1:
            super().__init__(self.problems[0])
        else:
            lines = "".join(f"\n  - {problem}" for problem in self.problems)
            super().__init__(f"{len(self.problems)} problems in the configuration:{lines}")


def sentence(text: str) -> str:
    """The text with a full stop, unless it ends with a question."""
    return text if text.endswith("?") else text + "."
