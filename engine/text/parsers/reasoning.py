"""How models mark their reasoning. The names are those of vLLM's `--reasoning-parser`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """`label`: what the model writes at the beginning of the marked text to name the channel. `ending`: how templates
    close the reasoning."""

    opener: str
    closer: str
    label: str = ""
    ending: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        return self.opener, self.closer


THINK = ReasoningFormat("<think>", "</think>", ending="\n</think>\n\n")
REASONING_FORMATS = {
    "qwen3": THINK,
    "deepseek_r1": THINK,
    "gemma4": ReasoningFormat("<|channel>", "<channel|>", "thought\n", "\n<channel|>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", ending="[/THINK]"),
}
