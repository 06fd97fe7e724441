"""lm-eval on a local task: generation by chats, log-likelihoods by completions with the remote tokenizer."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from report import KEY, MODEL, URL, check, main

CASES = [{"question": f"The capital of {country} is", "choices": [right, wrong], "answer": 0}
         for country, right, wrong in (("France", " Paris", " Rome"), ("Italy", " Rome", " Paris"),
                                       ("Japan", " Tokyo", " Madrid"), ("Spain", " Madrid", " Tokyo"))]
TASK = """
task: capitals_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {output}
doc_to_text: "{{{{question}}}}"
{more}
"""
CHOICES = """doc_to_target: answer
doc_to_choice: choices
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]"""
ANSWERS = """doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, temperature: 0}
filter_list:
  - {name: first, filter: [{function: regex, regex_pattern: "(Paris|Rome|Tokyo|Madrid)"}, {function: take_first}]}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true}]"""


def score(model: str, arguments: str, kind: str, output: str, more: str, *flags: str) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        data, tasks, results = Path(directory, "data.jsonl"), Path(directory, "tasks"), Path(directory, "out")
        data.write_text("".join(f"{json.dumps(case)}\n" for case in CASES))
        tasks.mkdir()
        (tasks / "task.yaml").write_text(TASK.format(kind=kind, data=data, output=output, more=more))
        command = [str(Path(sys.executable).with_name("lm_eval")), "--model", model, "--model_args", arguments,
                   "--tasks", f"capitals_{kind}", "--include_path", str(tasks), "--output_path", str(results), *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        [found] = results.rglob("results_*.json")
        return json.loads(found.read_text())["results"][f"capitals_{kind}"]


@check
def log_likelihoods_by_local_completions() -> None:
    arguments = (f"model={MODEL},base_url={URL}/v1/completions,num_concurrent=2,max_length=2048,"
                 f"tokenizer_backend=remote,auth_token={KEY}")  # its tokenizer reads no environment
    found = score("local-completions", arguments, "choice", "multiple_choice", CHOICES)
    assert found["acc,none"] == 1.0, found


@check
def answers_by_local_chat_completions() -> None:
    arguments = f"model={MODEL},base_url={URL}/v1/chat/completions,num_concurrent=2"
    found = score("local-chat-completions", arguments, "chat", "generate_until", ANSWERS, "--apply_chat_template")
    assert "exact_match,first" in found, found


if __name__ == "__main__":
    sys.exit(main())
