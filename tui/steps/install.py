"""Install: the plan first, then the tasks at work; afterwards what serves, and where."""

from appliance.service.words import t
from tui.steps.body import StepBody

NO_KEY = t("Nobody has seen the key of the endpoint: no terminal was there when it was made. F5 makes another one and "
           "shows it; nothing is restarted.")  # fmt: skip


class InstallBody(StepBody):
    STEP = "install"
    LEAD = t("First the plan, then the work, even without this terminal.")
    HELP = t(
        "Enter makes the plan and shows it: every file, service, port and user, with its size. Nothing is written "
        "before you agree.\n"
        "Then each task is listed as it runs, with its speed and the remaining time. F8 shows all messages.\n"
        "If the new release does not serve, the previous one is restored by itself.\n"
        "The key of the endpoint is shown once, at the end."
    )

    def detail(self) -> list[tuple[str, str]]:
        unseen = self.front.desk.key_is_unseen and self.state is not None and self.state.status == "green"
        return [("", NO_KEY), *super().detail()] if unseen else super().detail()

    def run_words(self) -> str:
        return t("Make the plan")

    def empty(self) -> str:
        return t("Nothing is written before you have seen the plan and said yes.")
