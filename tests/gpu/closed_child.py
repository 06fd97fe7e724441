"""Starts the engine on random weights in a closed process, generates tokens, and prints what it did as JSON.

    python closed_child.py MODEL DEVICE STARTED BLOCK

STARTED: time.time() when the process was asked for. BLOCK: 1 if connections are to be refused here, because no network
namespace does it. Started by test_gpu_closed_start.py.
"""

import json
import os
import sys
import time

MODEL, DEVICE, STARTED, BLOCK = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4] == "1"
programs: list[list[str]] = []
connections: list[str] = []


def watch(event: str, arguments: tuple) -> None:
    """Notes every program that is started and every address that is asked for."""
    if event in ("subprocess.Popen", "os.posix_spawn", "os.exec"):
        words = [os.fsdecode(word) for word in arguments[1]]
        if not programs or programs[-1] != words:  # Popen may go by way of posix_spawn
            programs.append(words)
    elif event in ("os.system", "pty.spawn"):
        programs.append([str(arguments[0])])
    elif event in ("socket.connect", "socket.sendto", "socket.getaddrinfo"):
        address = arguments[0] if event == "socket.getaddrinfo" else arguments[1]
        if event == "socket.getaddrinfo" or isinstance(address, tuple):  # a Unix socket's address is a path
            connections.append(f"{event} {address}")
            if BLOCK:
                raise PermissionError(f"{event} {address}: there is no network here")


sys.addaudithook(watch)

from engine import LLM, SamplingParams  # noqa: E402 - under the eyes of the watch

prompt = {"prompt_token_ids": [5, 7, 11, 13] * 8}
llm = LLM(
    model=MODEL, device=DEVICE, load_format="dummy", skip_tokenizer_init=True, max_num_seqs=16,
    max_num_batched_tokens=256, kv_cache_memory_bytes=64 << 20, gpu_memory_utilization=0.3,
)  # fmt: skip
ready = time.time() - STARTED
llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
first = time.time() - STARTED
params = SamplingParams(max_tokens=24, temperature=0.9, top_k=40, logprobs=2, seed=1, ignore_eos=True)
outputs = llm.generate([prompt] * 6, params, use_tqdm=False)
try:
    with open("/proc/self/net/dev", encoding="ascii") as file:
        interfaces = [line.split(":")[0].strip() for line in file if ":" in line]
except OSError:  # some sandboxes show none
    interfaces = []
print("REPORT " + json.dumps({
    "ready_s": ready, "first_token_s": first, "tokens": [len(output.outputs[0].token_ids) for output in outputs],
    "programs": programs, "connections": connections, "interfaces": interfaces,
    "cache": os.environ.get("TRITON_CACHE_DIR"), "on_path": os.listdir(os.environ["PATH"]),
}))  # fmt: skip
