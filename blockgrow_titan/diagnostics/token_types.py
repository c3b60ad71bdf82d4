"""Token types by what a token's text is, so that any tokenizer gives the same answer for the same piece of text.

Each token id is decoded alone. In this order of precedence:

    document_boundary   the first token of a document, and the end-of-document token wherever it stands
    newline             the text has a line feed or carriage return and is otherwise white space
    punctuation         the text has no letter and no digit (Unicode categories L and N), but a punctuation mark or symbol
                        (P or S); line breaks and spaces may go with it
    regular             all others: words, numbers, spaces, combining marks alone

A byte-level piece that is no whole character decodes to U+FFFD: what it belongs to is unknown, and it is regular.
"""

import unicodedata
from collections.abc import Sequence

from torchtitan.components.tokenizer import HuggingFaceTokenizer

TOKEN_TYPES = ("document_boundary", "newline", "punctuation", "regular")
DOCUMENT_BOUNDARY, NEWLINE, PUNCTUATION, REGULAR = range(len(TOKEN_TYPES))
_NOT_A_CHARACTER = "\ufffd"


def type_of_text(text: str) -> int:
    """``NEWLINE``, ``PUNCTUATION`` or ``REGULAR``, for the decoded text of a token."""
    if _NOT_A_CHARACTER in text:
        return REGULAR
    if text.isspace():
        return NEWLINE if "\n" in text or "\r" in text else REGULAR
    majors = {unicodedata.category(character)[0] for character in text}
    return PUNCTUATION if majors & {"P", "S"} and not majors & {"L", "N"} else REGULAR


class TokenTyper:
    """The types of a document's tokens.

    Args:
        tokenizer: torchtitan's tokenizer of the data.
        end_of_document_id: The token that ends documents.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer, end_of_document_id: int) -> None:
        self.tokenizer = tokenizer
        self.known = {end_of_document_id: DOCUMENT_BOUNDARY}

    def __call__(self, document: Sequence[int]) -> list[int]:
        """An index into ``TOKEN_TYPES`` for each token id of one document, which starts with its first token."""
        types = [self._type_of_id(token_id) for token_id in document]
        return [DOCUMENT_BOUNDARY, *types[1:]] if types else []

    def _type_of_id(self, token_id: int) -> int:
        if token_id not in self.known:
            text = self.tokenizer.tokenizer.decode([token_id], skip_special_tokens=False)
            self.known[token_id] = type_of_text(text)
        return self.known[token_id]
