"""The right side: the body of the open step. A body is made when its step is first opened."""

import asyncio

from textual.containers import Container

from tui.steps.body import Body
from tui.steps.gpu import GpuBody
from tui.steps.install import InstallBody
from tui.steps.model import ModelBody
from tui.steps.pilot import PilotBody
from tui.steps.start import StartBody
from tui.steps.tune import TuneBody
from tui.steps.verify import VerifyBody

BODIES: tuple[type[Body], ...] = (StartBody, GpuBody, ModelBody, InstallBody, TuneBody, VerifyBody, PilotBody)


class Pane(Container):
    def __init__(self) -> None:
        super().__init__(id="pane")
        self.bodies: dict[int, Body] = {}
        self.current: Body | None = None
        self._lock = asyncio.Lock()

    async def open(self, position: int) -> Body:
        """The body of this step, which is on the screen when this returns."""
        async with self._lock:
            body = self.bodies.get(position)
            if body is None:
                body = self.bodies[position] = BODIES[position]()
                await self.mount(body)
            if self.current is not body:
                self.screen.set_focus(None)
                if self.current is not None:
                    self.current.display = False
                self.current = body
                body.display = True  # a class would make every style below match again: slow
                body.open()
            return body
