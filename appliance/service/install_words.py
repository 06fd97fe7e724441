"""What an install does, in words: its steps, and each item of its plan. For every front end."""

from installer.base.i18n import t

STEPS = {
    "discover": t("discover"), "verify": t("verify"), "preflight": t("preflight"), "licence": t("licence"),
    "plan": t("plan"), "stage": t("stage"), "units": t("units"), "switch": t("switch"), "start": t("start"),
    "smoke": t("smoke"), "commit": t("commit"), "rollback": t("rollback"),
}  # fmt: skip
DEEDS = {
    "create": t("create"), "replace": t("replace"), "keep": t("keep"), "start": t("start"), "restart": t("restart"),
    "remove": t("remove"),
}  # fmt: skip
KINDS = {
    "directory": t("directory"), "file": t("file"), "symlink": t("symlink"), "model": t("model"),
    "process": t("process"), "port": t("port"), "user": t("user"), "group": t("group"), "unit": t("unit"),
}  # fmt: skip
