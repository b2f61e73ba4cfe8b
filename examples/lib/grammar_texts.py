"""Texts for `jaxpaged.grammar.compile_text`."""

from jaxpaged.grammar import Control, FreeText, Grammar, OneOf, Part, Repeat

type Text = str | Grammar | Control | OneOf | Repeat | FreeText | tuple[Text, ...]
"""As in `jaxpaged.grammar.compile_text`."""

NOTHING = OneOf(())


def until(mark: Text) -> Text:
    """Free text up to and with its first mark."""
    return FreeText((Part(mark, is_last=True),), may_end=False)
