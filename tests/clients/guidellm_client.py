"""guidellm: a small load on chats and on completions."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from report import KEY, MODEL, URL, check, main


def load(path: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "out.json")
        command = [
            str(Path(sys.executable).with_name("guidellm")), "run",
            "--backend", f"kind=openai_http,target={URL},model={MODEL},api_key={KEY},request_format={path}",
            "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6",
            "--tokenizer", f"kind=hf_auto,model={os.environ['ATOLL_MODEL_DIR']}",
            "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8", "--output", f"kind=json,path={out}",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        text = out.read_text()
        [run] = json.loads(text)["benchmarks"]
        totals = run["metrics"]["request_totals"]
        assert (totals["successful"], totals["errored"]) == (6, 0), totals


@check
def chats() -> None:
    load("/v1/chat/completions")


@check
def completions() -> None:
    load("/v1/completions")


if __name__ == "__main__":
    sys.exit(main())
