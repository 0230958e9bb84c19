"""Ends and markers of answers that checkpoints of each family publish.

Facts of `tokenizer_config.json`, `generation_config.json` and the chat template of the checkpoint
that is named: ids and marks, not the templates' text. Ids that are not known for sure are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Published:
    """One checkpoint, which stands for its family.

    Attributes:
        user: how the template writes a user's message, `{}`; empty where there is no template.
        answer: what it opens an answer with.
        tools: marks that it writes where there are tools.
        ends: tokens that end an answer; the first is the tokenizer's own.
        marks: further added tokens.
        thinks: the template opens reasoning, so that an answer starts within it.
    """

    model_types: tuple[str, ...]
    checkpoint: str
    dialect: str
    user: str = ""
    answer: str = ""
    tools: str = ""
    ends: Mapping[str, int] = field(default_factory=dict)
    marks: Mapping[str, int] = field(default_factory=dict)
    thinks: bool = False

    @property
    def template(self) -> str:
        """A template with those marks in their places."""
        turn = self.user.replace("{}", "{{ m.content }}")
        return (
            f"{{% if tools %}}{self.tools}{{% endif %}}{{% for m in messages %}}{turn}"
            f"{{% endfor %}}{{% if add_generation_prompt %}}{self.answer}{{% endif %}}"
        )


CHATML = "<|im_start|>user\n{}<|im_end|>\n"
CHATML_ANSWER = "<|im_start|>assistant\n"
