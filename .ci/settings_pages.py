"""Write docs/en/settings.md and docs/ko/settings.md from the declarations of the settings. For developers.

    .venv/bin/python .ci/settings_pages.py

Korean comes from the same catalogue as `--help`: run installer/locale/update.py first when a text has changed.
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from engine.config import EngineConfig
from engine.server.settings.flag_parser import help_of
from engine.server.settings.options import EngineOptions, GatewayOptions, ServeOptions
from engine.server.settings.vllm_flags import ONLY_ONE, REFUSED_SWITCHES, REFUSED_VALUES
from engine.setting import Setting, flag_of, settings_of, value_type
from installer.base.i18n import is_text, looked_up, told

WORDS = {
    "en": {
        "title": "Every setting", "flag": "Flag", "bounds": "Bounds", "variable": "Variable", "meaning": "Meaning",
        "why": "Why it is refused",
        "about": "Made from the code by `.ci/settings_pages.py`. A flag without its dashes is a key of the TOML "
                 "table. The command line wins over the environment, and that over the file. The bounds of the "
                 "endpoint are in [Limits](serve.md#limits).",
        "model": "The model and its engine: `[serve]`, `[engine]`, `[models.NAME]`",
        "model-note": "For `atoll serve` each is also a variable: `ATOLL_SERVE_` and the flag in capitals, such as "
                      "`ATOLL_SERVE_MAX_NUM_SEQS=8`. An engine of its own reads no variables: its gateway must see "
                      "the same settings.",
        "serve": "`atoll serve`: `[serve]`", "gateway": "`atoll gateway`: `[gateway]`", "engine": "`atoll engine`",
        "refused": "Flags of vLLM that are refused",
    },
    "ko": {
        "title": "모든 설정", "flag": "플래그", "bounds": "범위", "variable": "환경 변수", "meaning": "의미",
        "why": "거부하는 이유",
        "about": "`.ci/settings_pages.py`가 코드에서 만든 문서입니다. 줄표를 뺀 플래그 이름이 TOML 표의 키입니다. "
                 "명령줄이 환경 변수보다, 환경 변수가 파일보다 우선합니다. "
                 "엔드포인트의 한도는 [한도](serve.md#한도)에 있습니다.",
        "model": "모델과 엔진: `[serve]`, `[engine]`, `[models.이름]`",
        "model-note": "`atoll serve`에서는 환경 변수로도 줄 수 있습니다. `ATOLL_SERVE_` 뒤에 플래그를 대문자로 적습니다"
                      "(`ATOLL_SERVE_MAX_NUM_SEQS=8`). 따로 실행하는 엔진은 환경 변수를 읽지 않습니다. "
                      "게이트웨이가 같은 설정을 보아야 하기 때문입니다.",
        "serve": "`atoll serve`: `[serve]`", "gateway": "`atoll gateway`: `[gateway]`", "engine": "`atoll engine`",
        "refused": "거부하는 vLLM 플래그",
    },
}


def page(language: str) -> str:
    words = WORDS[language]

    def said(text: str) -> str:
        return (told(text, language) if is_text(text) else looked_up(text, language)).replace("|", r"\|")

    def table(cls: type, variables: str = "") -> list[str]:
        head = [words["flag"], words["bounds"], *([words["variable"]] if variables else []), words["meaning"]]
        rows = []
        for name, (field, declared) in settings_of(cls).items():
            if declared.hidden:
                continue
            flag = flag_of(name, declared)
            row = [", ".join(f"`{flag}`" for flag in (flag, *declared.aliases)), bounds(field.type, declared)]
            if variables:
                variable = variables + flag[2:].replace("-", "_").upper()
                row.append("" if declared.line_only else f"`{variable}`")
            rows.append([*row, said(help_of(declared, field.default))])
        return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]

    refused = {f"--{name}": why for name, why in {**REFUSED_SWITCHES, **REFUSED_VALUES}.items()}
    refused |= {names[0]: why for names, why in ONLY_ONE.items()}
    lines = [
        f"# {words['title']}", "", words["about"], "",
        f"## {words['model']}", "", words["model-note"], "", *table(EngineConfig), "",
        f"## {words['serve']}", "", *table(ServeOptions, "ATOLL_SERVE_"), "",
        f"## {words['gateway']}", "", *table(GatewayOptions, "ATOLL_GATEWAY_"), "",
        f"## {words['engine']}", "", *table(EngineOptions), "",
        f"## {words['refused']}", "", f"| {words['flag']} | {words['why']} |", "| --- | --- |",
        *(f"| `{flag}` | {said(why)} |" for flag, why in refused.items()),
    ]
    return "\n".join(lines) + "\n"


def bounds(annotation: Any, declared: Setting) -> str:
    words = value_type(annotation)[1]
    if isinstance(declared.choices, dict) or (words and not declared.size):
        return ", ".join(f"`{word}`" for word in declared.choices or words)
    if isinstance(declared.choices, tuple):
        return ", ".join(map(str, declared.choices))
    parts: list[Any] = [f"> {declared.above}" if declared.above is not None else None,
                        f"≥ {declared.at_least}" if declared.at_least is not None else None,
                        f"≤ {declared.at_most}" if declared.at_most is not None else None]
    return ", ".join(part for part in parts if part)


def main() -> None:
    for language in WORDS:
        (ROOT / "docs" / language / "settings.md").write_text(page(language), encoding="utf-8")


if __name__ == "__main__":
    main()
