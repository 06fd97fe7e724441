"""The table [preset] of the answers. Apart from what resolves it: reading answers must not load PyTorch."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Text = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Reason = Annotated[str, StringConstraints(min_length=3, max_length=500)]


class PresetAnswers(BaseModel):
    """What the models are used for. `names` gives a model of that name another preset; `skip` says why none is used."""

    model_config = ConfigDict(extra="forbid")

    workload: Text = Field(default="chat", description="What the models are used for: atoll presets lists the uses.")
    names: dict[str, Text] = Field(default_factory=dict, description="Model's name -> MODEL/USE, instead of the above.")
    skip: Reason | None = Field(default=None, description="Why the engine's own defaults are used.")
