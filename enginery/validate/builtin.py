"""Questions to compare a question-answering model on when no data are given.

>>> QUESTIONS[0][0]
'When is the museum closed?'
"""

from __future__ import annotations

from enginery.runtime.builtin_inputs import SENTENCES

QUESTION = "When is the museum closed?"
CONTEXT = (
    "The museum stands on the north bank of the river. It is closed on Mondays, but its garden "
    "stays open every day until nine in the evening, and entry to both is free for children."
)
QUESTIONS = tuple((QUESTION, context) for context in (CONTEXT, *SENTENCES))
"""(question, context); one context has the answer, the others have none."""
