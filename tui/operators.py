"""Two operators at one installation: which of them is in control. The other one sees the same screens."""

import asyncio
import contextvars
from typing import TYPE_CHECKING

from appliance.service.desk import Person
from appliance.service.words import t
from tui.dialogs.ask import Ask, Read
from tui.dialogs.seat import GiveWay, TakeOver

if TYPE_CHECKING:
    from tui.app import Wizard


class Operators:
    """This program's side of the seat (appliance/service/jobs/seat.py), which reports from a thread of its own."""

    def __init__(self, app: "Wizard") -> None:
        self.app = app

    def sit_down(self) -> None:
        """Take control, or watch the operator who has it."""
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()

        def asked(person: Person | None) -> None:
            loop.call_soon_threadsafe(self._asked, person, context=context)

        def changed() -> None:
            self._hand_over_job()
            loop.call_soon_threadsafe(self._changed, context=context)

        self.app.desk.sit_down(asked, changed)

    def ask_to_take_over(self) -> None:
        app = self.app
        other = app.desk.somebody_else()
        if other is None:
            app.note = t("You are already in control.")
            return

        def answered(yes: bool | None) -> None:
            if yes and app.desk.seat is not None:
                app.desk.seat.ask()
                app.note = t("Asked. If nobody answers for 60 seconds, you work here.")

        app.push_screen(TakeOver(app.say, other), answered)

    def _asked(self, person: Person | None) -> None:
        """`person` asks to take over. None: the request is settled."""
        if person is not None:
            self.app.push_screen(GiveWay(self.app.say, person), self._answer)
        else:
            for screen in [each for each in self.app.screen_stack if isinstance(each, GiveWay)]:
                screen.dismiss(None)

    def _answer(self, yes: bool | None) -> None:
        if yes is not None and self.app.desk.seat is not None:
            self.app.desk.seat.answer(yes)

    def _hand_over_job(self) -> None:
        """In the seat's thread: a terminal that hangs must not keep the job from its next front."""
        following, seat = self.app.following, self.app.desk.seat
        lost = seat is not None and not seat.held and not seat.refused
        if lost and following is not None and not following.is_watcher:
            following.hand_over()

    def _changed(self) -> None:
        """The seat was won, lost, or refused."""
        app, seat = self.app, self.app.desk.seat
        if seat is None:
            return
        app.watched = app.desk.somebody_else()
        if seat.refused:
            app.note, seat.refused = t("The other operator refused and stays in control."), False
        elif seat.held:
            app.note = t("You work here now.")
            if app.following is not None and app.following.is_watcher:
                app.following.abandoned, app.following = True, None  # and be the front of the same job
        else:
            app.note = t("Another operator works here now. You see everything.")
            for screen in [each for each in app.screen_stack[1:] if isinstance(each, Ask | Read)]:
                screen.dismiss(None)
        app.look_again()
